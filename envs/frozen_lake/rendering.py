"""Gymnasium's pictures of the lake, resized, at a cost that a rollout can afford.

A frame of Gymnasium takes over a millisecond to draw. Its cells do not overlap, and the pixels of a cell depend only
on its place, its tile and on whether the player stands there; so a picture is put together from cells that were cut
out of Gymnasium's own frames, and Gymnasium draws only when a cell has not been seen yet. Holds for Gymnasium >= 1.4,
where the player faces no direction.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vagen.common.environment import environment_defaults
from vagen.envs.frozen_lake.level import Level

# One lock for the process: SDL's display state is global.
_render_lock = threading.Lock()


class LakePainter:
    """Paints lakes of one size; shared by all episodes and threads of the process."""

    def __init__(self, size: int, cell_pixels: int) -> None:
        self._size = size
        self._cell_pixels = cell_pixels
        self._cells: dict[tuple[int, str, bool], NDArray[np.uint8]] = {}

    def paint(self, level: Level, player: int, render: Callable[[], NDArray[np.uint8]]) -> Image.Image:
        """The lake with the player on cell `player`, `size * cell_pixels` px square.

        `render` draws this very state: uint8 `[H, W, 3]`. It is called under a process-wide lock, and only when a
        cell is missing.
        """
        size, pixels = self._size, self._cell_pixels
        keys = [(cell, tile, cell == player) for cell, tile in enumerate(level.tiles)]
        if any(key not in self._cells for key in keys):
            self._cut_cells(keys, render)
        picture = np.empty((size, pixels, size, pixels, 3), np.uint8)
        for key in keys:
            row, column = divmod(key[0], size)
            picture[row, :, column] = self._cells[key]
        return Image.fromarray(picture.reshape(size * pixels, size * pixels, 3))

    def _cut_cells(self, keys: list[tuple[int, str, bool]], render: Callable[[], NDArray[np.uint8]]) -> None:
        with _render_lock:
            _initialise_display()
            frame = render()
        # Gymnasium's window is at most 512 px; what the cells do not fill of it stays black and is left out.
        side = frame.shape[1] // self._size
        # The art is made of square blocks, so the nearest pixel keeps their full contrast: at 14 px a cell the player
        # is 30 % further from bare ice and the goal 35 % (RMS of pixels) than with a box filter. A centre that falls
        # between two pixels takes the upper left one, which keeps more of the letters.
        nearest = ((2 * np.arange(self._cell_pixels) + 1) * side - 1) // (2 * self._cell_pixels)
        for key in keys:
            row, column = divmod(key[0], self._size)
            self._cells[key] = frame[(row * side + nearest)[:, None], column * side + nearest]


@lru_cache(maxsize=64)
def lake_painter(size: int, cell_pixels: int) -> LakePainter:
    return LakePainter(size, cell_pixels)


def _initialise_display() -> None:
    """Makes pygame's display usable without a screen, before Gymnasium would initialise it."""
    loaded = sys.modules.get("pygame")
    if loaded is not None and loaded.display.get_init():
        return
    # SDL would otherwise take SIGTERM for a window's close button: the actor could not be stopped.
    with environment_defaults({"SDL_VIDEODRIVER": "dummy", "SDL_NO_SIGNAL_HANDLERS": "1"}):
        import pygame

        pygame.display.init()

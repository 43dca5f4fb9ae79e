"""Lakes: random generation, shortest paths, and where the goal lies."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

# In the order of Gymnasium's action numbers.
ACTION_NAMES = ("Left", "Down", "Right", "Up")
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


@dataclass(frozen=True, slots=True)
class Level:
    """A lake in Gymnasium's letters (`S` start, `G` goal, `F` frozen, `H` hole).

    Cells are numbered row by row. `distances[cell]` is the number of moves to the goal on ice that does not slip,
    -1 for holes and for cells that cannot reach it.
    """

    rows: tuple[str, ...]
    start: int
    goal: int
    distances: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def tiles(self) -> str:
        return "".join(self.rows)

    @property
    def content(self) -> str:
        """What makes two levels the same level."""
        return "\n".join(self.rows)

    def optimal_actions(self, cell: int) -> tuple[str, ...]:
        """Every action that shortens the way to the goal by one move; none at the goal or in a hole."""
        wanted = self.distances[cell] - 1
        if wanted < 0:
            return ()
        return tuple(
            name
            for name, move in zip(ACTION_NAMES, _MOVES, strict=True)
            if (target := _moved(cell, move, self.size)) is not None and self.distances[target] == wanted
        )

    def goal_direction(self, cell: int) -> str:
        """Where the goal lies seen from a cell, rows first: `down right`; empty at the goal."""
        (row, column), (goal_row, goal_column) = divmod(cell, self.size), divmod(self.goal, self.size)
        words = []
        if goal_row != row:
            words.append("down" if goal_row > row else "up")
        if goal_column != column:
            words.append("right" if goal_column > column else "left")
        return " ".join(words)


def generate_level(seed: int, size: int, hole_probability: float) -> Level:
    """Random tiles, distinct random start and goal, drawn again until a path joins them.

    A pure function of its arguments in every process: `random.Random` seeded by an integer. Ends whatever the
    probability: a start next to the goal is solvable.
    """
    rng = random.Random(seed)
    num_cells = size * size
    while True:
        tiles = ["H" if rng.random() < hole_probability else "F" for _ in range(num_cells)]
        start, goal = int(rng.random() * num_cells), int(rng.random() * (num_cells - 1))
        goal += goal >= start
        tiles[start], tiles[goal] = "S", "G"
        distances = _distances(tiles, goal, size)
        if distances[start] > 0:
            rows = tuple("".join(tiles[row : row + size]) for row in range(0, num_cells, size))
            return Level(rows, start, goal, distances)


def _distances(tiles: list[str], goal: int, size: int) -> tuple[int, ...]:
    """Breadth-first search from the goal."""
    distances = [-1] * len(tiles)
    distances[goal] = 0
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for move in _MOVES:
            neighbour = _moved(cell, move, size)
            if neighbour is not None and distances[neighbour] < 0 and tiles[neighbour] != "H":
                distances[neighbour] = distances[cell] + 1
                queue.append(neighbour)
    return tuple(distances)


def _moved(cell: int, move: tuple[int, int], size: int) -> int | None:
    row, column = cell // size + move[0], cell % size + move[1]
    return row * size + column if 0 <= row < size and 0 <= column < size else None

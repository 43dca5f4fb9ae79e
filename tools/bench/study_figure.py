"""The study's figure as one SVG file that needs nothing else: success against staleness, every seed a dot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

__all__ = ["Line", "success_figure"]

_COLOURS = ("#1b6ca8", "#e07a1f", "#3c8d40", "#b8336a", "#6b5b95", "#7a7a7a")
_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT = 720, 48, 16, 14, 300
_LEGEND_LINE = 20


@dataclass(frozen=True, kw_only=True)
class Line:
    """One variant: success of each seed at each staleness."""

    title: str
    points: tuple[tuple[int, tuple[float, ...]], ...]


def success_figure(lines: Sequence[Line]) -> str:
    """Means joined by lines over equally spaced staleness; the y axis is success from 0 to 1."""
    stalenesses = sorted({staleness for line in lines for staleness, _ in line.points})
    height = _TOP + _PLOT + 44 + _LEGEND_LINE * len(lines)

    def x_of(staleness: int) -> float:
        place = (stalenesses.index(staleness) + 0.5) / len(stalenesses)
        return round(_LEFT + place * (_WIDTH - _LEFT - _RIGHT), 1)

    def y_of(success: float) -> float:
        return round(_TOP + (1 - success) * _PLOT, 1)

    parts = [Markup('<rect width="{}" height="{}" fill="#ffffff"/>').format(_WIDTH, height)]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(
            Markup('<line x1="{}" x2="{}" y1="{y}" y2="{y}" stroke="#e3e3e3"/>').format(
                _LEFT, _WIDTH - _RIGHT, y=y_of(tick)
            )
        )
        parts.append(_text(_LEFT - 8, y_of(tick) + 4, f"{tick:.1f}", "end"))
    parts += [_text(x_of(k), _TOP + _PLOT + 18, str(k), "middle") for k in stalenesses]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _TOP + _PLOT + 36, "staleness in versions; held-out success, dots are seeds", "middle"))
    for index, line in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_draw(line, colour, (index - (len(lines) - 1) / 2) * 5, x_of, y_of))
        y = _TOP + _PLOT + 56 + _LEGEND_LINE * index
        parts.append(Markup('<circle cx="{}" cy="{}" r="5" fill="{}"/>').format(_LEFT + 6, y - 4, colour))
        parts.append(_text(_LEFT + 18, y, line.title, "start"))
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}" '
        'font-family="sans-serif" font-size="12">{}</svg>\n'
    ).format(_WIDTH, height, _WIDTH, height, Markup("").join(parts))


def _draw(
    line: Line, colour: str, shift: float, x_of: Callable[[int], float], y_of: Callable[[float], float]
) -> Markup:
    means = " ".join(f"{x_of(k) + shift},{y_of(sum(values) / len(values))}" for k, values in line.points)
    drawn = Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2"/>').format(means, colour)
    for staleness, values in line.points:
        for value in values:
            drawn += Markup('<circle cx="{}" cy="{}" r="3" fill="{}" fill-opacity=".7"/>').format(
                x_of(staleness) + shift, y_of(value), colour
            )
    return drawn


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}" fill="#333333">{}</text>').format(x, y, anchor, text)

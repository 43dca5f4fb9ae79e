"""Charts as inline SVG: no script, no network, colours from the page's CSS variables `--c0` to `--c7`; and as a file.

Pure functions of numbers; every mark carries a `<title>`, which browsers show as its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Point = tuple[float, float]

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 16, 40
_TITLE_HEIGHT = 24
_COLOURS = ("#2563c9", "#d9622b", "#0f8a6d", "#8a4fc9", "#c23b72", "#8a7a12", "#2a8fb0", "#6b7280")
"""Of a file that stands alone; a page has its own."""
_NUM_COLOURS = len(_COLOURS)
_FIGURE_STYLE = (
    "text{font-size:11px;fill:#555}.title{font-size:13px;font-weight:600;fill:#222}.name{font-size:11px}"
    ".tick,.label{text-anchor:middle}.tick.y{text-anchor:end}.grid{stroke:#e3e3e3}"
    ".line{fill:none;stroke-width:2}.dot{fill:currentColor;stroke:none}.hit{fill:transparent}"
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart, with an optional band around it."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float]] = ()
    """Low and high of each point."""
    marked: bool = False
    """Draw a dot at each point."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Maps data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return round(_LEFT + across * width, 1), round(_TOP + (1 - up) * height, 1)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str = "learner step",
    y_range: tuple[float, float] | None = None,
    target: float | None = None,
) -> Markup:
    """Lines over a common x axis; points that are not finite are gaps. Empty when nothing is to be drawn."""
    series = _drawable(series)
    if not series:
        return Markup("")
    return _svg(_line_parts(series, x_label, y_range, target)) + legend([one.name for one in series])


def line_figure(panels: Mapping[str, Sequence[Series]], *, x_label: str = "learner step") -> str:
    """Titled line charts below each other as one SVG file that needs no page. Empty when nothing is to be drawn."""
    drawn: list[Markup] = []
    place = Markup('<g transform="translate(0 {})">{}</g>')
    for title, series in panels.items():
        series = _drawable(series)
        if not series:
            continue
        names = [Markup('<text class="title" x="{}" y="16">{}</text>').format(_LEFT, title)]
        if len(series) > 1:
            names += [
                Markup('<text class="name f{}" x="{}" y="16">{}</text>').format(
                    index % _NUM_COLOURS, _LEFT + 90 + 80 * index, one.name
                )
                for index, one in enumerate(series)
            ]
        chart = Markup("").join(_line_parts(series, x_label, None, None))
        content = Markup("").join(names) + place.format(_TITLE_HEIGHT, chart)
        drawn.append(place.format(len(drawn) * (HEIGHT + _TITLE_HEIGHT), content))
    if not drawn:
        return ""
    size = (WIDTH, len(drawn) * (HEIGHT + _TITLE_HEIGHT))
    colours = Markup("").join(
        Markup(".s{0}{{stroke:{1};color:{1}}}.f{0}{{fill:{1}}}").format(index, colour)
        for index, colour in enumerate(_COLOURS)
    )
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" '
        'font-family="sans-serif"><style>{2}{3}</style><rect width="{0}" height="{1}" fill="#ffffff"/>{4}</svg>\n'
    ).format(*size, Markup(_FIGURE_STYLE), colours, Markup("").join(drawn))


def _drawable(series: Sequence[Series]) -> list[Series]:
    return [one for one in map(_finite, series) if one.points]


def _line_parts(
    series: Sequence[Series], x_label: str, y_range: tuple[float, float] | None, target: float | None
) -> list[Markup]:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [v for one in series for pair in one.band for v in pair]
    if target is not None:
        ys.append(target)
    y_ticks = ticks(*(y_range or (min(ys), max(ys))))
    frame = _Frame(x=(min(xs), max(xs)), y=(y_ticks[0], y_ticks[-1]))
    parts = [_axes(frame, y_ticks, x_label)]
    if target is not None:
        (x0, y), (x1, _) = frame.at(frame.x[0], target), frame.at(frame.x[1], target)
        parts.append(
            Markup('<line class="target" x1="{}" x2="{}" y1="{}" y2="{}"><title>target {}</title></line>').format(
                x0, x1, y, y, number(target)
            )
        )
    parts += [_line(frame, one, index) for index, one in enumerate(series)]
    return parts


def bar_chart(bars: Mapping[str, float], *, x_label: str) -> Markup:
    """Vertical bars, each with its share of the total. Empty when nothing is to be drawn."""
    total = sum(bars.values())
    if not bars or total <= 0:
        return Markup("")
    y_ticks = ticks(0, max(bars.values()))
    frame = _Frame(x=(0, len(bars)), y=(0, y_ticks[-1]))
    parts = [_axes(frame, y_ticks, x_label, numbered_x=False)]
    for index, (name, value) in enumerate(bars.items()):
        x0, y0 = frame.at(index + 0.14, value)
        x1, y1 = frame.at(index + 0.86, 0)
        parts.append(
            Markup(
                '<rect class="bar" x="{}" y="{}" width="{}" height="{}" rx="2"><title>{}: {} ({})</title></rect>'
            ).format(x0, y0, round(x1 - x0, 1), round(y1 - y0, 1), name, number(value), f"{value / total:.1%}")
        )
        middle = round((x0 + x1) / 2, 1)
        parts.append(Markup('<text class="tick" x="{}" y="{}">{}</text>').format(middle, y1 + 16, name))
        parts.append(
            Markup('<text class="value" x="{}" y="{}">{}</text>').format(middle, y0 - 3, f"{value / total:.0%}")
        )
    return _svg(parts)


def share_bars(rows: Mapping[str, Mapping[str, float]], rest: str = "other") -> Markup:
    """One stacked horizontal bar a row, each part a share of 1; what is missing to 1 is `rest`."""
    parts = []
    for name, shares in rows.items():
        parts.append(Markup('<div class="share-name">{}</div><div class="share-bar">').format(name))
        ordered = sorted(((what, share) for what, share in shares.items() if share > 0), key=lambda item: -item[1])
        used = sum(share for _, share in ordered)
        scale = 1 / max(used, 1.0)
        entries = [*ordered, (rest, 1 - used)] if used < 1 else ordered
        for index, (what, share) in enumerate(entries):
            colour = "rest" if what == rest else f"f{index % _NUM_COLOURS}"
            shown = f"{what} {share:.0%}" if share * scale > 0.09 else ""
            parts.append(
                Markup('<span class="{}" style="width:{}%" title="{} {}">{}</span>').format(
                    colour, round(100 * share * scale, 2), what, f"{share:.1%}", shown
                )
            )
        parts.append(Markup("</div>"))
    return Markup('<div class="shares">{}</div>').format(Markup("").join(parts)) if parts else Markup("")


def interval_chart(rows: Sequence[tuple[str, float, tuple[float, float]]], targets: Mapping[str, float]) -> Markup:
    """Proportions with their intervals on one axis from 0 to 1, and named target lines."""
    height = 46 * len(rows) + 40
    left, right = 70, 20
    width = 720

    def x_of(value: float) -> float:
        return round(left + value * (width - left - right), 1)

    parts = []
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(
            Markup('<line class="grid" x1="{0}" x2="{0}" y1="18" y2="{1}"/>').format(x_of(tick), height - 20)
            + Markup('<text class="tick" x="{}" y="{}">{}</text>').format(x_of(tick), height - 6, f"{tick:.0%}")
        )
    for name, value in targets.items():
        parts.append(
            Markup('<line class="target" x1="{0}" x2="{0}" y1="18" y2="{1}"/>').format(x_of(value), height - 20)
            + Markup('<text class="tick" x="{}" y="12">{}</text>').format(x_of(value), name)
        )
    for index, (name, value, (low, high)) in enumerate(rows):
        y = 42 + 46 * index
        parts.append(
            Markup('<text class="row-name" x="{}" y="{}">{}</text>').format(left - 10, y + 5, name)
            + Markup('<line class="whisker s{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                index % _NUM_COLOURS, x_of(low), x_of(high), y, y
            )
            + Markup('<circle class="dot s{}" cx="{}" cy="{}" r="7"><title>{} [{}, {}]</title></circle>').format(
                index % _NUM_COLOURS, x_of(value), y, f"{value:.3f}", f"{low:.3f}", f"{high:.3f}"
            )
        )
    return Markup('<svg viewBox="0 0 {} {}" class="chart wide" role="img">{}</svg>').format(
        width, height, Markup("").join(parts)
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `[low, high]`, about `count` intervals, at least two."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A number for an axis or a table: at most four significant digits, `k` and `M` for large ones."""
    if value == 0:
        return "0"
    for bound, unit, suffix in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= bound:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.2g}"


def legend(names: Sequence[str]) -> Markup:
    """Coloured names below a chart; none for a single line."""
    if len(names) < 2:
        return Markup("")
    items = Markup("").join(
        Markup('<span><i class="f{}"></i>{}</span>').format(index % _NUM_COLOURS, name)
        for index, name in enumerate(names)
    )
    return Markup('<div class="legend">{}</div>').format(items)


def _finite(series: Series) -> Series:
    keep = [index for index, (_, y) in enumerate(series.points) if math.isfinite(y)]
    return Series(
        name=series.name,
        points=[series.points[index] for index in keep],
        band=[series.band[index] for index in keep] if series.band else (),
        marked=series.marked,
    )


def _line(frame: _Frame, series: Series, colour: int) -> Markup:
    colour %= _NUM_COLOURS
    parts = Markup("")
    if series.band:
        upper = [frame.at(x, high) for (x, _), (_, high) in zip(series.points, series.band, strict=True)]
        lower = [frame.at(x, low) for (x, _), (low, _) in zip(series.points, series.band, strict=True)]
        outline = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
        parts += Markup('<polygon class="band s{}" points="{}"/>').format(colour, outline)
    pixels = [frame.at(x, y) for x, y in series.points]
    if len(pixels) > 1:
        parts += Markup('<polyline class="line s{}" points="{}"/>').format(
            colour, " ".join(f"{x},{y}" for x, y in pixels)
        )
    radius = 3.5 if series.marked or len(pixels) == 1 else 0
    for (px, py), (x, y) in zip(pixels, series.points, strict=True):
        if radius:
            parts += Markup('<circle class="dot s{}" cx="{}" cy="{}" r="{}"/>').format(colour, px, py, radius)
        # A larger transparent mark is what the pointer finds.
        parts += Markup('<circle class="hit" cx="{}" cy="{}" r="7"><title>{} at {}: {}</title></circle>').format(
            px, py, series.name, number(x), number(y)
        )
    return parts


def _axes(frame: _Frame, y_ticks: Sequence[float], x_label: str, *, numbered_x: bool = True) -> Markup:
    parts = []
    for tick in y_ticks:
        x0, y = frame.at(frame.x[0], tick)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(x0, WIDTH - _RIGHT, y, y)
            + Markup('<text class="tick y" x="{}" y="{}">{}</text>').format(_LEFT - 6, y + 4, number(tick))
        )
    if numbered_x:
        for tick in ticks(*frame.x):
            if frame.x[0] <= tick <= frame.x[1]:
                x, _ = frame.at(tick, frame.y[0])
                parts.append(
                    Markup('<text class="tick" x="{}" y="{}">{}</text>').format(x, HEIGHT - _BOTTOM + 16, number(tick))
                )
    parts.append(
        Markup('<text class="label" x="{}" y="{}">{}</text>').format((WIDTH + _LEFT) / 2, HEIGHT - 4, escape(x_label))
    )
    return Markup("").join(parts)


def _svg(parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" class="chart" role="img">{}</svg>').format(
        WIDTH, HEIGHT, Markup("").join(parts)
    )

"""Plots as SVG: columns over time, bars, and strips of percentiles on a scale of decades.

Colours and sizes of text are classes that the page's style decides, so that one picture serves
light and dark. Text that came from outside is escaped. Nothing is loaded, nothing runs.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pulque.pipeline.report.tables import counted, duration
from pulque.settings.foreign import escaped

__all__ = ["Column", "Strip", "bars", "columns", "strips", "text_of"]

_WIDTH = 860
_LEFT = 78
_NAMES = 250
"""Room for names at the left."""
_RIGHT = 18
_PLOT_HEIGHT = 200
_ROW = 26
_LONGEST_NAME = 36
_SERIES = 6
"""So many colours there are."""


def text_of(text: str) -> str:
    """Escape text that came from outside, for HTML and SVG."""
    return html.escape(escaped(text), quote=True)


@dataclass(frozen=True, slots=True)
class Column:
    """What lies above one point of time: parts on top of each other, in the order of series."""

    label: str
    parts: Sequence[float]


@dataclass(frozen=True, slots=True)
class Strip:
    """Percentiles of one name, rising, in milliseconds."""

    name: str
    values: Mapping[str, float]


# ── columns ────────────────────────────────────────────────────────────────────────────────


def columns(
    title: str, found: Sequence[Column], series: Sequence[str] = (), *, is_size: bool = False
) -> str:
    """Draw columns over time, and a legend if there is more than one series.

    Args:
        title: What is shown; read out by screen readers.
        found: Evenly spaced in time, without holes.
        series: What the parts of a column are, at most six.
        is_size: Whether values are bytes.
    """
    has_legend = len(series) > 1
    lines = list(_legend(series)) if has_legend else []
    top = 16 + (22 * _legend_rows(series) if has_legend else 0)
    bottom = top + _PLOT_HEIGHT
    highest = max((sum(each.parts) for each in found), default=0)
    ticks = _binary_ticks(highest) if is_size else _ticks(highest)
    scale = _PLOT_HEIGHT / (ticks[-1] or 1)
    for tick in ticks:
        y = bottom - tick * scale
        lines.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"))
        lines.append(_text(_LEFT - 8, y + 4, _short(tick, is_size=is_size), "axis end"))
    pitch = (_WIDTH - _LEFT - _RIGHT) / max(len(found), 1)
    wide = min(max(pitch * 0.8, pitch - 3, 0.6), 64)
    for at, each in enumerate(found):
        x = _LEFT + pitch * at + (pitch - wide) / 2
        lines += _column(each, x, wide, bottom, scale)
    lines += _time_labels(found, pitch, bottom)
    return _svg(title, bottom + 26, lines)


def _column(column: Column, x: float, wide: float, bottom: float, scale: float) -> Iterator[str]:
    y = bottom
    for at, part in enumerate(column.parts):
        height = part * scale
        if height <= 0:
            continue
        y -= height
        says = f"{column.label}: {counted(part)}"
        yield _rect(x, y, wide, height, f"s{at % _SERIES}", says)


def _time_labels(found: Sequence[Column], pitch: float, bottom: float) -> Iterator[str]:
    every = max(math.ceil(110 / pitch), 1) if found else 1
    for at in range(0, len(found), every):
        x = _LEFT + pitch * (at + 0.5)
        yield _line(x, bottom, x, bottom + 4, "tick")
        anchor = "axis middle" if x + 45 < _WIDTH else "axis end"
        yield _text(x, bottom + 18, found[at].label, anchor)


def _legend_rows(series: Sequence[str]) -> int:
    return math.ceil(len(series) / 3)


def _legend(series: Sequence[str]) -> Iterator[str]:
    for at, name in enumerate(series):
        x, y = _LEFT + (at % 3) * 255, 4 + 22 * (at // 3)
        yield _rect(x, y, 11, 11, f"s{at % _SERIES}", name)
        yield _text(x + 17, y + 10, _cut(name, 32), "name")


# ── bars and strips ────────────────────────────────────────────────────────────────────────


def bars(title: str, found: Sequence[tuple[str, float]]) -> str:
    """Draw a bar for each name, with its count behind it."""
    highest = max((value for _, value in found), default=0) or 1
    room = _WIDTH - _NAMES - _RIGHT - 80
    lines = []
    for at, (name, value) in enumerate(found):
        y = 6 + at * _ROW
        lines.append(_name(name, y))
        lines.append(_rect(_NAMES, y + 4, max(value / highest * room, 1), _ROW - 10, "s0", name))
        x = _NAMES + value / highest * room + 8
        lines.append(_text(x, y + 17, counted(value), "axis"))
    return _svg(title, len(found) * _ROW + 14, lines)


def strips(title: str, found: Sequence[Strip]) -> str:
    """Draw percentiles of each name as dots on one scale of decades."""
    values = [max(value, 1) for each in found for value in each.values.values()]
    first = math.floor(math.log10(min(values, default=1)))
    last = max(math.ceil(math.log10(max(values, default=10))), first + 1)
    scale = (_WIDTH - _NAMES - _RIGHT - 40) / (last - first)

    def across(value: float) -> float:
        return _NAMES + 10 + (math.log10(max(value, 1)) - first) * scale

    top, bottom = 28, 28 + len(found) * _ROW
    lines = list(_strip_legend(next(iter(found), Strip("", {}))))
    for decade in range(first, last + 1):
        x = across(10.0**decade)
        lines.append(_line(x, top, x, bottom, "grid"))
        lines.append(_text(x, bottom + 18, _decade(decade), "axis middle"))
    for at, each in enumerate(found):
        lines += _strip(each, top + at * _ROW, [across(value) for value in each.values.values()])
    return _svg(title, bottom + 28, lines)


def _strip(strip: Strip, y: float, places: Sequence[float]) -> Iterator[str]:
    yield _name(strip.name, y)
    if not places:
        return
    middle = y + _ROW / 2
    yield _line(places[0], middle, places[-1], middle, "strip")
    for at, (name, value) in enumerate(strip.values.items()):
        says = text_of(f"{strip.name}: {name} {duration(value)}")
        place = f'cx="{places[at]:.1f}" cy="{middle:.1f}"'
        yield f'<circle {place} r="5" class="s{at % _SERIES}"><title>{says}</title></circle>'


def _strip_legend(strip: Strip) -> Iterator[str]:
    for at, name in enumerate(strip.values):
        x = _NAMES + 15 + at * 70
        yield f'<circle cx="{x}" cy="10" r="5" class="s{at % _SERIES}"/>'
        yield _text(x + 10, 14, name, "name")


def _name(name: str, y: float) -> str:
    return _text(_NAMES - 10, y + 17, _cut(name, _LONGEST_NAME), "name end", name)


# ── pieces of SVG ──────────────────────────────────────────────────────────────────────────


def _svg(title: str, height: float, lines: Sequence[str]) -> str:
    label = text_of(title)
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">'
    return "\n".join((head, *lines, "</svg>"))


def _rect(x: float, y: float, wide: float, high: float, kind: str, says: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect {where} class="{kind}"><title>{text_of(says)}</title></rect>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    where = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {where} class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, whole: str = "") -> str:
    title = f"<title>{text_of(whole)}</title>" if whole and whole != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{text_of(text)}{title}</text>'


def _cut(text: str, longest: int) -> str:
    """Leave out the middle: names of one kind often differ at their end."""
    shown = escaped(text)
    if len(shown) <= longest:
        return shown
    tail = longest // 3
    return f"{shown[: longest - tail - 1]}…{shown[-tail:]}"


# ── scales ─────────────────────────────────────────────────────────────────────────────────


def _ticks(highest: float) -> list[float]:
    """Return round numbers from 0 to at least the highest value, at most six."""
    if highest <= 0:
        return [0, 1]
    rough = max(highest / 5, 0.2)
    decade: float = 10.0 ** math.floor(math.log10(rough))
    step = next(each * decade for each in (1, 2, 5, 10) if each * decade >= rough)
    step = max(step, 1)
    return [at * step for at in range(math.ceil(highest / step) + 1)]


def _binary_ticks(highest: float) -> list[float]:
    """Likewise, round in units of 1,024."""
    unit = 1.0
    while highest / unit >= 1024:
        unit *= 1024
    return [tick * unit for tick in _ticks(highest / unit)]


def _short(value: float, *, is_size: bool) -> str:
    base, units = (1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi")) if is_size else (
        1000, ("", "k", "M", "G", "T", "P"),
    )  # fmt: skip
    at = 0
    while value >= base and at < len(units) - 1:
        value /= base
        at += 1
    unit = f"{units[at]}B" if is_size else units[at]
    return f"{value:g} {unit}".strip()


def _decade(decade: int) -> str:
    if decade <= 0:
        return "≤ 1 ms"
    ms = 10**decade
    return f"{ms} ms" if decade < 3 else f"{ms // 1000:,} s"

"""Draw a report's plots with matplotlib: columns over time, bars, and percentiles on a log scale.

Matplotlib writes SVG files; `_svg` makes them parts of a page, without ids, references and inline
styles, and with tooltips. Text stays text, so that the page's font and search apply to it. Colours
are those of `templates/plots.mplstyle`, for which the page has darker twins.
"""

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from xml.etree import ElementTree as ET

import matplotlib.style
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pulque.pipeline.report.tables import counted, duration
from pulque.settings.foreign import escaped

__all__ = ["bars", "columns", "strips"]

Series = Sequence[tuple[str, Sequence[float]]]
_WIDTH, _RIGHT, _BOTTOM = 860, 42, 26
_AXIS, _NAMES = 78, 250
"""Room at the left for the labels of an axis, and for names."""
_PLOT_HEIGHT, _ROW = 200, 26
_LONGEST_NAME = 34
_TOOLTIP = "tooltip:"
_KEPT = {"fill", "stroke", "stroke-width", "stroke-linecap", "stroke-opacity", "text-anchor"}
"""What stays of inline styles, as attributes, which the page's style can override."""


def columns(
    title: str, times: Sequence[date], series: Series, step: timedelta, *, is_size: bool = False
) -> str:
    """Draw columns over time, with holes where there is nothing.

    Args:
        title: What is shown; read out by screen readers.
        times: Where columns stand, rising.
        series: Names and values, one for each column, stacked on top of each other; at most six.
        step: From one column to the next: an hour, or a day.
        is_size: Whether values are bytes.
    """
    legend = 20 * math.ceil(len(series) / 2) if len(series) > 1 else 0
    form = "%m-%d %Hh" if step < timedelta(days=1) else "%Y-%m-%d"
    places = [(time - times[0]) // step for time in times]
    count = max(places, default=0) + 1
    pitch = (_WIDTH - _AXIS - _RIGHT) / count
    tops = [0.0] * len(times)
    with _axes(_AXIS, 16 + legend, _PLOT_HEIGHT) as axes:
        for _, values in series:
            drawn = axes.bar(places, values, min(0.8, 64 / pitch), tops)
            for bar, time, value in zip(drawn, times, values, strict=True):
                bar.set_visible(value > 0)
                _explain(bar, f"{time:{form}}: {counted(value)}")
            tops = [top + value for top, value in zip(tops, values, strict=True)]
        axes.set_xlim(-0.5, count - 0.5)
        ticks = range(0, count if times else 0, math.ceil(110 / pitch))
        axes.set_xticks(ticks, [f"{times[0] + at * step:{form}}" for at in ticks])
        axes.set_yticks(*_scale(max(tops, default=0), is_size=is_size))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        if legend:
            # Names are no labels: matplotlib leaves out labels that begin with an underscore.
            marks = [Patch(color=f"C{at}", label="name") for at in range(len(series))]
            shown = axes.legend(handles=marks, ncols=2, bbox_to_anchor=(0, 1))
            for text, (name, _) in zip(shown.get_texts(), series, strict=True):
                text.set_text(_cut(name))
                _explain(text, name)
        return _svg(axes, title)


def bars(title: str, found: Sequence[tuple[str, float]]) -> str:
    """Draw a bar for each name, with its count behind it."""
    highest = max((value for _, value in found), default=0) or 1
    with _rows([name for name, _ in found], 4) as axes:
        axes.set_xlim(0, highest * 1.18)
        axes.set_xticks([])
        drawn = axes.barh(range(len(found)), [max(each, highest / 500) for _, each in found], 0.62)
        for bar, (name, value) in zip(drawn, found, strict=True):
            _explain(bar, f"{name}: {counted(value)}")
        axes.bar_label(drawn, [counted(value) for _, value in found], padding=8)
        return _svg(axes, title)


def strips(title: str, found: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw percentiles of each name, rising, in milliseconds, as dots on a log scale."""
    values = [max(value, 1) for _, each in found for value in each.values()]
    first = math.floor(math.log10(min(values, default=1)))
    last = max(math.ceil(math.log10(max(values, default=1))), first + 1)
    with _rows([name for name, _ in found], 28) as axes:
        axes.set_xscale("log")
        axes.set_xlim(10 ** (first - 0.1), 10 ** (last + 0.1))
        decades = [10**at for at in range(first, last + 1)]
        labels = [f"{ms} ms" if ms < 1000 else f"{ms // 1000:,} s" for ms in decades]
        axes.set_xticks(decades, [f"≤ {each}" if each == "1 ms" else each for each in labels])
        axes.minorticks_off()
        axes.grid(axis="x")
        for row, (name, percentiles) in enumerate(found):
            places = [max(value, 1) for value in percentiles.values()]
            axes.plot(places, [row] * len(places), "C5", alpha=0.45, linewidth=3)
            for at, (which, value) in enumerate(percentiles.items()):
                # A line of no length with round ends: a marker would be a reference in SVG.
                dots = axes.plot([places[at]] * 2, [row] * 2, f"C{at}", label="" if row else which)
                _explain(dots[0], f"{name}: {which} {duration(value)}")
        if found:
            axes.legend(ncols=6, handlelength=0, columnspacing=2.5, bbox_to_anchor=(0, 1))
        return _svg(axes, title)


@contextmanager
def _axes(left: float, top: float, height: float) -> Iterator[Axes]:
    """Make axes at a place in pixels, in our style whatever the user's matplotlibrc says."""
    high = top + height + _BOTTOM
    style = matplotlib.style.context(["default", "pulque.pipeline.report.templates.plots"])
    with style, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure((_WIDTH / 72, high / 72), dpi=72, frameon=False)
        wide = (_WIDTH - left - _RIGHT) / _WIDTH
        place = (left / _WIDTH, _BOTTOM / high, wide, height / high)
        yield figure.add_axes(place, frameon=False)


@contextmanager
def _rows(names: Sequence[str], top: float) -> Iterator[Axes]:
    """Make axes with a row for each name, the first one on top."""
    with _axes(_NAMES, top, max(len(names), 1) * _ROW) as axes:
        axes.set_yticks(range(len(names)), map(_cut, names), color=rcParams["text.color"])
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            _explain(label, name)
        yield axes


def _explain(artist: Artist, text: str) -> None:
    """Give what is drawn a tooltip."""
    artist.set_gid(_TOOLTIP + escaped(text))


def _svg(axes: Axes, title: str) -> str:
    """Return a figure as an element of a page."""
    for artist in axes.findobj():
        artist.set_clip_on(False)
    drawn = io.StringIO()
    axes.figure.canvas.print_figure(drawn, format="svg")
    root = ET.fromstring(drawn.getvalue())  # noqa: S314 - our own
    for each in root.findall("{*}metadata") + root.findall("{*}defs"):
        root.remove(each)
    for each in list(root.iter()):
        each.tag = each.tag.rpartition("}")[2]
        rules = (rule.partition(": ") for rule in each.attrib.pop("style", "").split("; "))
        each.attrib.update({name: value for name, _, value in rules if name in _KEPT})
        name = each.attrib.pop("id", "")
        if name.startswith(_TOOLTIP):
            tooltip = ET.Element("title")
            tooltip.text = name.removeprefix(_TOOLTIP)
            each.insert(0, tooltip)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    return ET.tostring(root, encoding="unicode")


def _cut(text: str) -> str:
    """Shorten a name in its middle: names of one kind often differ at their end."""
    shown = escaped(text)
    if len(shown) <= _LONGEST_NAME:
        return shown
    return f"{shown[: _LONGEST_NAME * 2 // 3 - 1]}…{shown[-_LONGEST_NAME // 3 :]}"


def _scale(highest: float, *, is_size: bool) -> tuple[list[float], list[str]]:
    """Return round numbers from 0 to at least the highest value, and their labels."""
    base, units = (1024, " KMGTP") if is_size else (1000, " kMGTP")
    power = min(int(math.log(max(highest, 1), base)), 5)
    unit = units[power] + "iB" * is_size if power else "B" * is_size
    locator = MaxNLocator(5, steps=[1, 2, 5, 10], integer=not power)
    found = locator.tick_values(0, max(highest, 1) / base**power)
    labels = [f"{each:g} {unit}".strip() if each else "0" for each in found]
    return [tick * base**power for tick in found], labels

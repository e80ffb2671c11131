"""Write a report as one page of HTML: no script, no font, nothing from elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from pulque.pipeline.report.figures import ConsumerFigures, Latency, Report
from pulque.pipeline.report.svg_plots import bars, columns, strips
from pulque.pipeline.report.tables import counted, sized, tables
from pulque.settings.foreign import escaped

__all__ = ["page"]

_Plots = Iterator[tuple[str, str]]
"""Captions and SVG."""


def page(report: Report, made_at: datetime) -> str:
    """Write the page.

    Args:
        report: What it says.
        made_at: When it was made.
    """
    environment = Environment(
        loader=PackageLoader("pulque.pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # What HTML allows, but nobody should see: control characters, reversed text.
        finalize=lambda value: escaped(value) if type(value) is str else value,
    )
    sections = [
        (table, list(_PLOTS[table.name](report)) if table.rows and table.name in _PLOTS else [])
        for table in tables(report)
    ]
    said = {"report": report, "made_at": made_at, "sections": sections}
    return environment.get_template("report.html").render(said, counted=counted, sized=sized)


def _rates(report: Report) -> _Plots:
    counts = {(each.subject, each.hour): each.messages for each in report.hours}
    hours = sorted({hour for _, hour in counts})
    named = {subject for subject, _ in counts}
    series = [
        ("others" if subject is None else subject, [counts.get((subject, at), 0) for at in hours])
        for subject in (*(each.subject for each in report.subjects), None)
        if subject in named
    ]
    plot = columns("Messages per hour", hours, series, timedelta(hours=1))
    yield "Messages stored per hour, UTC.", plot


def _growth(report: Report) -> _Plots:
    draw = partial(columns, times=[each.day for each in report.days], step=timedelta(days=1))
    messages = [each.messages for each in report.days]
    sizes = [each.size for each in report.days]
    yield "Messages per day.", draw("Messages per day", series=[("", messages)])
    yield "Bytes of bodies per day.", draw("Bytes per day", series=[("", sizes)], is_size=True)


def _latency(title: str, found: Sequence[Latency]) -> _Plots:
    caption = f"{title} by subject and group; each line on the scale is ten times more."
    rows = [(f"{each.subject} → {each.group}", _of(each, "p50", "p90", "p99")) for each in found]
    yield caption, strips(title, rows)


def _consumers(report: Report) -> _Plots:
    found = [each for each in report.consumers if each.p50 is not None]
    rows = [
        (f"{each.group} / {each.consumer}", _of(each, "p50", "p99", "longest")) for each in found
    ]
    if rows:
        yield "Handling latency by group and consumer.", strips("Slow consumers", rows)


def _of(each: Latency | ConsumerFigures, *names: str) -> dict[str, float]:
    return {name: getattr(each, name) for name in names}


def _reasons(report: Report) -> _Plots:
    found = [(f"{each.group}: {each.reason or each.what}", each.times) for each in report.failures]
    yield "How often, by group and reason.", bars("Reasons of failures", found)


def _keys(report: Report) -> _Plots:
    found = [(f"{each.subject}: {each.key}", each.messages) for each in report.keys]
    yield "Messages by subject and key.", bars("Hot keys", found)


_PLOTS: Mapping[str, Callable[[Report], _Plots]] = {
    "rates": _rates,
    "end_to_end": lambda report: _latency("End-to-end latency", report.end_to_end),
    "handling": lambda report: _latency("Handling latency", report.handling),
    "reasons": _reasons,
    "consumers": _consumers,
    "keys": _keys,
    "growth": _growth,
}

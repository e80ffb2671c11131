"""A report as one page of HTML that needs nothing else: no script, no font, no other file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from pulque.pipeline.report.figures import ConsumerFigures, Latency, Report
from pulque.pipeline.report.svg_plots import Column, Strip, bars, columns, strips, text_of
from pulque.pipeline.report.tables import ReportTable, counted, sized, tables

__all__ = ["page"]

_LONGEST_TABLE = 48
"""So many rows of a table are shown; of those by time the last ones."""
_BY_TIME = ("rates", "growth")
_STYLE = """
:root { color-scheme: light dark; --back: #fbfaf8; --card: #fff; --text: #23211f; --soft: #6a6560;
  --rule: #e4e0da; --s0: #2f6db5; --s1: #d9812b; --s2: #b03a48; --s3: #3f8f63; --s4: #8a5fb0;
  --s5: #8d8a86; }
@media (prefers-color-scheme: dark) { :root { --back: #171615; --card: #201f1d; --text: #ece8e2;
  --soft: #a39d95; --rule: #38352f; --s0: #6aa5e8; --s1: #f0a45a; --s2: #e8727f; --s3: #6cc394;
  --s4: #bd97e0; --s5: #98948e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 960px; background: var(--back);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 0 0 .2rem; font-size: 1.15rem; }
p { margin: .2rem 0 .8rem; } .soft, figcaption { color: var(--soft); font-size: .88rem; }
section { margin: 1.25rem 0; padding: 1.1rem 1.25rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; }
.sums { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0; padding: 0; }
.sums div { display: flex; flex-direction: column-reverse; } .sums dd { margin: 0;
  font-size: 1.5rem; font-weight: 600; } .sums dt { color: var(--soft); font-size: .88rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%;
  font-variant-numeric: tabular-nums; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: anywhere; } .figure { text-align: right; white-space: nowrap; }
figure { margin: .4rem 0 1rem; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .axis { fill: var(--soft); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); }
.strip { stroke: var(--soft); stroke-width: 3; opacity: .45; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.s4 { fill: var(--s4); } .s5 { fill: var(--s5); }
@media print { body { max-width: none; } section { break-inside: avoid; } }
"""
_HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Report of a Pulque archive</title>
<style>{_STYLE}</style>
</head>
<body>
"""


def page(report: Report, made_at: datetime) -> str:
    """Write the page.

    Args:
        report: What it says.
        made_at: When it was made.
    """
    parts = [_HEAD, *_opening(report, made_at)]
    if not report.is_empty:
        for table in tables(report):
            parts += _section(report, table)
    return "\n".join((*parts, "</body>", "</html>", ""))


def _opening(report: Report, made_at: datetime) -> Iterator[str]:
    yield "<header><h1>Report of a Pulque archive</h1>"
    about = f"{report.lake}: {report.about}. Made {made_at:%Y-%m-%d %H:%M} UTC."
    yield f'<p class="soft">{text_of(about)}</p></header>'
    if report.is_empty:
        yield "<section><p>Nothing was stored and nothing settled in this part.</p></section>"
    else:
        sums = {
            "messages stored": counted(report.messages),
            "bytes in bodies": sized(report.size),
            "deliveries settled": counted(report.settled),
        }
        yield '<dl class="sums">'
        for name, text in sums.items():
            yield f"<div><dt>{name}</dt><dd>{text_of(text)}</dd></div>"
        yield "</dl>"
    for note in report.notes:
        yield f"<p>Note: {text_of(note)}.</p>"


def _section(report: Report, table: ReportTable) -> Iterator[str]:
    yield f'<section id="{table.name}"><h2>{text_of(table.title)}</h2>'
    yield f'<p class="soft">{text_of(table.says)}</p>'
    if table.rows:
        if table.name in _PLOTS:
            for caption, plot in _PLOTS[table.name](report):
                yield f"<figure>{plot}<figcaption>{text_of(caption)}</figcaption></figure>"
        yield from _table(table)
    else:
        yield "<p>None.</p>"
    yield "</section>"


def _table(table: ReportTable) -> Iterator[str]:
    is_last = table.name in _BY_TIME
    rows = table.rows[-_LONGEST_TABLE:] if is_last else table.rows[:_LONGEST_TABLE]
    yield '<div class="wide"><table><thead>'
    yield _row(table.columns, table.names, "th")
    yield "</thead><tbody>"
    for row in rows:
        yield _row(row, table.names, "td")
    yield "</tbody></table></div>"
    if len(rows) < len(table.rows):
        which = "last" if is_last else "first"
        yield f'<p class="soft">The {which} {len(rows)} of {len(table.rows)} rows.</p>'


def _row(cells: Sequence[str], names: int, tag: str) -> str:
    kinds = ("" if at < names else ' class="figure"' for at in range(len(cells)))
    parts = (
        f"<{tag}{kind}>{text_of(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
    )
    return f"<tr>{''.join(parts)}</tr>"


# ── plots ──────────────────────────────────────────────────────────────────────────────────

_Plots = Iterator[tuple[str, str]]


def _plot_rates(report: Report) -> _Plots:
    named = list(dict.fromkeys(each.subject for each in report.hours))
    order = [each.subject for each in report.subjects if each.subject in named]
    series: list[str | None] = [*order, *([None] if None in named else [])]
    by_hour: dict[datetime, list[int]] = {}
    for each in report.hours:
        by_hour.setdefault(each.hour, [0] * len(series))[series.index(each.subject)] = (
            each.messages
        )
    first, last = min(by_hour), max(by_hour)
    hours = [
        first + timedelta(hours=at)
        for at in range(round((last - first).total_seconds()) // 3600 + 1)
    ]
    nothing = [0] * len(series)
    found = [Column(f"{hour:%m-%d %H}h", by_hour.get(hour, nothing)) for hour in hours]
    names = ["others" if each is None else each for each in series]
    yield "Messages stored per hour, UTC.", columns("Messages per hour", found, names)


def _plot_growth(report: Report) -> _Plots:
    by_day = {each.day: each for each in report.days}
    first, last = min(by_day), max(by_day)
    days = [first + timedelta(days=at) for at in range((last - first).days + 1)]
    messages = [Column(f"{day}", [by_day[day].messages if day in by_day else 0]) for day in days]
    sizes = [Column(f"{day}", [by_day[day].size if day in by_day else 0]) for day in days]
    yield "Messages per day.", columns("Messages per day", messages)
    yield "Bytes of bodies per day.", columns("Bytes per day", sizes, is_size=True)


def _plot_end_to_end(report: Report) -> _Plots:
    yield _latency_strips("End-to-end latency", report.end_to_end)


def _plot_handling(report: Report) -> _Plots:
    yield _latency_strips("Handling latency", report.handling)


def _latency_strips(title: str, found: Sequence[Latency]) -> tuple[str, str]:
    rows = [
        Strip(
            f"{each.subject} → {each.group}", {"p50": each.p50, "p90": each.p90, "p99": each.p99}
        )
        for each in found
    ]
    return f"{title} by subject and group; each line on the scale is ten times more.", strips(
        title, rows
    )


def _plot_consumers(report: Report) -> _Plots:
    rows = [strip for each in report.consumers if (strip := _consumer_strip(each)) is not None]
    if rows:
        yield "Handling latency by group and consumer.", strips("Slow consumers", rows)


def _consumer_strip(each: ConsumerFigures) -> Strip | None:
    if each.p50 is None or each.p99 is None or each.longest is None:
        return None
    values = {"p50": each.p50, "p99": each.p99, "longest": each.longest}
    return Strip(f"{each.group} / {each.consumer}", values)


def _plot_reasons(report: Report) -> _Plots:
    found = [(f"{each.group}: {each.reason or each.what}", each.times) for each in report.failures]
    yield "How often, by group and reason.", bars("Reasons of failures", found)


def _plot_keys(report: Report) -> _Plots:
    found = [(f"{each.subject}: {each.key}", each.messages) for each in report.keys]
    yield "Messages by subject and key.", bars("Hot keys", found)


_PLOTS: Mapping[str, Callable[[Report], _Plots]] = {
    "rates": _plot_rates,
    "end_to_end": _plot_end_to_end,
    "handling": _plot_handling,
    "reasons": _plot_reasons,
    "consumers": _plot_consumers,
    "keys": _plot_keys,
    "growth": _plot_growth,
}

"""A report as tables of text, the same for terminals and for the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pulque.pipeline.report.figures import Report

__all__ = ["ReportTable", "counted", "duration", "sized", "tables"]

_OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table.

    Attributes:
        name: What it is known by on the page.
        title: Above it.
        says: What its figures are, exactly.
        columns: Headings.
        rows: Cells, as many as there are columns.
        names: So many columns, the first ones, are names; the others are figures.
    """

    name: str
    title: str
    says: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int


def tables(report: Report) -> Iterator[ReportTable]:
    """Yield all tables of a report, those without rows too."""
    yield from _of_rates(report)
    yield _of_latency(report, "end_to_end")
    yield _of_latency(report, "handling")
    yield from _of_failures(report)
    yield _of_consumers(report)
    yield _of_keys(report)
    yield _of_growth(report)


def _of_rates(report: Report) -> Iterator[ReportTable]:
    yield ReportTable(
        "subjects",
        "Subjects",
        "What was sent and stored, without retries and dead letters. Sizes are those of bodies; "
        "the mean is over the hours in which there was any.",
        ("subject", "messages", "size", "mean/s", "busiest hour (UTC)", "then/s"),
        [
            (
                each.subject,
                counted(each.messages),
                sized(each.size),
                _rate(each.messages, each.hours),
                f"{each.busiest:%Y-%m-%d %H}h",
                _rate(each.busiest_messages, 1),
            )
            for each in report.subjects
        ],
        1,
    )
    yield ReportTable(
        "rates",
        "Rates by subject and hour",
        "By the hour in which they were stored, in UTC; the largest subjects by name, the others "
        "together. Hours without messages are left out of the table.",
        ("hour", "subject", "messages", "per second", "size"),
        [
            (
                f"{each.hour:%Y-%m-%d %H}h",
                _OTHERS if each.subject is None else each.subject,
                counted(each.messages),
                _rate(each.messages, 1),
                sized(each.size),
            )
            for each in report.hours
        ],
        2,
    )


_LATENCIES = {
    "end_to_end": (
        "End-to-end latency",
        (
            "From the instant a message was created, by its producer's clock, to its ack, by the "
            "broker's; retries and waiting included, messages that failed for good are not."
        ),
    ),
    "handling": (
        "Handling latency",
        (
            "From being handed to a consumer to being settled, acked or nacked; the time that a "
            "message waits in the consumer's buffer is part of it."
        ),
    ),
}


def _of_latency(report: Report, name: str) -> ReportTable:
    title, says = _LATENCIES[name]
    found = report.end_to_end if name == "end_to_end" else report.handling
    rows = [
        (
            each.subject,
            each.group,
            counted(each.messages),
            *map(duration, (each.p50, each.p90, each.p99, each.longest)),
        )
        for each in found
    ]
    exact = (
        " Percentiles are over all messages, to three digits. A filter's unwanted messages count "
        "where they lie between wanted ones."
    )
    columns = ("subject", "group", "messages", "p50", "p90", "p99", "longest")
    return ReportTable(name, title, says + exact, columns, rows, 2)


def _of_failures(report: Report) -> Iterator[ReportTable]:
    yield ReportTable(
        "retries",
        "Retries and dead letters",
        "What was stored for another attempt of a group, and what became a dead letter, whether "
        "or not it was resent since.",
        ("subject", "group", "redelivered", "dead letters"),
        [
            (each.subject, each.group, counted(each.redelivered), counted(each.dead))
            for each in report.redeliveries
        ],
        2,
    )
    yield ReportTable(
        "reasons",
        "Why",
        "Nacks by the reason that consumers gave, its first 200 characters; of lost consumers it "
        "is how often they were lost, not how many messages they held.",
        ("subject", "group", "what", "reason", "times"),
        [
            (
                each.subject,
                each.group,
                each.what,
                each.reason or "(none given)",
                counted(each.times),
            )
            for each in report.failures
        ],
        4,
    )


def _of_consumers(report: Report) -> ReportTable:
    rows = [
        (
            each.group,
            each.consumer,
            counted(each.settled),
            counted(each.unsettled),
            *("–" if ms is None else duration(ms) for ms in (each.p50, each.p99, each.longest)),
        )
        for each in report.consumers
    ]
    return ReportTable(
        "consumers",
        "Slow consumers",
        "By the handling latency that 99 of 100 deliveries keep to, the slowest first. Unsettled "
        "is what a consumer was handed and did not settle: it holds it, or was lost with it. A "
        "group with mode once settles nothing.",
        ("group", "consumer", "settled", "unsettled", "p50", "p99", "longest"),
        rows,
        2,
    )


def _of_keys(report: Report) -> ReportTable:
    return ReportTable(
        "keys",
        "Hot keys",
        "Keys that most messages have, and their share of their subject.",
        ("subject", "key", "messages", "share"),
        [
            (each.subject, each.key, counted(each.messages), f"{each.share:.1%}")
            for each in report.keys
        ],
        2,
    )


def _of_growth(report: Report) -> ReportTable:
    return ReportTable(
        "growth",
        "Growth",
        "Messages stored on each day, in UTC, and the size of their bodies before compression.",
        ("day", "messages", "size"),
        [(f"{each.day}", counted(each.messages), sized(each.size)) for each in report.days],
        1,
    )


# ── figures as text ────────────────────────────────────────────────────────────────────────


def counted(number: float) -> str:
    """Write a count, thousands apart."""
    return f"{round(number):,}"


def sized(size: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def duration(ms: float) -> str:
    """Write how long something took."""
    if ms < 1000:
        return f"{ms:.3g} ms" if ms < 999.5 else "1.00 s"
    for unit, length, limit in (("s", 1000, 120), ("min", 60_000, 120), ("h", 3_600_000, 48)):
        if ms < length * limit:
            return f"{ms / length:.2f} {unit}" if ms < length * 10 else f"{ms / length:.1f} {unit}"
    return f"{ms / 86_400_000:,.1f} d"


def _rate(messages: int, hours: int) -> str:
    per_second = messages / (3600 * max(hours, 1))
    return f"{per_second:.3g}" if per_second < 100 else counted(per_second)

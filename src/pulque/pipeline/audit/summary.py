"""The audit: sent = stored = settled + dead + waiting, for each subject, group and hour.

What does not add up is named: which message, or which partition and sequence. Everything large
stays in Spark; what comes back is a row for each subject, group and hour, and the first of what
is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pulque.errors import CorruptionError
from pulque.model.names import PartitionName, subject_of
from pulque.pipeline.audit.groups import GroupsSide
from pulque.pipeline.audit.stored import MOST_BREAKS, Scope, StoredSide
from pulque.pipeline.audit.tasks import HOUR_US
from pulque.pipeline.reading.batch_decoder import decode_readable
from pulque.pipeline.reading.ranges import Range
from pulque.pipeline.reading.stored_log import StoredLog, read_stretch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["FLAWS", "Audit", "AuditFinding", "Line", "audit"]

_NAMED = 100
"""So many messages that are not in the table are looked up in the copies of the log."""

FLAWS: Mapping[str, str] = {
    "not_stored": "the log has it, the table has not",
    "not_in_log": "the table has it, the log has not",
    "stored_twice": "the table has it twice",
    "rewritten": "the table has other values than the log",
    "copy_damaged": "the copy of the segment is damaged, so its rows cannot be compared",
    "id_twice": "stored more than once under one id",
    "batch_twice": "a producer sent the batch once, the log has it twice",
    "receipt_unstored": "its sender has a receipt, and it is not stored",
    "segment_missing": "a copy of a segment is missing",
    "facts_missing": "facts are missing",
    "fact_twice": "a fact is there twice",
    "never_handed_out": "the group went beyond it, and nobody was handed it",
    "handed_out_twice": "handed out again without a reset",
    "pull_missing": "deliveries of which no pull tells",
    "settle_missing": "handed out, and what became of it is not told",
    "settled_twice": "settled twice",
    "settled_unpulled": "settled, and never pulled",
    "nacked_unsettled": "nacked outside of a settle",
    "retry_missing": "failed, and neither retried nor a dead letter",
    "retried_unfailed": "retried or dead, and no failure is told",
    "retried_twice": "retried more often than it failed",
    "uneven": "the states do not add up to what is stored",
}
"""What can be wrong, in words."""


@dataclass(frozen=True, slots=True)
class Line:
    """One subject, one hour, and one group or none.

    Attributes:
        subject: What messages were sent to.
        hour: In which they were stored.
        group: Whose states these are; None where no group ever came.
        sent: What the log has; None if its copy is not there any more.
        stored: What the table has.
        states: How many of them are in which state.
    """

    subject: str
    hour: datetime
    group: str | None
    sent: int | None
    stored: int
    states: Mapping[str, int] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        """How many were processed."""
        return self.states.get("settled", 0)

    @property
    def dead(self) -> int:
        """How many are dead letters."""
        return self.states.get("dead", 0)

    @property
    def waiting(self) -> int:
        """How many are to come: new ones, those that consumers hold, those that are retried."""
        return sum(self.states.get(name, 0) for name in ("new", "held", "retry"))

    @property
    def unwanted(self) -> int:
        """How many the group does not get, and why is known: filtered, skipped, and the like."""
        names = ("filtered", "before", "skipped", "expired", "purged", "dropped")
        return sum(self.states.get(name, 0) for name in names)

    @property
    def unknown(self) -> int:
        """Of how many nothing can be said."""
        return self.states.get("unknown", 0)

    @property
    def is_even(self) -> bool:
        """Whether everything adds up."""
        is_stored = self.sent is None or self.sent == self.stored
        return is_stored and (self.group is None or sum(self.states.values()) == self.stored)


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """Something that is wrong.

    Attributes:
        flaw: What, one of ``FLAWS``.
        broker: Where.
        partition: Where; None if it is about a log as a whole.
        first: The first sequence; of deliveries if ``consumer`` is given.
        count: How many.
        group: For which group.
        consumer: Of whose deliveries the numbers are, where nobody knows which messages.
        message_id: Of the first one, if it is known.
        note: More about it.
    """

    flaw: str
    broker: str
    partition: str | None = None
    first: int | None = None
    count: int = 1
    group: str | None = None
    consumer: str | None = None
    message_id: str | None = None
    note: str | None = None

    @property
    def subject(self) -> str | None:
        """Of which subject."""
        return None if not self.partition else subject_of(PartitionName(self.partition))


@dataclass(slots=True)
class Audit:
    """What an audit found.

    Attributes:
        lines: By subject, group and hour.
        found: What is wrong, at most ``MOST_BREAKS`` of each half.
        wrong: How much is wrong in all.
        notes: What else one should know.
    """

    lines: list[Line]
    found: list[AuditFinding]
    wrong: int
    notes: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong


def audit(
    spark: "SparkSession",
    lake: str,
    scope: Scope | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    receipts: str | None = None,
) -> Audit:
    """Compare all accounts that a lake has.

    Args:
        spark: The session.
        lake: A path or a URL.
        scope: Which subjects, and which group.
        since: Leave out hours before this one.
        until: Leave out this hour, and those after it.
        receipts: A file of receipts, JSON lines with ``id`` and, if known, ``partition`` and
            ``sequence``.

    Raises:
        UsageError: There is no archive, or no such file.
    """
    chosen = scope or Scope()
    stored = StoredSide(spark, lake, chosen)
    groups = GroupsSide(spark, lake, chosen, stored)
    try:
        lines = list(_lines(spark, stored, groups))
        wanted = [line for line in lines if _is_within(line.hour, since, until)]
        found, wrong = _all_found(lake, stored, groups, receipts)
        if not found:
            uneven = [line for line in wanted if not line.is_even]
            found = [_uneven(line) for line in uneven]
            wrong = len(found)
        return Audit(wanted, found, wrong, list(_notes(stored, groups)))
    finally:
        spark.catalog.clearCache()


def _is_within(hour: datetime, since: datetime | None, until: datetime | None) -> bool:
    return (since is None or hour >= since) and (until is None or hour < until)


# ── lines ──────────────────────────────────────────────────────────────────────────────────


def _lines(spark: "SparkSession", stored: StoredSide, groups: GroupsSide) -> Iterator[Line]:
    rows = spark.sql(
        """SELECT coalesce(s.subject, l.subject) AS subject, coalesce(s.hour, l.hour) AS hour,
                  coalesce(s.rows, 0L) AS stored, l.rows AS sent
           FROM (SELECT subject, hour, sum(rows) AS rows FROM {places}
                 WHERE NOT startswith(partition, '%') GROUP BY subject, hour) s
           FULL OUTER JOIN (SELECT subject, hour, sum(end - first) AS rows FROM {log}
                            WHERE NOT startswith(partition, '%') GROUP BY subject, hour) l
           ON s.subject = l.subject AND s.hour = l.hour ORDER BY subject, hour""",
        places=stored.places,
        log=stored.log,
    ).collect()
    states: dict[tuple[str, int], dict[str, dict[str, int]]] = {}
    for row in groups.states().collect() if groups.has_facts else []:
        of_hour = states.setdefault((row.subject, row.hour), {})
        of_hour.setdefault(row.group, {})[row.state] = row.messages
    for row in rows:
        hour = datetime.fromtimestamp(row.hour * HOUR_US / 1_000_000, UTC)
        line = Line(row.subject, hour, None, row.sent, row.stored)
        of_groups = states.get((row.subject, row.hour), {})
        for group in sorted(of_groups):
            yield replace(line, group=group, states=of_groups[group])
        if not of_groups:
            yield line


def _uneven(line: Line) -> AuditFinding:
    told = f"{line.sent} sent, {line.stored} stored, states of {sum(line.states.values())}"
    note = f"{line.hour:%Y-%m-%dT%H}: {told}"
    return AuditFinding("uneven", "", line.subject, group=line.group, count=0, note=note)


# ── what is wrong ──────────────────────────────────────────────────────────────────────────


def _all_found(
    lake: str, stored: StoredSide, groups: GroupsSide, receipts: str | None
) -> tuple[list[AuditFinding], int]:
    """Return the first of what is wrong, and how much is wrong in all."""
    of_copies = [*stored.holes_between_segments(), *stored.damaged_copies()]
    found = [AuditFinding(**each) for each in of_copies]
    wrong = len(found)
    frames = [stored.sequences(), stored.doubled_ids(), stored.doubled_batches()]
    if receipts is not None:
        frames.append(stored.unstored_receipts(receipts))
    of_messages = frames[0]
    for each in frames[1:]:
        of_messages = of_messages.unionByName(each)
    wrong += _take(of_messages, found)
    if (rewritten := stored.rewritten()) is not None:
        wrong += _take(rewritten, found)
    if groups.has_facts:
        holes = [
            AuditFinding(row.flaw, row.broker, note=row.note) for row in groups.holes().collect()
        ]
        wrong += len(holes)
        found += holes
        wrong += _take(groups.contradictions().unionByName(groups.astray()), found)
    return list(_with_ids(lake, found, stored)), wrong


def _take(frame: "DataFrame", found: list[AuditFinding]) -> int:
    """Add the first rows of a frame; return how many there are."""
    kept = frame.localCheckpoint()
    total = kept.count()
    if not total:
        return 0
    for row in (
        kept.orderBy("broker", "partition", "sequence", "flaw").limit(MOST_BREAKS).collect()
    ):
        values = row.asDict()
        consumer = values["consumer"] if values.get("are_pulls") else None
        found.append(
            AuditFinding(
                row.flaw,
                row.broker,
                row.partition,
                row.sequence,
                values["count"],
                values.get("group"),
                consumer,
                row.message_id,
                values.get("note"),
            )
        )
    return total


def _with_ids(
    lake: str, found: Iterable[AuditFinding], stored: StoredSide
) -> Iterator[AuditFinding]:
    """Look up the ids of messages in the copies of the log."""
    logs: dict[str, StoredLog | None] = {}
    brokers = {each["broker"]: each["where"] for each in stored.segments}
    room = _NAMED
    for each in found:
        is_position = each.partition and each.first is not None and each.consumer is None
        if each.message_id or not is_position or room <= 0 or each.broker not in brokers:
            yield each
            continue
        room -= 1
        if each.broker not in logs:
            logs[each.broker] = _opened(brokers[each.broker])
        log = logs[each.broker]
        yield replace(each, message_id=_id_of(log, each)) if log is not None else each


def _opened(where: str) -> StoredLog | None:
    try:
        return StoredLog(where)
    except CorruptionError:
        return None  # a copy cannot be read, and that is a break of its own


def _id_of(log: StoredLog, found: AuditFinding) -> str | None:
    first = found.first or 0
    wanted = Range(PartitionName(found.partition or ""), first, first + 1)
    for stretch in log.plan([wanted], least=1, most_rows=1, must_be_whole=False):
        for placed in read_stretch(stretch, must_be_whole=False):
            for rows in decode_readable(placed, ("message_id",))[0]:
                return str(rows.column(0)[0].as_py())
    return None


# ── what else one should know ──────────────────────────────────────────────────────────────


def _notes(stored: StoredSide, groups: GroupsSide) -> Iterator[str]:
    missing, producers = stored.gaps_of_producers()
    if missing:
        yield (
            f"{missing} batches of {producers} producers are not in the log: they were refused, "
            "or given up by their senders; --receipts tells if anything confirmed is among them"
        )
    row = stored.quarantined.selectExpr("count(*)", "coalesce(sum(end - first), 0)").first()
    if row is not None and row[0]:
        yield (
            f"{row[1]} messages of {row[0]} batches cannot be decoded: they count as stored, and "
            "are in the table quarantine"
        )
    if not stored.segments:
        yield "there are no copies of segments: what was sent is not known"
    elif uncompared := stored.uncompared():
        yield f"{uncompared} rows are of segments without a copy: their content is not compared"
    if not groups.has_facts:
        yield "there is no table consumption: what became of messages is not known"
        return
    for row in groups.brokers.orderBy("broker").collect():
        yield (
            f"broker {row.broker}: messages up to {_shown(row.messages_to)}, facts from "
            f"{'the beginning' if row.is_whole else _shown(row.facts_from)} to "
            f"{_shown(row.facts_to)}"
        )


def _shown(at_us: int | None) -> str:
    if at_us is None:
        return "none"
    return f"{datetime.fromtimestamp(at_us / 1_000_000, UTC):%Y-%m-%dT%H:%M:%SZ}"

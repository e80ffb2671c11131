"""What consumers did, as rows: pulls, settles, nacks, losses, locks, resets of the action log.

A fact names its subscription by a number; every segment of the log begins with what the numbers
stand for. Facts are few beside messages, as one of them tells of many, so that a task reads them
one by one. The last row of a segment says where it ends and how many rows it has, so that a row
that is missing later is noticed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pulque.errors import CorruptionError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    DeadPurged,
    GroupOpened,
    GroupReset,
    LockGranted,
    LockReleased,
    PassedOver,
    Pulled,
    Settled,
    Skipped,
    SubscriptionOpened,
)
from pulque.model.names import PartitionName, subject_of
from pulque.pipeline.columns import INSTANT
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.lake.table import TableKind
from pulque.pipeline.reading.segment_map import SegmentFile
from pulque.storage.logs.action_log import decode_action, walk_actions

__all__ = ["CONSUMPTION", "Row", "UnknownPartitionError", "rows_of_facts"]

CONSUMPTION = TableKind(
    "consumption",
    pa.schema(
        [
            ("kind", pa.string()),
            ("at", INSTANT),
            ("subject", pa.string()),
            ("partition", pa.string()),
            ("group", pa.string()),
            ("consumer", pa.string()),
            ("first_pull", pa.int64()),
            ("first_sequence", pa.int64()),
            ("count", pa.int64()),
            ("matched", pa.int64()),
            ("start", pa.int64()),
            ("delay_ms", pa.int64()),
            ("reason", pa.string()),
            ("offset", pa.int64()),
            ("broker", pa.string()),
            ("segment", pa.int64()),
            ("day", pa.date32()),
        ]
    ),
    ("day",),
    1,
)

Row = dict[str, Any]


class UnknownPartitionError(Exception):
    """A fact is about a partition that no sealed segment of the message log knows yet."""


@dataclass(slots=True)
class _Subscriptions:
    """What the numbers of subscriptions stand for, as far as a segment was read."""

    names: Mapping[int, PartitionName]
    opened: dict[int, SubscriptionOpened]

    def place(self, partition: int) -> Row:
        name = self.names.get(partition)
        if name is None:
            raise UnknownPartitionError(f"partition {partition}")
        return {"partition": name, "subject": subject_of(name)}

    def who(self, subscription: int) -> Row:
        found = self.opened.get(subscription)
        if found is None:
            return {}  # it was opened where the log is damaged
        return {
            **self.place(found.partition),
            "group": found.group,
            "consumer": found.consumer,
        }


def rows_of_facts(segment: SegmentFile, names: Mapping[int, PartitionName]) -> Iterator[Row]:
    """Yield the rows of a segment of the action log; partitions by what they are called.

    Raises:
        CorruptionError: Some of it is damaged.
        UnknownPartitionError: A partition has no name yet.
    """
    file = Tree(segment.where).open(segment.path)
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    rows, at = 0, datetime.now(UTC)
    for row in _timed(_untimed(segment, data, names)):
        rows += 1
        yield {**row, "segment": segment.base}
        at = row["at"]
    end = segment.base + len(data)
    sealed = {"at": at, "offset": end, "count": rows}
    yield {"kind": "sealed", **sealed, "segment": segment.base}


def _timed(rows: Iterator[Row]) -> Iterator[Row]:
    """Give facts that do not tell when they happened the time of the one before them.

    Those that come first have that of the first that tells it, or are of now.
    """
    waiting: list[Row] = []
    at: datetime | None = None
    for row in rows:
        at = row.get("at") or at
        if at is None:
            waiting.append(row)
            continue
        yield from ({**each, "at": at} for each in waiting)
        waiting = []
        yield {**row, "at": at}
    now = datetime.now(UTC)
    yield from ({**each, "at": now} for each in waiting)


def _untimed(
    segment: SegmentFile, data: bytes, names: Mapping[int, PartitionName]
) -> Iterator[Row]:
    known = _Subscriptions(names, {})
    for at, _, fact in walk_actions(data, segment.base):
        offset = segment.base + at
        if fact is None:
            raise CorruptionError(segment.path, offset, "facts cannot be read")
        try:
            action = decode_action(fact)
        except ValueError as problem:
            raise CorruptionError(segment.path, offset, str(problem)) from None
        if isinstance(action, SubscriptionOpened):
            known.opened[action.subscription] = action
        for row in _rows(action, known):
            yield {**row, "offset": offset}


def _rows(action: Action, known: _Subscriptions) -> Iterator[Row]:
    match action:
        case Pulled():
            yield {
                **_told("pulled", action.at_ms),
                **known.who(action.subscription),
                "first_pull": action.first_pull,
                "first_sequence": action.first_sequence,
                "count": action.count,
                "matched": action.wanted,
                "start": action.tenure.start,
            }
        case Settled():
            yield from _settled(action, known.who(action.subscription))
        case ConsumerLost():
            kind = "left" if action.is_leaving else "lost"
            who = known.who(action.subscription)
            yield {**_told(kind, action.at_ms), **who, "reason": action.reason}
        case GroupOpened() | PassedOver():
            kind = "opened" if isinstance(action, GroupOpened) else "passed"
            row = {"group": action.group, "first_sequence": action.next_sequence}
            yield {"kind": kind, **known.place(action.partition), **row}
        case GroupReset():
            place = known.place(action.partition)
            row = {"group": action.group, "first_sequence": action.next_sequence}
            yield {**_told("reset", action.at_ms), **place, **row}
        case LockGranted() | LockReleased() | Skipped():
            yield {**known.place(action.partition), "group": action.group, **_of_order(action)}
        case DeadPurged():
            place = known.place(action.partition)
            count = action.last - action.first + 1
            row = {"first_sequence": action.first, "count": count}
            yield {**_told("purged", action.at_ms), **place, **row}
        case _:
            pass  # how things stand, not what happened; segments repeat it


def _settled(action: Settled, who: Row) -> Iterator[Row]:
    told = {**_told("settled", action.at_ms), **who}
    yield {**told, "first_pull": action.first, "count": action.last - action.first + 1}
    for each in action.nacked:
        yield {
            **_told("nacked", action.at_ms),
            **who,
            "first_pull": each.sequence,
            "count": 1,
            "delay_ms": each.delay_ms,
            "reason": each.reason,
        }


def _of_order(action: LockGranted | LockReleased | Skipped) -> Row:
    """Return what happened to an ordered group; deliveries of such have messages' numbers."""
    match action:
        case LockGranted():
            return {**_told("locked", action.at_ms), "consumer": action.consumer}
        case LockReleased():
            return _told("unlocked", action.at_ms)
        case Skipped():
            row = {"first_sequence": action.sequence, "count": 1, "reason": action.reason}
            return {**_told("given_up", action.at_ms), **row}


def _told(kind: str, at_ms: int) -> Row:
    return {"kind": kind, "at": datetime.fromtimestamp(at_ms / 1000, UTC)}

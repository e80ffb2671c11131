"""From batches of the message log to entries of schedule logs, by the tick that they are due in.

A message that was moved to another time comes as a batch of its own, in a partition of the message
log whose name says so: where it waited before stands in the place of a producer.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pulque.model.batch import Codec, read_header, renumber, seed_of
from pulque.model.names import PartitionName
from pulque.storage.files import Buffer
from pulque.storage.message_table import MessageTable, Scratch, columns_before_data

__all__ = ["MOVED_PREFIX", "Moved", "Placed", "Replayed", "place", "unmoved"]

MOVED_PREFIX = "%moved%"
"""Begins the partition of the message log that moved messages of a partition are in."""

_MOST_MESSAGES = 2000
_FEW_MESSAGES = 500
"""Of those that are due over a long time, as each is read again whenever some of it are due."""
_MOST_BYTES = 1024 * 1024
_NARROW_MS = 1000
_FEW_TICKS = 64
_ROW_BITS = 22
_MOST_ROWS = 1 << _ROW_BITS
_LONGEST_MS = (1 << (62 - _ROW_BITS)) - 1
Numbers = npt.NDArray[Any]


class Replayed(NamedTuple):
    """A batch of the message log."""

    partition: PartitionName
    offset: int
    """Where it lies."""
    end: int
    batch: bytes


class Moved(NamedTuple):
    """Where a message waited before it was moved."""

    tick: int
    place: int


def unmoved(each: Replayed) -> tuple[Replayed, Moved | None]:
    """Return a batch as if it had been sent so, and what it moved."""
    if not each.partition.startswith(MOVED_PREFIX):
        return each, None
    partition = PartitionName(each.partition.removeprefix(MOVED_PREFIX))
    header = read_header(each.batch)
    batch = renumber(each.batch, seed_of(partition), 0, 0)
    return each._replace(partition=partition, batch=batch), Moved(
        header.producer_sequence, header.producer_id
    )


class Placed(NamedTuple):
    """Messages of one partition that belong into one tick, in the order of their due times."""

    partition: PartitionName
    batch: Sequence[Buffer]
    """In pieces that follow each other."""
    first_due_ms: int
    last_due_ms: int
    columns: Mapping[str, Numbers]
    """Those of a table."""
    start: int
    """Which row of the table is the first message."""
    end: int
    """Comes after that of the last message."""


def place(
    batches: Iterable[Replayed],
    tick_ms: int,
    covered: Mapping[int, int] | None = None,
    scratch: Scratch | None = None,
) -> dict[int, list[Placed]]:
    """Return what goes into which tick.

    Args:
        batches: In the order of the message log.
        tick_ms: How long a tick is.
        covered: For ticks, up to where the message log is replayed into them: what lies before
            that is there already.
        scratch: Where it is done. What is returned lies in it, and in the batches.
    """
    by_partition: dict[PartitionName, list[Replayed]] = {}
    for each in batches:
        by_partition.setdefault(each.partition, []).append(each)
    placed: dict[int, list[Placed]] = {}
    for partition, found in by_partition.items():
        if len(found) == 1 and not covered and _place_whole(found[0], tick_ms, placed):
            continue
        _place_sorted(partition, found, tick_ms, covered or {}, placed, scratch)
    return placed


def _place_whole(each: Replayed, tick_ms: int, placed: dict[int, list[Placed]]) -> bool:
    """Put a batch as it is into its tick, if it has but one and is due within a second."""
    header = read_header(each.batch)
    if header.codec != Codec.NONE or header.count > _MOST_MESSAGES:
        return False
    _, columns, _ = columns_before_data(each.batch)
    dues = columns["due_at_ms"]
    first, last = int(dues.min()), int(dues.max())
    tick = first - first % tick_ms
    is_sorted = first == last or bool((dues[1:] >= dues[:-1]).all())
    if last - first > _NARROW_MS or last >= tick + tick_ms or not is_sorted:
        return False
    batch, count = (each.batch,), header.count
    made = Placed(each.partition, batch, first, last, columns, 0, count)
    placed.setdefault(tick, []).append(made)
    return True


def _place_sorted(
    partition: PartitionName,
    found: Sequence[Replayed],
    tick_ms: int,
    covered: Mapping[int, int],
    placed: dict[int, list[Placed]],
    scratch: Scratch | None,
) -> None:
    table = MessageTable.of([each.batch for each in found], scratch)
    dues = table.columns["due_at_ms"]
    if covered:
        offsets = np.repeat([each.offset for each in found], [_count(each) for each in found])
        ticks, which = np.unique(dues - dues % tick_ms, return_inverse=True)
        ends = np.array([covered.get(tick, 0) for tick in ticks.tolist()])
        rows = np.flatnonzero(offsets >= ends[which])
        if not len(rows):
            return
        table = table.taken(rows, scratch)
        dues = table.columns["due_at_ms"]
    table = table.taken(_by_due(dues), scratch)
    dues = table.columns["due_at_ms"]
    seed = seed_of(partition)
    for tick, start, end in _ticks(dues, tick_ms):
        entries = placed.setdefault(tick, [])
        is_narrow = dues[end - 1] - dues[start] <= _NARROW_MS
        most = _MOST_MESSAGES if is_narrow else _FEW_MESSAGES
        for first, last in table.pieces(start, end, most=most, most_bytes=_MOST_BYTES):
            batch = table.parts(first, last, seed=seed, has_due=True)
            due = int(dues[first]), int(dues[last - 1])
            entries.append(Placed(partition, batch, *due, table.columns, first, last))


def _ticks(dues: Numbers, tick_ms: int) -> list[tuple[int, int, int]]:
    """Return the ticks of due times in their order, and where each begins and ends."""
    first, last = int(dues[0]) // tick_ms, int(dues[-1]) // tick_ms
    if last - first <= _FEW_TICKS:
        ticks = range(first * tick_ms, last * tick_ms + 1, tick_ms)
        edges = [0, *np.searchsorted(dues, ticks[1:]).tolist(), len(dues)]
        found = zip(ticks, pairwise(edges), strict=True)
        return [(tick, start, end) for tick, (start, end) in found if start < end]
    begins = dues - dues % tick_ms
    edges = [0, *(np.flatnonzero(begins[1:] != begins[:-1]) + 1).tolist(), len(dues)]
    return [(int(begins[start]), start, end) for start, end in pairwise(edges)]


def _by_due(dues: Numbers) -> Numbers:
    """Return the order of due times; what is due at once keeps its order.

    Times and rows are sorted as one number, which is three times as fast as a stable sort.
    """
    first = int(dues.min())
    if len(dues) > _MOST_ROWS or int(dues.max()) - first > _LONGEST_MS:
        return np.argsort(dues, kind="stable")
    keys: Numbers = dues - first
    keys <<= _ROW_BITS
    keys |= np.arange(len(dues))
    keys.sort()
    keys &= _MOST_ROWS - 1
    return keys


def _count(each: Replayed) -> int:
    return read_header(each.batch).count

"""Read single messages from the entries of a schedule log, as one table."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pulque.delay.schedule.tick_index import RowPlaces, Rows
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.schedule_log import ScheduleEntry, TickFile

__all__ = ["GatheredMessages", "gather"]

_AT_ONCE_BYTES = 8 * 1024 * 1024


class GatheredMessages(NamedTuple):
    """The messages that were read."""

    table: MessageTable | None
    """None if some of them are damaged."""
    lost: Sequence[int] = ()
    """The offsets of damaged entries."""


def gather(file: TickFile, places: RowPlaces) -> GatheredMessages:
    """Return messages of one partition.

    Only some entries at a time are in memory as a whole, so that few messages of many entries take
    little memory.
    """
    tables: list[MessageTable] = []
    lost: list[int] = []
    for start, end in _groups([size for _, size in places.entries]):
        wanted = places.entries[start:end]
        found = list(zip(wanted, file.read(wanted), strict=True))
        lost += [offset for (offset, _), entry in found if entry is None]
        if not lost:
            entries = [entry for _, entry in found if entry is not None]
            tables.append(_taken(entries, places.within[start:end]))
    if lost:
        return GatheredMessages(None, lost)
    table = tables[0] if len(tables) == 1 else MessageTable.joined(tables)
    return GatheredMessages(table.taken(places.order))


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut entries into groups that are not too large."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > _AT_ONCE_BYTES:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)


def _taken(entries: Sequence[ScheduleEntry], within: Sequence[Rows]) -> MessageTable:
    """Return some messages of entries."""
    firsts = np.cumsum([0, *[entry.count for entry in entries[:-1]]])
    rows = np.concatenate([some + first for some, first in zip(within, firsts, strict=True)])
    return MessageTable.of([entry.batch for entry in entries]).taken(rows)

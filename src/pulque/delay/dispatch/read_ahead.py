"""Read messages that are due soon ahead.

Few adjacent messages of a schedule log are due together. So those of the next
seconds are read at once and put on the shelf: an entry is then read once for many of its messages,
and not once for each. Messages that are not on the shelf when they are due, as they came too late
or there was no room, are read then.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from pulque.delay.context import Around
from pulque.delay.schedule.message_reader import GatheredMessages
from pulque.delay.schedule.store import ScheduleStore
from pulque.delay.schedule.tick_index import RowPlaces, Rows, RowState, TickIndex
from pulque.model.names import PartitionName
from pulque.storage.message_table import MessageTable

__all__ = ["Shelf"]

_AHEAD_MS = 20_000
_REFILL_MS = 10_000
"""The shelf is refilled when it ends so soon."""
_MANY_NEW = 1000
"""After so many new messages, those that are due soon are read, too."""
_FILL_BYTES = 16 * 1024 * 1024
_MOST_BYTES = 4 * _FILL_BYTES
_WORTH_READING = 64
"""Fewer messages of a partition are not read ahead."""
_STALE_MS = 60_000
"""Messages on the shelf so long after they were due were cancelled, or sent otherwise."""


class _Tray:
    """Messages of one tick and partition."""

    __slots__ = ("last_due_ms", "left", "rows", "size", "table")

    def __init__(
        self, rows: Rows, table: MessageTable, size: int, last_due_ms: int, left: int
    ) -> None:
        self.rows = rows
        """In ascending order, as they are in the table."""
        self.table = table
        self.size = size
        self.last_due_ms = last_due_ms
        self.left = left
        """How many of them were not taken yet."""


class _ReadPart(NamedTuple):
    """Messages that are on a tray."""

    which: Rows
    """Which of the wanted messages they are."""
    tray: _Tray
    positions: Rows


class Shelf:
    """Messages of begun ticks that were read ahead."""

    def __init__(self, store: ScheduleStore, around: Around) -> None:
        self._store = store
        self._reader = around.reader
        self._trays: dict[tuple[int, PartitionName], list[_Tray]] = {}
        self._until_ms: dict[int, int] = {}
        """By tick: messages due before this were read ahead, or will not be …"""
        self._seen: dict[int, int] = {}
        """… of the messages that existed then."""
        self._used = 0
        self._is_filling = False
        self.hits = 0
        """How many messages were on the shelf when they were wanted."""

    # -- filling -----------------------------------------------------------------------------

    def wants(self, index: TickIndex, now_ms: int) -> bool:
        """Return whether more of a tick should be read ahead."""
        if self._is_filling or self._used + _FILL_BYTES > _MOST_BYTES:
            return False
        ends_soon = self._until_ms.get(index.tick, 0) <= now_ms + _REFILL_MS
        return ends_soon or index.count - self._seen.get(index.tick, 0) >= _MANY_NEW

    async def fill(self, index: TickIndex, now_ms: int) -> None:
        """Read the messages of a tick that are due next; one tick at a time."""
        self._is_filling = True
        try:
            for partition, rows in _by_partition(index, self._next(index, now_ms)):
                await self._put(index, partition, rows)
        finally:
            self._is_filling = False

    def _next(self, index: TickIndex, now_ms: int) -> Rows:
        """Return the messages that are due next and not on the shelf, if there is room for all.

        Else those that are due first.
        """
        tick, dues = index.tick, index.due_ms
        seen, start_ms = self._seen.get(tick, 0), self._until_ms.get(tick, 0)
        until_ms = now_ms + _AHEAD_MS
        is_meant = (index.states <= RowState.NEAR) & (dues < until_ms)
        is_meant[:seen] &= dues[:seen] >= start_ms
        rows = np.flatnonzero(is_meant)
        size = index.bytes_of(rows)
        if size > _FILL_BYTES:
            most = len(rows) * _FILL_BYTES // size
            until_ms = int(np.partition(dues[rows], most)[most])
            first = rows[dues[rows] < until_ms]
            if not len(first):  # so many are due at once that the others are not read ahead
                first, until_ms = rows[dues[rows] == until_ms][:most], until_ms + 1
            rows = first
        self._seen[tick], self._until_ms[tick] = index.count, max(start_ms, until_ms)
        return rows

    async def _put(self, index: TickIndex, partition: PartitionName, rows: Rows) -> None:
        size, last_due_ms = index.bytes_of(rows), int(index.due_ms[rows].max())
        loop = asyncio.get_running_loop()
        gather = partial(self._store.gather, index.tick, index.where(rows))
        try:
            found = await loop.run_in_executor(self._reader, gather)
        except FileNotFoundError:
            return  # all of the tick was delivered meanwhile, and it went
        left = int(np.count_nonzero(index.states[rows] <= RowState.NEAR))
        if found.table is not None and left:  # what is damaged is told when it is due
            tray = _Tray(rows, found.table, size, last_due_ms, left)
            self._trays.setdefault((index.tick, partition), []).append(tray)
            self._used += size

    def clear_old(self, now_ms: int) -> None:
        """Remove stale messages."""
        for key in list(self._trays):
            self._keep(key, lambda tray: tray.last_due_ms >= now_ms - _STALE_MS)

    def clear(self) -> None:
        """Empty the shelf, as the clock was set: other messages are due soon now."""
        self._trays.clear()
        self._until_ms.clear()
        self._seen.clear()
        self._used = 0

    def forget(self, tick: int) -> None:
        """Drop a removed tick."""
        self._until_ms.pop(tick, None)
        self._seen.pop(tick, None)
        for key in [key for key in self._trays if key[0] == tick]:
            self._keep(key, lambda _: False)

    def _keep(self, key: tuple[int, PartitionName], is_kept: Callable[[_Tray], bool]) -> None:
        kept = []
        for tray in self._trays[key]:
            if is_kept(tray):
                kept.append(tray)
            else:
                self._used -= tray.size
        if kept:
            self._trays[key] = kept
        else:
            del self._trays[key]

    # -- taking ------------------------------------------------------------------------------

    async def take(
        self, index: TickIndex, partition: PartitionName, rows: Rows
    ) -> GatheredMessages:
        """Return messages of one partition, from the shelf or from the schedule log."""
        parts, left = self._parts(index.tick, partition, rows)
        for part in parts:
            part.tray.left -= len(part.which)
            self.hits += len(part.which)
        if parts:
            self._keep((index.tick, partition), lambda tray: tray.left > 0)
        places = index.where(rows[left]) if len(left) else None
        loop = asyncio.get_running_loop()
        collect = partial(self._collect, index.tick, parts, left, places)
        return await loop.run_in_executor(self._reader, collect)

    def _parts(
        self, tick: int, partition: PartitionName, rows: Rows
    ) -> tuple[list[_ReadPart], Rows]:
        """Return the messages on trays, and the missing ones."""
        parts = []
        is_left = np.ones(len(rows), bool)
        for tray in self._trays.get((tick, partition), ()):
            at = np.minimum(np.searchsorted(tray.rows, rows), len(tray.rows) - 1)
            which = np.flatnonzero(is_left & (tray.rows[at] == rows))
            if len(which):
                is_left[which] = False
                parts.append(_ReadPart(which, tray, at[which]))
        return parts, np.flatnonzero(is_left)

    def _collect(
        self, tick: int, parts: list[_ReadPart], left: Rows, places: RowPlaces | None
    ) -> GatheredMessages:
        """Merge the messages on trays with those that have to be read."""
        tables = [part.tray.table.taken(part.positions) for part in parts]
        which = [part.which for part in parts]
        if places is not None:
            found = self._store.gather(tick, places)
            if found.table is None or not tables:
                return found
            tables.append(found.table)
            which.append(left)
        if len(tables) == 1:
            return GatheredMessages(tables[0])
        order = np.argsort(np.concatenate(which))
        return GatheredMessages(MessageTable.joined(tables).taken(order))


def _by_partition(index: TickIndex, rows: Rows) -> Iterator[tuple[PartitionName, Rows]]:
    """Yield messages by partition, for partitions with enough of them."""
    owners = index.owners_of(rows)
    counts = np.bincount(owners, minlength=1)
    for owner in np.flatnonzero(counts >= _WORTH_READING).tolist():
        yield index.names[owner], rows[owners == owner]

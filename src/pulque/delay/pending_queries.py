"""Find waiting messages by id or by time, and count them."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from struct import Struct, error
from typing import NamedTuple

import numpy as np

from pulque.delay.context import Around
from pulque.delay.dispatch.dispatcher import Dispatcher
from pulque.delay.schedule.store import ScheduleStore
from pulque.delay.schedule.tick_index import Rows, RowState, TickIndex
from pulque.errors import InvalidRequestError
from pulque.model.batch import seed_of
from pulque.model.ids import ID_SIZE
from pulque.model.names import PartitionName, parse_subject, subject_of
from pulque.rules.ticks import HOUR_MS, LONGEST_TICK_MS
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.dispatch_log import runs_from
from pulque.wire.delay import (
    ANY_DUE,
    MAX_LISTED,
    HourCount,
    Listing,
    Scheduled,
    ScheduledListed,
    ScheduledMessage,
)
from pulque.wire.stuck import StuckListed, StuckMessages

__all__ = ["FoundRow", "Looker"]

_PLACE = Struct("<qqq")
_HOUR = Struct("<q")
_FOREVER = 1 << 62
_NOWHERE = -1
_AT_ONCE = 64
"""Ticks to search before other requests get a turn."""


class FoundRow(NamedTuple):
    """A message of a tick."""

    tick: TickIndex
    row: int

    @property
    def state(self) -> RowState:
        """Its state."""
        return RowState(int(self.tick.states[self.row]))

    @property
    def place(self) -> int:
        """Its place in the schedule log of its tick."""
        return self.tick.place_of(self.row)

    def within(self, live: Mapping[int, TickIndex]) -> "FoundRow":
        """Return it as in the live index of its tick, if that was loaded meanwhile."""
        index = live.get(self.tick.tick)
        if index is None or index is self.tick:
            return self
        rows = index.rows_of(runs_from([self.place]))
        return FoundRow(index, int(rows[0])) if len(rows) else self


class Looker:
    """Searches ticks; caches the indexes of those that are not due for a while."""

    def __init__(
        self, store: ScheduleStore, dispatcher: Dispatcher, around: Around, memory: int
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._around = around
        self._memory = memory
        self._kept: OrderedDict[int, TickIndex] = OrderedDict()
        self._changes = 0

    def forget(self, tick: int) -> None:
        """Drop the cached index of a tick that was removed or changed."""
        self._kept.pop(tick, None)
        self._changes += 1

    async def index(self, tick: int) -> TickIndex:
        """Return the index of a tick as it is now."""
        found = self._dispatcher.live.indexes.get(tick)
        if found is not None:
            self._kept.pop(tick, None)
            return found
        kept, changes = self._kept.get(tick), self._changes
        index = await self._loaded(tick, kept)
        found = self._dispatcher.live.indexes.get(tick)
        if found is not None:
            return found  # it came near meanwhile
        if changes != self._changes:
            return index  # it may have been changed while it was read
        self._kept[tick] = index
        self._kept.move_to_end(tick)
        while len(self._kept) > 1 and self._used() > self._memory:
            self._kept.popitem(last=False)
        return index

    async def _loaded(self, tick: int, kept: TickIndex | None) -> TickIndex:
        if kept is None:
            return await self._around.look(partial(self._store.load_index, tick))
        await self._around.look(partial(self._store.extend_index, kept))
        return kept

    def _used(self) -> int:
        return sum(index.memory for index in self._kept.values())

    async def find(self, message_id: bytes, due_ms: int) -> list[FoundRow]:
        """Return the messages with an id, the newest last.

        Args:
            message_id: Sixteen bytes.
            due_ms: Its due time; ``ANY_DUE`` searches all ticks.
        """
        live = self._dispatcher.live.indexes
        ticks = self._ticks_of(due_ms)
        indexes = [live[tick] for tick in ticks if tick in live]
        cold = [tick for tick in ticks if tick not in live]
        for at in range(0, len(cold), _AT_ONCE):
            some = cold[at : at + _AT_ONCE]
            find = partial(self._store.search.find, some, message_id, may_index=due_ms != ANY_DUE)
            indexes += await self._around.look(find)
        found: list[FoundRow] = []
        for index in sorted(indexes, key=_tick_of):
            rows = index.find(message_id)
            if due_ms != ANY_DUE:
                rows = rows[index.due_ms[rows] == due_ms]
            found += [FoundRow(index, row) for row in rows.tolist()]
        return [each.within(live) for each in found]

    def _ticks_of(self, due_ms: int) -> list[int]:
        ticks = list(self._store.ticks)  # grows in another thread
        ticks.sort()
        if due_ms == ANY_DUE:
            return ticks
        # Ticks may have had another length before.
        return [tick for tick in ticks if tick <= due_ms < tick + LONGEST_TICK_MS]

    async def listed(self, request: Scheduled) -> ScheduledListed:
        """Return messages by due time.

        Raises:
            RejectedError: The request is invalid.
        """
        if request.subject:
            parse_subject(request.subject)
        if request.listing is Listing.ONE:
            return await self._one(request)
        if request.listing is Listing.COUNTS:
            return await self._counts(request)
        return await self._next(request)

    def stuck(self, request: StuckMessages) -> StuckListed:
        """Return the refused messages with the reasons.

        Raises:
            RejectedError: The request is invalid.
        """
        return self._dispatcher.stuck.listed(request)

    # -- one ---------------------------------------------------------------------------------

    async def _one(self, request: Scheduled) -> ScheduledListed:
        if len(request.id) != ID_SIZE:
            raise InvalidRequestError(f"an id of {len(request.id)} bytes; all have {ID_SIZE}")
        found = await self.find(request.id, request.from_ms)
        waiting = [each for each in found if each.state <= RowState.STUCK]
        if not waiting:
            return ScheduledListed((), (), b"")
        index, row = waiting[-1]
        batch = await self.batch_of(index, row)
        return ScheduledListed((), (_message(index, row, batch),), b"")

    async def batch_of(self, index: TickIndex, row: int) -> bytes:
        """Return a message as a batch of one for its partition; empty if it is damaged."""
        table = await self.table_of(index, row)
        if table is None:
            return b""
        seed = seed_of(index.partition_of(row))
        return table.packed(0, 1, seed=seed, has_due=False)

    async def table_of(self, index: TickIndex, row: int) -> MessageTable | None:
        """Return a message by itself; None if it is damaged."""
        places = index.where(np.array([row]))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._around.reader, self._store.gather, index.tick, places
        )
        return found.table

    # -- the next ones -----------------------------------------------------------------------

    async def _next(self, request: Scheduled) -> ScheduledListed:
        most = min(max(request.max_rows, 1), MAX_LISTED)
        after = _place_after(request.after)
        messages: list[ScheduledMessage] = []
        last = after
        for tick in self._ticks_within(request, after[0]):
            index = await self.index(tick)
            rows = _chosen(index, request)
            dues = index.due_ms[rows]
            for i in np.lexsort((rows, dues)).tolist():
                place = (tick, int(dues[i]), int(rows[i]))
                if place <= after:
                    continue
                if len(messages) == most:
                    return ScheduledListed((), tuple(messages), _PLACE.pack(*last))
                messages.append(_message(index, place[2], b""))
                last = place
        return ScheduledListed((), tuple(messages), b"")

    # -- how many ----------------------------------------------------------------------------

    async def _counts(self, request: Scheduled) -> ScheduledListed:
        most = min(max(request.max_rows, 1), MAX_LISTED)
        after = _count_after(request.after)
        counts: list[HourCount] = []
        for hour, ticks in groupby(self._ticks_within(request, after[0]), _hour_of):
            found: Counter[str] = Counter()
            for tick in ticks:
                for partition, number in (await self._waiting(tick, request)).items():
                    name = subject_of(partition)
                    if number and request.subject in ("", name):
                        found[name] += number
            for subject, number in sorted(found.items()):
                if (hour, subject) <= after:
                    continue
                if len(counts) == most:
                    return ScheduledListed(tuple(counts), (), _count_cursor(counts[-1]))
                counts.append(HourCount(hour, subject, number))
        return ScheduledListed(tuple(counts), (), b"")

    async def _waiting(self, tick: int, request: Scheduled) -> dict[PartitionName, int]:
        """Return the number of waiting messages of a tick per partition, within the request."""
        is_whole = request.from_ms <= tick
        is_whole &= tick + LONGEST_TICK_MS <= (request.until_ms or _FOREVER)
        if is_whole and tick not in self._dispatcher.live.indexes:
            found = await self._around.look(partial(self._store.search.waiting, tick))
            if found is not None:
                return found
        index = await self.index(tick)
        owners = index.owners_of(_chosen(index, request))
        return dict(zip(index.names, np.bincount(owners).tolist(), strict=False))

    def _ticks_within(self, request: Scheduled, after: int) -> Iterator[int]:
        from_ms, until_ms = request.from_ms, request.until_ms or _FOREVER
        for tick in self._ticks_of(ANY_DUE):
            if tick + LONGEST_TICK_MS > from_ms and after <= tick < until_ms:
                yield tick


def _tick_of(index: TickIndex) -> int:
    return index.tick


def _hour_of(tick: int) -> int:
    return tick - tick % HOUR_MS


def _chosen(index: TickIndex, request: Scheduled) -> Rows:
    """Return the waiting rows within the request."""
    rows = index.waiting
    dues = index.due_ms[rows]
    rows = rows[(dues >= request.from_ms) & (dues < (request.until_ms or _FOREVER))]
    if request.subject:
        wanted = [i for i, name in enumerate(index.names) if subject_of(name) == request.subject]
        rows = rows[np.isin(index.owners_of(rows), wanted)]
    return rows


def _message(index: TickIndex, row: int, batch: bytes) -> ScheduledMessage:
    message_id, due_ms = index.ids[row].tobytes(), int(index.due_ms[row])
    size = int(index.lengths[row])
    return ScheduledMessage(message_id, due_ms, index.partition_of(row), size, batch)


def _place_after(cursor: bytes) -> tuple[int, int, int]:
    if not cursor:
        return _NOWHERE, 0, 0
    if len(cursor) != _PLACE.size:
        raise InvalidRequestError("the place to go on at is none that an answer gave")
    tick, due_ms, row = _PLACE.unpack(cursor)
    return tick, due_ms, row


def _count_cursor(count: HourCount) -> bytes:
    return _HOUR.pack(count.hour_ms) + count.subject.encode()


def _count_after(cursor: bytes) -> tuple[int, str]:
    if not cursor:
        return _NOWHERE, ""
    try:
        return _HOUR.unpack_from(cursor)[0], cursor[_HOUR.size :].decode()
    except (error, UnicodeDecodeError):
        raise InvalidRequestError("the place to go on at is none that an answer gave") from None

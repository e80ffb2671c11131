"""Cancel and reschedule waiting messages."""

import asyncio

import numpy as np

from pulque.clock import Clock
from pulque.delay.dispatch.dispatcher import Dispatcher
from pulque.delay.pending_queries import FoundRow, Looker
from pulque.delay.receiver import DelayReceiver, DueLimits
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.entries import MOVED_PREFIX
from pulque.delay.schedule.store import ScheduleStore
from pulque.delay.schedule.tick_index import RowState, TickIndex
from pulque.errors import InvalidRequestError, PulqueError, error_from_wire
from pulque.model.batch import seed_of
from pulque.model.pack import ProducedBy
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.dispatch_log import Kind, encode_note
from pulque.wire.delay import ANY_DUE, MAX_LISTED, Fate, Move, Ticket
from pulque.wire.responses import Outcome

__all__ = ["Changer"]


class Changer:
    """Cancels and reschedules messages, one at a time over all requests."""

    def __init__(  # noqa: PLR0913  # what it needs, and nothing else
        self,
        store: ScheduleStore,
        looker: Looker,
        notebook: Notebook,
        receiver: DelayReceiver,
        dispatcher: Dispatcher,
        *,
        clock: Clock,
        due: DueLimits,
    ) -> None:
        self._store = store
        self._looker = looker
        self._notebook = notebook
        self._receiver = receiver
        self._replayer = receiver.replayer
        self._moving = dispatcher.live.moving
        self._live = dispatcher.live.indexes
        self._loading = dispatcher.live.loading
        self._clock = clock
        self._due = due
        self._turn = asyncio.Lock()
        """Held for one message at a time: a request may name a thousand."""
        self._noting: set[tuple[int, int]] = set()
        """Cancelled places, by tick, which a search of the tick may not see yet …"""
        self._written: set[tuple[int, int]] = set()
        """… and those that the dispatch log has by now: searches from now on see them."""
        self.cancelled = 0
        self.moved = 0

    async def cancel(self, tickets: tuple[Ticket, ...]) -> tuple[Fate, ...]:
        """Cancel messages; return the fate of each, once that is on disk.

        Raises:
            InvalidRequestError: The request names too many.
        """
        _check(len(tickets))
        await self._replayer.caught_up()
        fates = []
        for ticket in tickets:
            async with self._turn:
                fates.append(await self._cancel(ticket))
        await self._settled(fates)
        return tuple(fates)

    async def _cancel(self, ticket: Ticket) -> Fate:
        fate, found = await self._find(ticket.id, ticket.due_ms)
        if found is None:
            return fate
        tick, place = found.tick.tick, found.place
        # Both at once: in between its time could come.
        found.tick.mark(np.array([found.row]), RowState.CANCELLED)
        self._loading.get(tick, set()).add(place)
        self._noting.add((tick, place))
        self._note(*found).add_done_callback(lambda _: self._noted(tick, place))
        self.cancelled += 1
        return Fate.CANCELLED

    def _note(self, index: TickIndex, row: int) -> asyncio.Future[None]:
        size = self._store.ticks[index.tick].size
        runs = index.runs_of(np.array([row]))
        return self._notebook.note(index.tick, encode_note(Kind.CANCELLED, size, runs))

    def _noted(self, tick: int, place: int) -> None:
        self._written.add((tick, place))
        self._looker.forget(tick)
        if not self._turn.locked():  # else a look may be under way that began before
            self._forget_written()

    def _forget_written(self) -> None:
        """Drop cancels that every search from now on sees. No search may be running."""
        self._noting -= self._written
        self._written.clear()

    async def _settled(self, fates: list[Fate]) -> None:
        """Wait until the cancels of this and other requests are on disk."""
        if Fate.CANCELLED in fates or Fate.ALREADY_CANCELLED in fates:
            await self._notebook.drained()

    async def reschedule(self, moves: tuple[Move, ...]) -> tuple[Fate, ...]:
        """Reschedule messages; return the fate of each, once that is on disk.

        Raises:
            RejectedError: There are too many, or a time is too far in the future.
        """
        _check(len(moves))
        last_ms = self._clock.now_ms() + self._due.longest_delay_ms
        for each in moves:
            if not 0 < each.new_due_ms <= last_ms:
                raise InvalidRequestError(
                    f"a message is to be due at {each.new_due_ms} ms; 1 to {last_ms} are allowed"
                )
        await self._replayer.caught_up()
        fates = []
        for each in moves:
            async with self._turn:
                fates.append(await self._move(each))
        await self._settled(fates)
        return tuple(fates)

    async def _move(self, move: Move) -> Fate:
        fate, found = await self._find(move.id, move.due_ms)
        if found is None:
            return fate
        if int(found.tick.due_ms[found.row]) == move.new_due_ms:
            return Fate.MOVED  # it was, and the answer was lost
        table = await self._looker.table_of(*found)
        if table is None:
            return Fate.UNKNOWN
        found = found.within(self._live)
        if found.state > RowState.STUCK:
            return Fate.TOO_LATE  # it became due meanwhile
        await self._store_moved(found, table, max(move.new_due_ms, self._clock.now_ms()))
        self._looker.forget(found.tick.tick)
        self.moved += 1
        return Fate.MOVED

    async def _store_moved(self, found: FoundRow, table: MessageTable, due_ms: int) -> None:
        index, row = found
        rows = np.array([row])
        before = found.state
        moving = self._moving.setdefault(index.tick, set())
        moving.add(found.place)
        index.mark(rows, RowState.MOVED)
        partition = index.partition_of(row)
        table.columns["due_at_ms"] = np.array([due_ms], np.int64)
        batch = table.packed(
            0,
            1,
            seed=seed_of(f"{MOVED_PREFIX}{partition}"),
            has_due=True,
            produced_by=ProducedBy(index.place_of(row), 0, index.tick),
        )
        waiter = _Stored()
        try:
            self._receiver.move(partition, batch, waiter)
            await waiter.stored
        except PulqueError:
            for each in (found, found.within(self._live)):
                state = RowState.WAITING if before == RowState.NEAR else before
                each.tick.mark(np.array([each.row]), state)
                each.tick.approach(each.tick.near_ms)
            raise
        else:
            await self._replayer.caught_up()
        finally:
            moving.discard(found.place)

    async def _find(self, message_id: bytes, due_ms: int) -> tuple[Fate, FoundRow | None]:
        """Return a waiting message, or its fate."""
        self._forget_written()
        found = await self._looker.find(message_id, due_ms)
        states = [each.state for each in found]
        for each in reversed(found):
            if each.state <= RowState.STUCK:
                if (each.tick.tick, each.place) in self._noting:
                    return Fate.ALREADY_CANCELLED, None
                return Fate.UNKNOWN, each
        if due_ms != ANY_DUE and RowState.MOVED in states:
            return await self._find(message_id, ANY_DUE)
        return self._fate(states, due_ms), None

    def _fate(self, states: list[RowState], due_ms: int) -> Fate:
        if RowState.CANCELLED in states:
            return Fate.ALREADY_CANCELLED
        if RowState.TAKEN in states or RowState.DONE in states:
            return Fate.TOO_LATE
        # What was due in a tick that is over is gone with it.
        return Fate.TOO_LATE if 0 < due_ms <= self._clock.now_ms() else Fate.UNKNOWN


class _Stored:
    """Waits for the outcome of a batch."""

    def __init__(self) -> None:
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, index: int, outcome: Outcome) -> None:
        del index
        if outcome.code:
            self.stored.set_exception(error_from_wire(outcome.code, outcome.text))
        else:
            self.stored.set_result(None)


def _check(count: int) -> None:
    if not 1 <= count <= MAX_LISTED:
        raise InvalidRequestError(
            f"{count} messages in one request; 1 to {MAX_LISTED} are allowed"
        )

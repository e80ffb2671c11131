"""Send due messages to brokers.

The indexes of ticks that have begun, or begin soon, are in memory. Due messages are taken from
them, read from the schedule logs, and sent in batches: partitions concurrently, the batches of one
partition one after the other, in the order of due times.

Every batch is numbered. Its number, its broker and its messages are written to the dispatch log
(``storage/schedule/dispatch_log.py``) before it is sent for the first time. While the outcome is
unknown, the same batch goes to the same broker again, which stores each number once.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence

import numpy as np

from pulque.delay.context import Around
from pulque.delay.dispatch.adoption import adoption_of
from pulque.delay.dispatch.broker_connections import Taker
from pulque.delay.dispatch.clock import ClockWatch, Lateness
from pulque.delay.dispatch.due_batches import Delivery, Item, Parcel, PartitionBacklog
from pulque.delay.dispatch.live_ticks import LiveTicks
from pulque.delay.dispatch.read_ahead import Shelf
from pulque.delay.dispatch.stuck_messages import Stuck
from pulque.delay.dispatch.targets import grouped_by_target, partition_at, target_of_key
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.store import ScheduleStore, open_intents
from pulque.delay.schedule.tick_index import Block, Rows, RowState, TickIndex
from pulque.errors import (
    DisconnectedError,
    InvalidBatchError,
    MessageTooLargeError,
    OverloadedError,
    PulqueError,
    RejectedError,
    StorageFullError,
    UnavailableError,
)
from pulque.model.batch import Flag, seed_of
from pulque.model.names import PartitionName
from pulque.model.pack import ProducedBy
from pulque.model.routes import PartitionRoute
from pulque.rules.schedule import TICK_MS
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.dispatch_log import (
    Intent,
    Kind,
    Noted,
    encode_intent,
    encode_note,
)
from pulque.wire.adopt import Adopt

__all__ = ["Dispatcher"]

_NEAR_MS = 10_000
_LOOK_MS = 2000
"""The interval at which messages that are due soon are put into the wheels."""
_LONGEST_SLEEP_S = 0.05
"""The interval at which the clock is checked: it may have been set."""
_MOST_TAKEN = 16 * 1024 * 1024
"""Bytes of messages in memory at once, per partition."""
_AT_ONCE = 64
_MOST_ADOPTED = 100
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_INCARNATION = 1
_MOST_REFUSALS = 3
"""A piece that was refused for good so often is set aside."""
_OF_ONE = (MessageTooLargeError, InvalidBatchError)
"""Errors that concern a single message of a piece."""
_ORDER_KEYS = int(Flag.ORDER_KEYS)


class Dispatcher:
    """Sends due messages."""

    def __init__(  # noqa: PLR0913  # what it needs, and nothing else
        self,
        store: ScheduleStore,
        notebook: Notebook,
        brokers: Taker,
        delivery: Delivery,
        around: Around,
        sequences: Mapping[tuple[str, str], int],
        *,
        first_sequence: int,
        unresumed: Iterable[int],
    ) -> None:
        self._store = store
        self._notebook = notebook
        self._brokers = brokers
        self._delivery = delivery
        self._clock = around.clock
        self._warn = around.warn
        self.sequences = dict(sequences)
        """For each broker group and partition, the number of the next batch …"""
        self.first_sequence = first_sequence
        """… which is not less than this."""
        self.live = LiveTicks(store, notebook, around, unresumed)
        self._is_loading = False
        self._numbers: dict[int, int] = {}
        self._lanes: dict[PartitionName, PartitionBacklog] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._failure: BaseException | None = None
        self._looked_ms = 0
        self._watch = ClockWatch(around.clock)
        self._wake = asyncio.Event()
        self.dispatched = 0
        self.refused = 0
        self.lost = 0
        self.steps = 0
        self.lateness = Lateness()
        self.stuck = Stuck(around.clock, around.warn)
        self._shelf = Shelf(store, around)

    # -- taking ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dispatch until cancelled.

        Raises:
            PulqueError: The disk failed.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            now_ms = self._clock.now_ms()
            self._watch_clock(now_ms)
            self._look(now_ms)
            if not self.live.unresumed:
                self._take(now_ms)
            self._wake.clear()
            try:
                async with asyncio.timeout(_LONGEST_SLEEP_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _take(self, now_ms: int) -> None:
        """Take due messages, and start to send them."""
        for tick in sorted(self.live.indexes):
            index = self.live.indexes[tick]
            while (found := index.take(now_ms)) is not None:
                self._put(found[0], Item(index, found[1]))

    @property
    def read_ahead(self) -> int:
        """How many messages were in memory when they were due."""
        return self._shelf.hits

    @property
    def is_idle(self) -> bool:
        """Whether all begun ticks are loaded, and no batch is in flight."""
        now_ms = self._clock.now_ms()
        ticks = list(self._store.ticks)
        is_loaded = all(tick in self.live.indexes for tick in ticks if tick <= now_ms)
        return is_loaded and not self._tasks

    @property
    def has_due(self) -> bool:
        """Whether a due message is not at a broker yet; refused ones do not count."""
        now_ms = self._clock.now_ms()
        last_ms = now_ms // TICK_MS * TICK_MS
        if any(tick <= now_ms and tick not in self.live.indexes for tick in self._store.ticks):
            return True
        return any(index.is_coming_by(last_ms) for index in self.live.indexes.values())

    def wake(self) -> None:
        """Check the clock now, as it was set."""
        self._wake.set()

    async def close(self) -> None:
        """Cancel sends in flight; they continue after a restart."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def extend(self, added: Mapping[int, Block | None]) -> None:
        """Add new entries of schedule logs to the indexes."""
        is_soon, is_missing = self.live.extend(added, self._clock.now_ms())
        if is_missing and not self._is_loading:
            self._looked_ms = 0
        if is_soon or is_missing:
            self._wake.set()

    def _watch_clock(self, now_ms: int) -> None:
        step_ms = self._watch.step_ms(now_ms)
        if step_ms:
            self.steps += 1
            self._looked_ms = 0
            self._shelf.clear()
            self._warn("clock_stepped", by_ms=step_ms, now_ms=now_ms)

    def _look(self, now_ms: int) -> None:
        """Load the ticks that have begun or begin soon, and fill the wheels."""
        steady_ms = self._clock.monotonic_ms()
        if self._looked_ms and steady_ms - self._looked_ms < _LOOK_MS:
            return
        self._looked_ms = max(steady_ms, 1)
        if not self._is_loading and self.live.wanted(now_ms) is not None:
            self._is_loading = True
            self._start(self._load())
        self.stuck.give_back(steady_ms)
        self._shelf.clear_old(now_ms)
        indexes = self.live.indexes.values()
        for index in indexes:
            index.approach(now_ms + _NEAR_MS)
        wanting = [each for each in indexes if self._shelf.wants(each, now_ms)]
        for index in wanting[:1]:
            self._start(self._shelf.fill(index, now_ms))

    def forget(self, tick: int) -> None:
        """Drop a removed tick."""
        self.live.forget(tick)
        self._shelf.forget(tick)

    async def _load(self) -> None:
        """Load the wanted ticks; others are dispatched meanwhile."""
        try:
            while (tick := self.live.wanted(self._clock.now_ms())) is not None:
                index, noted = await self.live.load(tick)
                self._resume(index, noted)
                index.approach(self._clock.now_ms() + _NEAR_MS)
                self._wake.set()
        finally:
            self._is_loading = False
            self._looked_ms = 0  # some of it should be read ahead

    def _resume(self, index: TickIndex, noted: Noted) -> None:
        """Resend batches that were in flight when the server stopped."""
        self._numbers[index.tick] = noted.last_number
        for intent in open_intents(noted):
            rows = index.rows_of(intent.runs)
            if len(rows):
                self._put(index.partition_of(int(rows[0])), Item(index, rows, intent))

    def _put(self, partition: PartitionName, item: Item) -> None:
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = PartitionBacklog(partition)
        lane.items.append(item)
        if not lane.is_working:
            lane.is_working = True
            self._start(self._work(lane))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._wake.set()

    async def _work(self, lane: PartitionBacklog) -> None:
        while lane.items:
            async with self._slots:
                await self._dispatch(lane, lane.next_item(_MOST_TAKEN))
        lane.is_working = False
        self._lanes.pop(lane.partition, None)

    # -- reading -----------------------------------------------------------------------------

    async def _dispatch(self, lane: PartitionBacklog, item: Item) -> None:
        index, rows = item.index, item.rows
        if item.intent is None and len(rows) > 1 and index.bytes_of(rows) > _MOST_TAKEN:
            half = len(rows) // 2
            await self._dispatch(lane, Item(index, rows[:half]))
            await self._dispatch(lane, Item(index, rows[half:]))
            return
        found = await self._shelf.take(index, lane.partition, rows)
        if found.table is None:
            await self._without_damaged(lane, item, found.lost)
        else:
            await self._deliver_all(lane, item, found.table)

    async def _without_damaged(
        self, lane: PartitionBacklog, item: Item, damaged: Sequence[int]
    ) -> None:
        """Continue with messages that are not in damaged entries."""
        is_lost = np.isin(item.index.offsets_of(item.rows), damaged)
        lost = item.rows[is_lost]
        item.index.mark(lost, RowState.LOST)
        self.lost += len(lost)
        self._warn("dispatch_impossible", partition=lane.partition, messages=len(lost))
        if item.intent is not None:
            # Whether the broker has the batch is not known, and it cannot be made again.
            await self._abandon(item.index, item.intent)
        left = item.rows[~is_lost]
        if len(left):
            await self._dispatch(lane, Item(item.index, left))

    # -- sending -----------------------------------------------------------------------------

    async def _deliver_all(self, lane: PartitionBacklog, item: Item, table: MessageTable) -> None:
        index, rows = item.index, item.rows
        if item.intent is not None:
            parcel = Parcel(index, rows, table, 0, len(rows), item.intent)
            if await self._send(lane, parcel, None) is not None:
                await self._deliver_all(lane, Item(index, rows), table)
            return
        if table.flags & _ORDER_KEYS and lane.group is None:
            item, table = await self._grouped(lane, item, table)
        most = _MOST_ADOPTED if lane.group is not None else self._delivery.batch_messages
        pieces = table.pieces(0, len(rows), most=most, most_bytes=self._delivery.batch_bytes)
        for start, end in pieces:
            await self._deliver(lane, item, table, start, end)

    async def _grouped(
        self, lane: PartitionBacklog, item: Item, table: MessageTable
    ) -> tuple[Item, MessageTable]:
        """Group messages by target partition; messages of one key stay in order."""
        try:
            partitions = (await self._brokers.route(lane.subject)).partitions
        except PulqueError:
            return item, table  # it is asked again, and complained about, for each piece
        if len(partitions) < 2:
            return item, table
        order = grouped_by_target(partitions, table)
        return Item(item.index, item.rows[order]), table.taken(order)

    async def _deliver(
        self, lane: PartitionBacklog, item: Item, table: MessageTable, start: int, end: int
    ) -> None:
        """Send a piece; set aside messages that brokers refuse for good, and send the rest."""
        wait_s = _FIRST_WAIT_S
        refusals = 0
        while start < end:
            stop, problem = await self._try(lane, item, table, start, end)
            if problem is None:
                start, refusals, wait_s = stop, 0, _FIRST_WAIT_S
                continue
            is_final = isinstance(problem, RejectedError) and not problem.retryable
            refusals = refusals + 1 if is_final else 0
            if is_final and (lane.group is not None or isinstance(problem, _OF_ONE)):
                # It is about one of them, and nobody says which.
                if stop - start > 1:
                    middle = (start + stop) // 2
                    await self._deliver(lane, item, table, start, middle)
                    await self._deliver(lane, item, table, middle, stop)
                else:
                    self.stuck.put(item.index, item.rows[start:stop], lane.partition, problem)
                start = stop
            elif refusals >= _MOST_REFUSALS:
                self.stuck.put(item.index, item.rows[start:stop], lane.partition, problem)
                start = stop
            else:
                wait_s = await self._back_off(wait_s)

    async def _try(
        self, lane: PartitionBacklog, item: Item, table: MessageTable, start: int, end: int
    ) -> tuple[int, PulqueError | None]:
        """Send a piece, or as much of it as goes to one broker.

        Returns:
            The next step, and the error if it was not accepted.
        """
        try:
            target, stop = await self._target(lane, table, start, end)
        except PulqueError as error:
            self._complain(lane, error)
            return end, error
        rows = item.rows[start:stop]
        intent = self._intend(lane, item.index, rows, target)
        await self._notebook.note(item.index.tick, encode_intent(intent))
        parcel = Parcel(item.index, rows, table, start, stop, intent)
        return stop, await self._send(lane, parcel, target)

    def _intend(
        self, lane: PartitionBacklog, index: TickIndex, rows: Rows, target: PartitionRoute
    ) -> Intent:
        """Give a batch its number."""
        partition = partition_at(target, lane)
        key = (target.broker_group, partition)
        sequence = max(self.sequences.get(key, 0), self.first_sequence)
        self.sequences[key] = sequence + 1
        number = self._numbers[index.tick] = self._numbers.get(index.tick, 0) + 1
        durable = self._store.ticks[index.tick].size
        return Intent(
            number, sequence, durable, target.broker_group, partition, index.runs_of(rows)
        )

    async def _send(
        self, lane: PartitionBacklog, parcel: Parcel, target: PartitionRoute | None
    ) -> PulqueError | None:
        """Send a batch until its outcome is known; return the error if it was not accepted.

        Args:
            lane: Its lane.
            parcel: The batch.
            target: The target; None for a resend, which goes to the same broker.
        """
        intent = parcel.intent
        was_sent = target is None
        began_ms = self._clock.monotonic_ms()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                target = target or await self._target_named(lane, intent)
                await self._brokers.reach(target)
                was_sent = True
                await self._put_at(lane, parcel, target)
            except (RejectedError, StorageFullError, OverloadedError) as error:
                self.refused += 1
                self._complain(lane, error)
                problem: PulqueError = error
                break
            except PulqueError as error:
                self._complain(lane, error)
                problem = error
                if not was_sent and isinstance(error, DisconnectedError):
                    break
                if self._clock.monotonic_ms() - began_ms > self._delivery.patience_ms:
                    self._give_up(lane, parcel)
                    break
            else:
                self._accepted(parcel)
                return None
            target = None
            wait_s = await self._back_off(wait_s)
        await self._abandon(parcel.index, intent)
        return problem

    def _give_up(self, lane: PartitionBacklog, parcel: Parcel) -> None:
        self._warn(
            "dispatch_may_double",
            partition=lane.partition,
            broker_group=parcel.intent.broker_group,
            messages=len(parcel.rows),
        )

    async def _put_at(
        self, lane: PartitionBacklog, parcel: Parcel, target: PartitionRoute
    ) -> None:
        if lane.group is not None:
            for row in range(parcel.start, parcel.end):
                await self._brokers.adopt(target, self._adoption(lane, parcel.table, row))
            return
        intent, delivery = parcel.intent, self._delivery
        batch = parcel.table.packed(
            parcel.start,
            parcel.end,
            seed=seed_of(intent.partition),
            has_due=False,
            produced_by=ProducedBy(
                delivery.producer_id, _INCARNATION, intent.sequence, named=True
            ),
        )
        await self._brokers.send(target, intent.partition, batch)

    def _adoption(self, lane: PartitionBacklog, table: MessageTable, row: int) -> Adopt:
        """Return the request that adds a message to the retries of one group, once."""
        batch = table.packed(row, row + 1, seed=seed_of(lane.partition), has_due=False)
        due_ms = int(table.columns["due_at_ms"][row])
        return adoption_of(batch, lane.partition, due_ms, self._delivery.name)

    def _accepted(self, parcel: Parcel) -> None:
        index, rows = parcel.index, parcel.rows
        self._notebook.note_soon(index.tick, encode_note(Kind.DONE, parcel.intent.number))
        index.mark(rows, RowState.DONE)
        self.dispatched += len(rows)
        self.lateness.add(self._clock.now_ms() - index.due_ms[rows])

    async def _abandon(self, index: TickIndex, intent: Intent) -> None:
        """Record that a batch was not stored, before any later batch is sent.

        Else a restart after a power cut would resend it under its old number, and a broker that
        has stored 64 batches since would take it for a duplicate.
        """
        await self._notebook.note(index.tick, encode_note(Kind.ABANDONED, intent.number))

    # -- where to ----------------------------------------------------------------------------

    async def _target(
        self, lane: PartitionBacklog, table: MessageTable, start: int, end: int
    ) -> tuple[PartitionRoute, int]:
        """Return the target of the next messages, and how many of them go there."""
        route = await self._brokers.route(lane.subject)
        writable = [each for each in route.partitions if each.is_writable]
        if not writable:
            raise UnavailableError(f"no broker takes messages of {lane.subject} now")
        if table.flags & _ORDER_KEYS and len(route.partitions) > 1 and lane.group is None:
            return target_of_key(route.partitions, table, start, end)
        lane.turn += 1
        return writable[lane.turn % len(writable)], end

    async def _target_named(self, lane: PartitionBacklog, intent: Intent) -> PartitionRoute:
        """Return the address of the broker that a batch was sent to."""
        route = await self._brokers.route(lane.subject)
        for each in route.partitions:
            if each.broker_group == intent.broker_group:
                return each
        raise UnavailableError(f"broker group {intent.broker_group} is away")

    def _complain(self, lane: PartitionBacklog, error: PulqueError) -> None:
        self._brokers.forget(lane.subject)
        self._warn("dispatch_delayed", partition=lane.partition, reason=str(error))

    async def _back_off(self, wait_s: float) -> float:
        """Wait, so that others get a turn; return the next back-off."""
        self._slots.release()
        try:
            await asyncio.sleep(wait_s)
        finally:
            await self._slots.acquire()
        return min(wait_s * 2, _LONGEST_WAIT_S)

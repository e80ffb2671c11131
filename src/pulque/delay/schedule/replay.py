"""Replay the message log into the schedule logs, continuously.

The lag is bounded: when the replay is some steps behind, answers to sends are delayed,
which slows producers down, and beyond a limit sends are refused. Recovery replays everything
after the last checkpoint in the same way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from pulque.delay.context import Around
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.entries import MovedNote, ReplayedStep, check_records
from pulque.delay.schedule.store import ScheduleStore, Step
from pulque.delay.schedule.tick_index import Block
from pulque.errors import InvalidBatchError, StorageFullError
from pulque.model.batch import seed_of, verify_crc
from pulque.model.positions import MessageOffset
from pulque.model.record import RecordType
from pulque.storage.engine import Engine
from pulque.storage.events import Listener
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.segment import DamagedBytes, walk
from pulque.storage.schedule.dispatch_log import Kind, encode_note, runs_from

__all__ = ["Replayer", "moved_notes", "replay_rest"]

_STEP_BYTES = 32 * 1024 * 1024
_LEAST_STEP_BYTES = 2 * 1024 * 1024
"""A step of this size stays in the CPU cache, and allocates no memory."""
_BYTES_PER_TICK = 64 * 1024
"""The bytes that should go to a tick at once, as each has a file to open."""
_STEPS_BEHIND = 2
_BYTES_BEHIND = 8 * 1024 * 1024
"""Answers wait if more than so many bytes, and some steps, are not replayed."""
_PAUSE_S = 0.005
"""A pause that lets concurrent sends be replayed together."""
_TRY_AGAIN_S = 1.0


class Replayer:
    """Replays the message log into the schedule.

    Args:
        engine: The message log.
        store: The schedule.
        notebook: Records the old places of rescheduled messages.
        around: Clock, threads and locks.
        wanted: Ticks that have an index. None is added while schedule logs are written.
        added: Called with the ticks that grew, and the new rows of their indexes.
        missed: Called when indexes may have missed rows.
        answered: Called after delayed answers were sent.
    """

    def __init__(  # noqa: PLR0913  # what it needs, and nothing else
        self,
        engine: Engine,
        store: ScheduleStore,
        notebook: Notebook,
        around: Around,
        *,
        wanted: Container[int],
        answered: Callable[[], None],
        added: Callable[[dict[int, Block | None]], None],
        missed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._notebook = notebook
        self._around = around
        self._wanted = wanted
        self._answered = answered
        self._added = added
        self._missed = missed
        self._unplaced: deque[Appended] = deque()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._step_bytes = _LEAST_STEP_BYTES
        self._has_room = True
        self._held: list[Callable[[], None]] = []
        """Delayed answers to sends."""
        self.waiting_bytes = 0
        """The bytes of batches that are not in the schedule yet."""
        self.spent_ms = 0
        """The time spent on replaying so far."""

    def put(self, appended: Appended) -> None:
        """Add an appended batch, in the order of the message log."""
        self._unplaced.append(appended)
        self.waiting_bytes += len(appended.batch)
        self._is_idle.clear()

    def drop(self, appended: Appended) -> None:
        """Drop a batch whose write failed."""
        if appended in self._unplaced:
            self._unplaced.remove(appended)
            self.waiting_bytes -= len(appended.batch)
            if not self._unplaced:
                self._is_idle.set()

    def pace(self, answer: Callable[[], None]) -> None:
        """Answer a send; later, if the schedule is behind."""
        if self._is_behind:
            self._held.append(answer)
        else:
            answer()

    @property
    def _is_behind(self) -> bool:
        # Without room nobody knows for how long: then it is for the limit to refuse.
        most = max(_STEPS_BEHIND * self._step_bytes, _BYTES_BEHIND)
        return self._has_room and self.waiting_bytes > most

    def _answer_held(self) -> None:
        if not self._held or self._is_behind:
            return
        held, self._held = self._held, []
        for answer in held:
            answer()
        self._answered()

    def wake(self) -> None:
        """Wake the replay after a write or a sync."""
        self._has_work.set()

    async def caught_up(self) -> None:
        """Wait until all batches written by now are in the schedule."""
        await self._is_idle.wait()

    async def run(self) -> None:
        """Replay until cancelled.

        Raises:
            StorageError: The disk failed.
        """
        while True:
            batches = self._take()
            if batches:
                await self._replay(batches)
                await asyncio.sleep(0)  # others have their turn
            else:
                if not self._unplaced:
                    self._is_idle.set()
                await self._has_work.wait()
                self._has_work.clear()
                await asyncio.sleep(_PAUSE_S)

    def _take(self) -> list[Appended]:
        """Return the batches of the next step."""
        unplaced, synced = self._unplaced, self._engine.synced
        batches: list[Appended] = []
        size = 0
        while unplaced and unplaced[0].is_written and size < self._step_bytes:
            # What has to survive a power cut is not delivered before it does.
            if unplaced[0].wants_disk and unplaced[0].end > synced:
                break
            taken = unplaced.popleft()
            batches.append(taken)
            size += len(taken.batch)
        return batches

    async def _replay(self, batches: list[Appended]) -> None:
        """Replay batches into the schedule."""
        replayed = [
            ReplayedStep(each.partition.name, each.entry.offset, each.end, each.batch, each.remark)
            for each in batches
        ]
        async with self._around.lock:
            step = await self._patiently(replayed, batches[-1].end)
            self._added(step.added)
            self._step_bytes = _step_bytes(len(step.added))
            self.waiting_bytes -= sum(len(each.batch) for each in batches)
            self._answer_held()
            for tick, record in moved_notes(self._store, step.moved):
                await self._notebook.note(tick, record)
        if not self._unplaced:
            self._is_idle.set()

    async def _patiently(self, replayed: list[ReplayedStep], end: int) -> Step:
        """Run a step; with a full disk, wait for room."""
        while True:
            began_ms = self._around.clock.monotonic_ms()
            try:
                step = await self._do(replayed, end)
            except StorageFullError as error:
                self._around.warn("schedule_delayed", reason=str(error))
                self._has_room = False
                self._answer_held()
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                if not self._has_room:
                    self._missed()  # some ticks have had their part of the step before
                self._has_room = True
                self.spent_ms += self._around.clock.monotonic_ms() - began_ms
                return step

    async def _do(self, replayed: list[ReplayedStep], end: int) -> Step:
        """Run a step, in the thread of schedule logs.

        A small step is prepared here, and only written there: sharing the interpreter with a
        thread costs more time than preparing it, and writing releases the interpreter lock.
        """
        loop = asyncio.get_running_loop()
        store, scheduler = self._store, self._around.scheduler
        if self._step_bytes > _LEAST_STEP_BYTES:
            work = partial(store.replay, replayed, end, wanted=self._wanted)
            return await loop.run_in_executor(scheduler, work)
        step = store.prepare(replayed, end, wanted=self._wanted)
        await loop.run_in_executor(scheduler, store.write, step)
        return step


def _step_bytes(ticks: int) -> int:
    """Return the size of the next step, if the last one went into so many ticks."""
    return min(max(ticks * _BYTES_PER_TICK, _LEAST_STEP_BYTES), _STEP_BYTES)


def moved_notes(store: ScheduleStore, moved: Sequence[MovedNote]) -> list[tuple[int, bytes]]:
    """Return the dispatch-log records for rescheduled messages."""
    return [
        (each.tick, encode_note(Kind.MOVED, store.ticks[each.tick].size, runs_from([each.place])))
        for each in moved
        if each.tick in store.ticks
    ]


def replay_rest(engine: Engine, store: ScheduleStore, listener: Listener, tick_ms: int) -> int:
    """Replay the message log from the last checkpoint on.

    Args:
        engine: The message log.
        store: The schedule.
        listener: Is told of damage.
        tick_ms: The length of ticks at that time.

    Returns:
        The number of batches.
    """
    count = size = 0
    step: list[ReplayedStep] = []
    for each in _rest(engine, store.replayed, listener):
        step.append(each)
        size += len(each.batch)
        count += 1
        if size > _STEP_BYTES:
            _replay_step(store, step, step[-1].end, tick_ms)
            step, size = [], 0
    _replay_step(store, step, engine.end, tick_ms)
    return count


def _replay_step(store: ScheduleStore, step: list[ReplayedStep], end: int, tick_ms: int) -> None:
    moved = store.replay(step, end, was_tick_ms=tick_ms).moved
    for tick, record in moved_notes(store, moved):
        store.note({tick: record}, is_durable=True)


def _rest(engine: Engine, start: int, listener: Listener) -> Iterator[ReplayedStep]:
    names = {p.id: p.name for p in engine.partitions.by_id.values()}
    for segment in engine.segments:
        if segment.end <= start:
            continue
        for found in walk(segment, MessageOffset(max(start, segment.base))):
            if isinstance(found, DamagedBytes):
                size = found.end - found.offset
                listener.corruption_found(segment.path, found.offset, size, found.reason)
                continue
            envelope, batch = found
            if envelope.type is not RecordType.BATCH:
                continue
            name = names.get(envelope.partition)
            if name is None or not verify_crc(batch, seed_of(name)):
                reason = "the crc of a batch does not match"
                listener.corruption_found(segment.path, envelope.offset, envelope.size, reason)
                continue
            try:
                check_records(batch)
            except InvalidBatchError as error:
                reason = f"a batch cannot be opened: {error}"
                listener.corruption_found(segment.path, envelope.offset, envelope.size, reason)
                continue
            end = envelope.offset + envelope.size
            yield ReplayedStep(name, envelope.offset, end, batch)

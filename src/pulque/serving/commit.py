"""Group commit: many appends, one write; many waiting sends, one sync.

All batches that arrive in one turn of the event loop are written together when the turn ends;
what a producer brings that is alone is written as soon as all of it is here.
Those that ask for the disk then wait for a sync in a thread; whatever arrives meanwhile shares
the next one. A failed sync is never repeated: the pages may be gone, so the broker stops.

Where a broker has followers, they copy what is written while it is synced here; what waits for the
disk then waits until it is ``confirm``ed that all of them have it, too.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pulque.errors import PulqueError, StorageError, StorageFullError, UnavailableError
from pulque.model.positions import ActionOffset, MessageOffset
from pulque.serving.sync_thread import SyncThread
from pulque.storage.engine import Engine
from pulque.storage.logs.message_log import Appended, SyncJob
from pulque.storage.logs.partitions import Partition

__all__ = ["Committer", "Copying", "Synced"]

Synced = Callable[[PulqueError | None], None]
"""Called once: with None when facts are on disk, else with what went wrong."""
Done = Callable[[Appended, PulqueError | None], None]
"""Called once for each append: with None when it is confirmed, else with what went wrong."""


class Copying(Protocol):
    """Who sees to it that followers have what is in the logs, and confirms it then."""

    def written(self) -> None:
        """Take note that there is more in the logs."""

    def synced(self) -> None:
        """Take note that more of them is on this broker's disk."""


class Committer:
    """Takes appends to the disk and tells when they are confirmed."""

    def __init__(  # noqa: PLR0915  # what it keeps track of
        self,
        engine: Engine,
        *,
        sync_interval_s: float,
        wake: Callable[[list[Partition]], None],
        fail: Callable[[PulqueError], None],
        answered: Callable[[], None],
        copying: Copying | None = None,
    ) -> None:
        self._engine = engine
        self._copying = copying
        """None for a broker that stands alone."""
        self._confirmed: tuple[int, int] | None = None if copying is None else (0, 0)
        """Followers have the message log and the action log up to here; None if there are none."""
        self._interval_s = sync_interval_s
        self._wake = wake
        self._fail = fail
        """Called when the disk failed and the broker must stop."""
        self._answered = answered
        """Called after appends were confirmed: what was answered can go to the clients."""
        self._loop = asyncio.get_running_loop()
        self._thread = SyncThread(self._loop)
        self._queued: list[tuple[Appended, Done]] = []
        self._waiting: deque[tuple[Appended, Done]] = deque()
        """Who waits for the message log to be on disk, in its order."""
        self._facts: deque[tuple[MessageOffset, ActionOffset, Synced]] = deque()
        """Who waits for both logs to be on disk, and up to where."""
        self._is_flush_scheduled = False
        self._last_owner: object = None
        """Who brought what was queued last."""
        self._is_closed = False
        self._is_running = False
        """A sync is under way."""
        self._is_over = asyncio.Event()
        """Set whenever none is."""
        self._is_over.set()
        self._wants_actions = False
        self._is_behind = False
        """Something is confirmed and cannot be seen, as a batch before it waits for the disk."""
        self._timer = self._loop.call_later(sync_interval_s, self._tick)
        self.waiting_bytes = 0
        """Of batches that are not confirmed yet."""
        self.syncs = 0

    @property
    def has_followers(self) -> bool:
        """Whether what is confirmed is on other disks, too."""
        return self._copying is not None

    def submit(self, appended: Appended, done: Done) -> None:
        """Confirm an append that the engine has queued; ``schedule`` or ``hurry`` writes it."""
        self.waiting_bytes += len(appended.batch)
        self._queued.append((appended, done))

    def hurry(self, owner: object) -> None:
        """Write what one connection brought, now that all of it is here.

        One that is alone does not wait for the end of the turn. Those that are not share
        one write.
        """
        if not self._queued:
            return
        if owner is self._last_owner:
            self.flush()
        else:
            self._last_owner = owner
            self.schedule()

    def sync_facts(self, done: Synced) -> None:
        """Tell when all facts that are recorded by now are on disk, and all that was written."""
        written = MessageOffset(self._engine.segments[-1].end)
        self._facts.append((written, self._engine.actions.end, done))
        self._wants_actions = True
        self._start_sync()
        if self._copying is not None:
            self._copying.written()

    async def synced(self) -> None:
        """Wait until all that is recorded and written by now is on disk.

        Raises:
            UnavailableError: Nobody knows whether it is: the disk failed.
        """
        over: asyncio.Future[None] = self._loop.create_future()

        def done(error: PulqueError | None) -> None:
            if over.done():
                return
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)

        self.sync_facts(done)
        await over

    def schedule(self) -> None:
        """See to it that the engine's queue is written when this turn of the loop ends."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self.flush)

    async def close(self) -> None:
        """Sync everything and stop. Nothing may be submitted any more."""
        self._timer.cancel()
        self.flush()
        while self._is_running:  # the end of one may be the beginning of another
            await self._is_over.wait()
        self._is_closed = True
        job = self._begin_sync(actions=True)
        if job is not None:
            self._run(job)
            await self._is_over.wait()
        self.forsake(UnavailableError("the broker stops, and its followers may not have it"))
        while self._facts:
            self._facts.popleft()[2](UnavailableError("the broker stops before it is confirmed"))
        self._thread.stop()

    def confirm(self, messages: MessageOffset, actions: ActionOffset) -> None:
        """Take note that all who are in sync have the logs up to here, and tell who waits."""
        self._confirmed = (messages, actions)
        confirmed = self._engine.confirm(messages)
        over = self._take_over(messages)
        self._tell_facts()
        self._tell(over, confirmed)

    def forsake(self, error: PulqueError) -> None:
        """Tell all who wait for a batch that nobody knows whether it will be confirmed."""
        while self._waiting:
            appended, done = self._waiting.popleft()
            self._end(appended, done, error)

    def flush(self) -> None:
        """Write the engine's queue now, and tell those whose appends are confirmed by that."""
        self._is_flush_scheduled = False
        confirmed, error = self._write()
        queued, self._queued = self._queued, []
        for each in queued:
            appended, done = each
            if not appended.is_written:
                self._end(appended, done, error or StorageFullError("there was no room"))
            elif appended.wants_disk:
                self._waiting.append(each)
            else:
                if appended.partition.confirmed <= appended.entry.first_sequence:
                    self._is_behind = True
                self.waiting_bytes -= len(appended.batch)
                done(appended, None)
        if confirmed:
            self._wake(confirmed)
        self._answered()
        if self._copying is not None and queued:
            # Before the sync: followers write while this disk does.
            self._copying.written()
        if self._waiting or self._is_behind:
            self._start_sync()

    def _write(self) -> tuple[list[Partition], PulqueError | None]:
        """Return the partitions that have new confirmed messages, and what went wrong."""
        try:
            return self._engine.write(), None
        except StorageFullError as problem:
            return [], problem
        except StorageError as problem:
            self._fail(problem)
            return [], UnavailableError(f"whether it is stored is not known: {problem}")

    def _end(self, appended: Appended, done: Done, error: PulqueError | None) -> None:
        self.waiting_bytes -= len(appended.batch)
        done(appended, error)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._wants_actions = True
        self._start_sync()
        if self._copying is not None:
            self._copying.written()

    def _start_sync(self) -> None:
        if self._is_running or self._is_closed:
            return
        job = self._begin_sync(actions=self._wants_actions)
        self._wants_actions = self._is_behind = False
        if job is None:
            self._tell_facts()
            return
        self._run(job)

    def _run(self, job: SyncJob) -> None:
        self.syncs += 1
        self._is_running = True
        self._is_over.clear()
        self._thread.run(job.run, partial(self._synced, job))

    def _synced(self, job: SyncJob, problem: BaseException | None) -> None:
        self._is_running = False
        if problem is not None:
            self._give_up(problem)
        else:
            self._finish(job)
        if not self._is_running:
            self._is_over.set()

    def _begin_sync(self, *, actions: bool) -> SyncJob | None:
        try:
            return self._engine.begin_sync(actions=actions)
        except StorageError as problem:
            # It failed before: as a fact was written, or in a checkpoint.
            self._give_up(problem)
            return None

    def _give_up(self, problem: BaseException) -> None:
        """Tell those who wait that nobody knows, and stop the broker."""
        self._fail(StorageError(f"the log cannot be synced: {problem}"))
        unknown = UnavailableError(f"whether it is stored is not known: {problem}")
        self.forsake(unknown)
        while self._facts:
            self._facts.popleft()[2](unknown)
        self._answered()

    def _tell_facts(self) -> None:
        engine, facts = self._engine, self._facts
        messages, actions = self._confirmed or (engine.synced, engine.actions.synced)
        while facts and facts[0][0] <= messages and facts[0][1] <= actions:
            facts.popleft()[2](None)

    def _finish(self, job: SyncJob) -> None:
        confirmed = self._engine.finish_sync(job)
        over = self._take_over(job.end) if self._copying is None else []
        if self._waiting or self._wants_actions or self._is_behind:
            # Before the answers: the disk need not wait for them.
            self._start_sync()
        if self._copying is not None:
            self._copying.synced()
        self._tell_facts()
        self._tell(over, confirmed)

    def _take_over(self, end: MessageOffset) -> list[tuple[Appended, Done]]:
        """Take out of the queue what waits for the log up to an offset."""
        waiting = self._waiting
        over: list[tuple[Appended, Done]] = []
        while waiting and waiting[0][0].end <= end:
            over.append(waiting.popleft())
        return over

    def _tell(self, over: list[tuple[Appended, Done]], confirmed: list[Partition]) -> None:
        """Tell of batches that are confirmed, and of the partitions that have them."""
        for appended, done in over:
            self.waiting_bytes -= len(appended.batch)
            done(appended, None)
        if confirmed:
            self._wake(confirmed)
        self._answered()

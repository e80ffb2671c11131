"""Periodic work of a delay server: checkpoints, retention, disk space."""

import asyncio
from collections.abc import Callable
from functools import partial

from pulque.delay.context import Around
from pulque.delay.dispatch.dispatcher import Dispatcher
from pulque.delay.pending_queries import Looker
from pulque.delay.recovery import RecoveredSchedule, encode_closed, encode_sequences
from pulque.delay.schedule.checkpoint import Extent
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.replay import Replayer
from pulque.errors import PulqueError, StorageFullError
from pulque.rules.ticks import LONGEST_TICK_MS
from pulque.serving.commit import Committer

__all__ = ["DelayHousekeeper", "IdleDetector"]

_TICK_S = 0.25
_LITTLE_BYTES = 1024 * 1024
_SWEEP_MS = 60_000
_LEAST_MS = 1000
_MOST_SEALED = 16
"""So many sealed segments are worth a checkpoint that removes them …"""
_PAUSE_MS = 500
"""… or any, after a pause of so long, when no send waits for the disk …"""
_LONGEST_REPLAY_MS = 2000
"""… and so are batches that a restart would need so long to replay …"""
_MANY_OVER = 1_000_000
"""… or so many delivered messages in memory …"""
_LEAST_TIMES = 2
"""… after so many times the duration of the last checkpoint."""
_INDEXED = 8
"""The hash indexes to update in one turn …"""
_QUIET_MS = 5000
"""… after a pause of so long."""


class DelayHousekeeper:
    """Runs on the same event loop as the data path; disk work runs in threads."""

    def __init__(  # noqa: PLR0913  # what it needs, and nothing else
        self,
        recovered: RecoveredSchedule,
        committer: Committer,
        notebook: Notebook,
        dispatcher: Dispatcher,
        looker: Looker,
        around: Around,
        *,
        replayer: Replayer,
        checkpoint_ms: int,
    ) -> None:
        self._engine = recovered.engine
        self._store = recovered.store
        self._dedup = recovered.dedup
        self._extent = recovered.extent
        self._over_at = dict.fromkeys(recovered.extent.over, recovered.extent.replayed)
        """Ticks that were over at the last checkpoint, with its replayed offset."""
        self._committer = committer
        self._notebook = notebook
        self._dispatcher = dispatcher
        self._looker = looker
        self._replayer = replayer
        self._around = around
        self._checkpoint_ms = checkpoint_ms
        self._checkpoint_at_ms = self._sweep_at_ms = around.clock.monotonic_ms()
        self._least_ms = _LEAST_MS
        self._spent_ms = 0
        self._turn = asyncio.Lock()
        self._unindexed: list[int] = []
        self._pause = IdleDetector(self._engine.end, after_ms=_PAUSE_MS)
        self._quiet = IdleDetector(self._engine.end, after_ms=_QUIET_MS)
        self.checkpoints = 0
        self.removed_ticks = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.tick()
            except StorageFullError as error:
                self._around.warn("housekeeping_delayed", reason=str(error))

    async def tick(self) -> None:
        """Do the work that is due now."""
        now_ms = self._around.clock.monotonic_ms()
        self._engine.check_room()
        waited_ms = now_ms - self._checkpoint_at_ms
        has_changed = self._store.replayed > self._extent.replayed or bool(self._over())
        is_worth_it = self._is_worth_it(now_ms) and waited_ms >= self._least_ms
        if has_changed and (waited_ms >= self._checkpoint_ms or is_worth_it):
            await self.checkpoint()
        if self._quiet.is_now(self._engine.end, now_ms):
            await self._index_some()
        if now_ms - self._sweep_at_ms >= _SWEEP_MS:
            self._sweep_at_ms = now_ms
            self._dedup.forget_idle(self._around.clock.now_ms())

    async def _index_some(self) -> None:
        """Update the hash indexes of some ticks, unless batches wait to be replayed.

        It would take CPU from sends, so it runs in pauses. A search in a tick without an index
        scans the schedule log's bytes.
        """
        if self._store.replayed < self._engine.end:
            return
        if not self._unindexed:
            store, live = self._store, self._dispatcher.live.indexes
            ticks = list(store.ticks.values())
            self._unindexed = [
                t.tick for t in ticks if store.search.wants_index(t) and t.tick not in live
            ]
        some, self._unindexed = self._unindexed[:_INDEXED], self._unindexed[_INDEXED:]
        for tick in some:
            await self._around.look(partial(self._store.search.index_ids, tick))

    def _is_worth_it(self, now_ms: int) -> bool:
        """Return whether a checkpoint would free or save enough."""
        wanted = 1 if self._pause.is_now(self._engine.end, now_ms) else _MOST_SEALED
        if self._replayer.spent_ms - self._spent_ms >= _LONGEST_REPLAY_MS:
            return True
        indexes = self._dispatcher.live.indexes
        if sum(indexes[tick].count for tick in self._over()) >= _MANY_OVER:
            return True
        sealed, replayed = self._engine.segments[:-1], self._store.replayed
        return sum(1 for segment in sealed if segment.end <= replayed) >= wanted

    def _over(self) -> list[int]:
        """Return the ticks that are completely dispatched and can get no more messages."""
        now_ms = self._around.clock.now_ms()
        return [
            tick
            for tick, index in self._dispatcher.live.indexes.items()
            if tick + LONGEST_TICK_MS <= now_ms
            and index.is_over
            and tick in self._store.ticks
            and index.end >= self._store.ticks[tick].size
        ]

    async def checkpoint(self, *, is_last: bool = False) -> None:
        """Write a checkpoint, and remove files that only older ones needed.

        Args:
            is_last: Whether the server stops now, and sends no more batches.

        Raises:
            StorageFullError: The disk has no room for it.
        """
        async with self._turn:
            self._checkpoint_at_ms = self._around.clock.monotonic_ms()
            were_over = self._over()
            await self._notebook.drained()  # what became of all that is in them is written down
            async with self._around.lock:
                over = set(self._over()).intersection(were_over)  # nothing came meanwhile
                # If this checkpoint is damaged, the last one serves: what that replays must find
                # the tick that it was in, or it would be delivered again.
                ticks = self._store.ticks
                gone = {t for t in over if ticks[t].replayed <= self._over_at.get(t, -1)}
                extent = self._store.extent(over - gone, gone)
                self._spent_ms = self._replayer.spent_ms
            await self._write(extent, is_last=is_last)
            took_ms = self._around.clock.monotonic_ms() - self._checkpoint_at_ms
            self._least_ms = max(_LEAST_MS, _LEAST_TIMES * took_ms)
            self.checkpoints += 1
            await self._remove_segments(extent.replayed)
            for tick in gone:
                await self._remove_tick(tick, extent.replayed)
            self._over_at = dict.fromkeys(extent.over, extent.replayed)

    async def _write(self, extent: Extent, *, is_last: bool) -> None:
        await self._finish(partial(self._store.sync, extent))
        self._committer.flush()
        changes: dict[bytes, bytes | None] = {**self._dedup.encode_changes()}
        changes.update(encode_sequences(self._dispatcher.sequences))
        changes.update(extent.changes(self._extent))
        if is_last:
            start, dispatcher = self._engine.start_count, self._dispatcher
            changes.update(encode_closed(start, dispatcher.first_sequence))
        job = self._engine.begin_checkpoint(changes)
        # The engine keeps what it was given, even if the writing fails.
        self._extent = extent
        try:
            await self._finish(job.run)
        except (StorageFullError, asyncio.CancelledError):
            self._engine.abandon_checkpoint()
            raise
        except PulqueError as error:
            self._around.fail(error)
            raise
        self._engine.finish_checkpoint(job)

    async def _remove_segments(self, replayed: int) -> None:
        engine = self._engine
        while len(engine.segments) > 1 and engine.segments[0].end <= replayed:
            await self._finish(engine.remove_oldest().run)

    async def _finish(self, work: Callable[[], None]) -> None:
        """Run a function in a thread, and wait for it even when cancelled.

        The last checkpoint comes next then: no other write may run beside it.
        """
        running = asyncio.get_running_loop().run_in_executor(self._around.reader, work)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def _remove_tick(self, tick: int, replayed: int) -> None:
        loop = asyncio.get_running_loop()
        # First those who look: the replay need not wait for them.
        async with self._around.looking, self._around.lock:
            found, index = self._store.ticks.get(tick), self._dispatcher.live.indexes.get(tick)
            if found is None or index is None or found.replayed > replayed or not index.is_over:
                return  # something came meanwhile
            if index.end < found.size or not self._notebook.is_idle_for(tick):
                return
            await loop.run_in_executor(self._around.looker, self._store.remove, tick)
            # Not before: it would be loaded again.
            self._dispatcher.forget(tick)
            self._looker.forget(tick)
            self.removed_ticks += 1


class IdleDetector:
    """Notices when little comes: the time for work that what comes would have to wait for.

    Args:
        end: Where the log that is watched ends now.
        after_ms: How long only a little has to come before it counts.
    """

    def __init__(self, end: int, *, after_ms: int) -> None:
        self._end = end
        self._after_ms = after_ms
        self._since_ms: int | None = None
        """When much came last; None if it never did."""

    def is_now(self, end: int, now_ms: int) -> bool:
        """Say whether no more than a little came between any two calls for as long as that."""
        if end - self._end > _LITTLE_BYTES:
            self._since_ms = now_ms
        self._end = end
        return self._since_ms is None or now_ms - self._since_ms >= self._after_ms

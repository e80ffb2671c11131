"""The indexes of ticks that have begun, or begin soon: kept in memory and updated."""

import asyncio
from collections.abc import Iterable, Mapping

from pulque.delay.context import Around
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.store import ScheduleStore
from pulque.delay.schedule.tick_index import Block, RowState, TickIndex
from pulque.storage.schedule.dispatch_log import Noted, runs_from

__all__ = ["LiveTicks"]

_LEAD_MS = 60_000
"""The index of a tick is loaded this long before it begins."""
_MOST_COMING = 4_000_000
"""The most messages in memory before another tick is loaded: many may be overdue."""


class LiveTicks:
    """Indexes of ticks, by tick.

    Args:
        store: The ticks on disk.
        notebook: Writes the dispatch logs.
        around: Clock, threads and locks.
        unresumed: Ticks with batches of unknown outcome: these come first.
    """

    def __init__(
        self, store: ScheduleStore, notebook: Notebook, around: Around, unresumed: Iterable[int]
    ) -> None:
        self._store = store
        self._notebook = notebook
        self._around = around
        self.indexes: dict[int, TickIndex] = {}
        self.moving: dict[int, set[int]] = {}
        """Places of messages that are being rescheduled, which no log has yet."""
        self.loading: dict[int, set[int]] = {}
        """The tick that is being loaded, with places cancelled meanwhile."""
        self.unresumed = set(unresumed)
        """Nothing is sent before these are loaded: a broker knows only the last numbers that it
        stored, and takes a much older one for a duplicate."""

    def wanted(self, now_ms: int) -> int | None:
        """Return the first tick to load, if there is room for it."""
        if self.unresumed:
            return min(self.unresumed)
        ticks = list(self._store.ticks)  # grows in another thread
        tick = min((tick for tick in ticks if tick not in self.indexes), default=None)
        if tick is None or tick > now_ms + _LEAD_MS:
            return None
        coming = sum(index.coming for index in self.indexes.values())
        return tick if coming < _MOST_COMING else None

    async def load(self, tick: int) -> tuple[TickIndex, Noted]:
        """Load the index of a tick; return it, and the contents of its dispatch log.

        Most of it is read while the tick may grow, as that can take seconds, and producers would
        wait for it.
        """
        loop = asyncio.get_running_loop()
        store, around = self._store, self._around
        index = await loop.run_in_executor(around.reader, store.read_index, tick)
        # What is noted before this is in the dispatch log when that is read; the rest is here.
        cancelled = self.loading[tick] = set()
        try:
            await self._notebook.drained()
            async with around.lock:
                noted = await loop.run_in_executor(around.scheduler, store.finish_index, index)
                self.indexes[tick] = index
        finally:
            del self.loading[tick]
        self.unresumed.discard(tick)
        for places, state in (
            (cancelled, RowState.CANCELLED),
            (self.moving.get(tick, ()), RowState.MOVED),
        ):
            index.mark(index.rows_of(runs_from(sorted(places))), state)
        return index, noted

    def extend(self, added: Mapping[int, Block | None], now_ms: int) -> tuple[bool, bool]:
        """Add new entries of schedule logs to the indexes.

        Returns:
            Whether some of them are due soon, and whether a tick has to be loaded for them.
        """
        is_soon = is_missing = False
        for tick, block in added.items():
            index = self.indexes.get(tick)
            if index is not None and block is not None:
                is_soon |= index.extend(block)
            elif tick <= now_ms + _LEAD_MS:
                is_missing = True
        return is_soon, is_missing

    def catch_up(self) -> None:
        """Bring all indexes up to date with the schedule logs."""
        for index in self.indexes.values():
            self._store.extend_index(index)

    def forget(self, tick: int) -> None:
        """Drop a removed tick."""
        del self.indexes[tick]

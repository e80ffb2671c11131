"""The ticks that have begun, or are about to: their indexes are in memory, and grow as they do."""

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
"""Of all ticks in memory, before another one is loaded: many may be overdue."""


class LiveTicks:
    """Indexes of ticks, by tick.

    Args:
        store: Has the ticks.
        notebook: Writes down what becomes of messages.
        around: What is at hand.
        unresumed: Ticks that have batches whose outcome is not known: these come first.
    """

    def __init__(
        self, store: ScheduleStore, notebook: Notebook, around: Around, unresumed: Iterable[int]
    ) -> None:
        self._store = store
        self._notebook = notebook
        self._around = around
        self.indexes: dict[int, TickIndex] = {}
        self.moving: dict[int, set[int]] = {}
        """Places in ticks whose messages are being moved, which no log says yet."""
        self.loading: dict[int, set[int]] = {}
        """The tick that is being loaded, with the places that were cancelled meanwhile."""
        self.unresumed = set(unresumed)
        """Nothing is sent before these are here: a broker knows only the last numbers that it
        stored, and takes one that is much older for a number that it has."""

    def wanted(self, now_ms: int) -> int | None:
        """Return the first tick that should be in memory and is not, if there is room for it."""
        if self.unresumed:
            return min(self.unresumed)
        ticks = list(self._store.ticks)  # grows in another thread
        tick = min((tick for tick in ticks if tick not in self.indexes), default=None)
        if tick is None or tick > now_ms + _LEAD_MS:
            return None
        coming = sum(index.coming for index in self.indexes.values())
        return tick if coming < _MOST_COMING else None

    async def load(self, tick: int) -> tuple[TickIndex, Noted]:
        """Bring the index of a tick into memory; return it, and what its dispatch log says.

        Most of it is read while the tick may grow, for that can take seconds, and senders would
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
        """Take in what was added to schedule logs.

        Returns:
            Whether some of it is due soon, and whether a tick has to be loaded for it.
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
        """Take in all that schedule logs have."""
        for index in self.indexes.values():
            self._store.extend_index(index)

    def forget(self, tick: int) -> None:
        """Record that a tick is gone."""
        del self.indexes[tick]

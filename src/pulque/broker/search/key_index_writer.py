"""Writes the key index behind the log, when there is little else to do.

A search does without what is missing, and writes it itself if it is much: so this work can wait
while much comes in, as long as not too much of it piles up.
"""

import asyncio
from concurrent.futures import Executor

from pulque.broker.state import Surroundings
from pulque.errors import StorageError
from pulque.storage.engine import Engine
from pulque.storage.indexes.key_index import KeyIndex
from pulque.storage.indexes.key_rows import PART_BYTES
from pulque.storage.logs.segment import Segment

__all__ = ["Indexer"]

_TICK_S = 0.25
_LITTLE_BYTES = 1024 * 1024
"""What may come in a tick that is quiet."""
_QUIET_TICKS = 4
_MOST_MISSING = 1024 * 1024 * 1024
"""With more than this it is written, however much comes."""
_PAUSE_S = 10.0


class Indexer:
    """Runs beside the data path on the same event loop; the work goes to a thread."""

    def __init__(self, index: KeyIndex, engine: Engine, around: Surroundings) -> None:
        self._index = index
        self._engine = engine
        self._executor: Executor = around.executor
        self._warn = around.warn
        self._end = int(engine.end)
        self._quiet_ticks = 0

    async def run(self) -> None:
        """Keep the index up to date until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._executor, self._index.learn)
                while True:
                    await asyncio.sleep(_TICK_S)
                    segment = self.due()
                    if segment is not None:
                        await loop.run_in_executor(self._executor, self._index.extend, segment)
            except StorageError as error:
                self._warn("key_index_delayed", reason=str(error))
                await asyncio.sleep(_PAUSE_S)

    def due(self) -> Segment | None:
        """Return a segment of which more is to be written now; to be called once a tick."""
        end = int(self._engine.end)
        is_quiet = end - self._end <= _LITTLE_BYTES
        self._end = end
        self._quiet_ticks = self._quiet_ticks + 1 if is_quiet else 0
        if self._engine.is_full:
            return None
        open_base = self._engine.segments[-1].base
        missing = [
            (segment, size)
            for segment, size in self._index.missing()
            if size >= PART_BYTES or segment.base != open_base
        ]
        is_much = sum(size for _, size in missing) > _MOST_MISSING
        if not missing or not (is_much or self._quiet_ticks >= _QUIET_TICKS):
            return None
        return missing[0][0]

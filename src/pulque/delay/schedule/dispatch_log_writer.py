"""Group commit of dispatch logs: one sync for the records of many requests."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from pulque.delay.schedule.store import ScheduleStore
from pulque.errors import StorageFullError

__all__ = ["Notebook"]

_TRY_AGAIN_S = 1.0


class _Note(NamedTuple):
    tick: int
    record: bytes
    done: asyncio.Future[None] | None
    """The future to complete when it is on disk; None if it need not be synced."""


class Notebook:
    """Writes records to dispatch logs.

    Args:
        store: The schedule.
        executor: The thread that writes dispatch logs.
        warn: Logs an event with its fields.
    """

    def __init__(
        self, store: ScheduleStore, executor: Executor, warn: Callable[..., None]
    ) -> None:
        self._store = store
        self._executor = executor
        self._warn = warn
        self._notes: list[_Note] = []
        self._writing: list[_Note] = []
        self._has_notes = asyncio.Event()
        self._count = self._written = 0
        """The number of records so far, and how many of them are written."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Futures that wait until so many are written."""

    @property
    def is_idle(self) -> bool:
        """Whether all records are written."""
        return self._written == self._count

    def is_idle_for(self, tick: int) -> bool:
        """Return whether all records of a tick are written."""
        return all(note.tick != tick for note in (*self._writing, *self._notes))

    def note(self, tick: int, record: bytes) -> asyncio.Future[None]:
        """Write a record; the future is done when it is on disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Note(tick, record, done))
        return done

    def note_soon(self, tick: int, record: bytes) -> None:
        """Write a record after all before it; a power cut may lose it."""
        self._put(_Note(tick, record, None))

    def _put(self, note: _Note) -> None:
        self._notes.append(note)
        self._count += 1
        self._has_notes.set()

    async def drained(self) -> None:
        """Wait until all records up to now are written."""
        if self.is_idle:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._count, done))
        await done

    async def run(self) -> None:
        """Write until cancelled.

        Raises:
            StorageError: The disk failed.
        """
        while True:
            await self._has_notes.wait()
            self._has_notes.clear()
            self._writing, self._notes = self._notes, []
            await self._write(self._writing)
            self._written += len(self._writing)
            self._writing = []
            while self._waiting and self._waiting[0][0] <= self._written:
                _, done = self._waiting.popleft()
                if not done.done():
                    done.set_result(None)

    async def _write(self, notes: list[_Note]) -> None:
        records: dict[int, list[bytes]] = {}
        for note in notes:
            records.setdefault(note.tick, []).append(note.record)
        joined = {tick: b"".join(each) for tick, each in records.items()}
        is_durable = any(note.done is not None for note in notes)
        loop = asyncio.get_running_loop()
        while joined:
            tick, data = next(iter(joined.items()))
            try:
                write = partial(self._store.note, {tick: data}, is_durable=is_durable)
                await loop.run_in_executor(self._executor, write)
            except StorageFullError as error:
                self._warn("dispatch_delayed", reason=str(error))
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                del joined[tick]
        for note in notes:
            if note.done is not None and not note.done.done():
                note.done.set_result(None)

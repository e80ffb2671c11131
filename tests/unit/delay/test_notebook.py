"""Who waits for the notebook waits for what was noted before, and for nothing else."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, cast

from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.store import ScheduleStore
from tests.unit.delay.running import eventually


class SlowStore:
    """Writes one thing for each time that it is told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.written: list[bytes] = []
        self.allowed: SimpleQueue[None] = SimpleQueue()

    def note(self, records: Mapping[int, bytes], *, is_durable: bool) -> None:
        del is_durable
        self.begun += 1
        self.allowed.get(timeout=30)
        self.written += records.values()


def _warn(*_: Any, **__: Any) -> None: ...


def idle(notebook: Notebook) -> list[bool]:
    """Whether all of it is written, and that of ticks 1 to 3."""
    return [notebook.is_idle, *map(notebook.is_idle_for, (1, 2, 3))]


async def test_what_is_noted_meanwhile_keeps_nobody_waiting() -> None:
    store = SlowStore()
    with ThreadPoolExecutor(1) as executor:
        notebook = Notebook(cast("ScheduleStore", store), executor, _warn)
        writing = asyncio.create_task(notebook.run())
        assert idle(notebook) == [True, True, True, True]
        notebook.note_soon(1, b"a")
        await eventually(lambda: store.begun == 1)
        notebook.note_soon(2, b"b")
        drained = asyncio.create_task(notebook.drained())
        await asyncio.sleep(0)
        assert idle(notebook) == [False, False, False, True]
        store.allowed.put(None)
        await eventually(lambda: store.begun == 2)
        notebook.note_soon(3, b"c")
        assert not drained.done(), "b is not written"
        assert idle(notebook) == [False, True, False, False]

        store.allowed.put(None)
        await asyncio.wait_for(drained, 10)
        assert store.written == [b"a", b"b"]
        assert idle(notebook) == [False, True, True, False]
        store.allowed.put(None)
        await asyncio.wait_for(notebook.drained(), 10)
        assert idle(notebook) == [True, True, True, True]
        writing.cancel()

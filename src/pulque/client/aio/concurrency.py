"""What tasks do, by hand: ``blocking.concurrency`` has the same names for threads."""

import asyncio
import concurrent.futures
import contextlib
from asyncio import sleep
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

__all__ = [
    "Bridge",
    "Crew",
    "Interruptible",
    "Job",
    "Lock",
    "Signal",
    "Worker",
    "for_each",
    "on_fork",
    "side_by_side",
    "sleep",
]

T = TypeVar("T")


async def side_by_side(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make all calls at the same time, and return what they return, in order."""
    return await asyncio.gather(*(call() for call in calls))


async def for_each(items: Iterable[T], act: Callable[[T], Awaitable[None]]) -> None:
    """Do something with each item: where that costs no threads, at the same time."""
    await asyncio.gather(*(act(each) for each in items))


def on_fork(part: T, let_go: Callable[[T], None]) -> None:
    """Do nothing: what belongs to an event loop is not used in a child, see ``Guard``."""


class Interruptible:
    """What hands out messages: ``_is_waiting`` while it awaits, and hands out none.

    A task is cancelled, or ended by Ctrl-C, only where it awaits: no message is lost there.
    """

    _is_waiting = False

    def _interrupted(self) -> None:
        """Do nothing: see the class."""


class Lock:
    """A lock in one event loop, where nothing else runs between two awaits."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Signal(asyncio.Event):
    """Wakes whoever waits for it."""

    async def wait_for(self, seconds: float | None) -> None:
        """Wait until it is set, for at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()


class Worker:
    """Something that runs in a task of its own until it is stopped; it is started once.

    Args:
        work: What runs.
        name: The task's.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self.is_stopped = False

    @property
    def is_started(self) -> bool:
        """Whether it was started, and is not stopped."""
        return self._task is not None

    def start(self) -> None:
        """Begin, if it has not."""
        if self._task is None and not self.is_stopped:
            self._task = asyncio.create_task(self._work(), name=self._name)

    async def pause(self, seconds: float) -> bool:
        """Wait, within ``work``; return whether it is to end."""
        await sleep(seconds)
        return self.is_stopped

    async def stop(self, wake: Callable[[], None], limit: float) -> bool:
        """End, and wait for it; return whether it was started."""
        self.end(wake)
        return await self.join(limit)

    def end(self, wake: Callable[[], None]) -> None:  # its twin wakes a thread
        """Have it end."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def join(self, limit: float) -> bool:  # a task that is cancelled needs no limit
        """Wait for its end; return whether it was started."""
        task = self._task
        if task is None:
            return False
        await asyncio.gather(task, return_exceptions=True)
        self._task = None
        return True


class Job:
    """Something short that is done now and then, in a task of its own.

    Args:
        work: What is done.
        name: The task's.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it is being done."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begin; it must not be running."""
        self._task = asyncio.create_task(self._work(), name=self._name)

    async def run(self) -> None:
        """Do it and wait for it; it goes on if the wait is cancelled."""
        self.start()
        await self.join(None)

    async def join(self, limit: float | None) -> None:
        """Wait until it is done, for at most so many seconds; it goes on if that is cancelled."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit)


class Crew:
    """Things that are done side by side, each in a task of its own.

    Args:
        name: The tasks'.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin with something."""
        task = asyncio.create_task(work(), name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something and wait for it; it goes on if the wait is cancelled."""
        task = asyncio.create_task(work(), name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def join(self, limit: float) -> None:  # tasks keep their own limits
        """Wait until all is done."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Bridge:
    """Lets another thread wait for what is done in the event loop that it was made in."""

    LIMIT = 30.0
    """The loop may have ended meanwhile: nobody waits for longer, in seconds."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):  # made before the loop runs: it is of no use
            self._loop = asyncio.get_running_loop()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Have the loop do something, and return what comes of it; None if the loop ended."""
        if self._loop is None or self._loop.is_closed():
            work.close()
            return None
        try:
            found = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # it was closed just now
            work.close()
            return None
        try:
            return found.result(self.LIMIT)
        except (TimeoutError, concurrent.futures.CancelledError):
            found.cancel()
            return None

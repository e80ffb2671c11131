"""What threads do, by hand: ``aio.concurrency`` has the same names for tasks."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import monotonic, sleep
from typing import Protocol, TypeVar

from pulque.client.connection.fork_safety import on_fork

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
_AT_ONCE = 16


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same time, and return what they return, in order."""
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(min(len(calls), _AT_ONCE)) as threads:
        return list(threads.map(lambda call: call(), calls))


def for_each(items: Iterable[T], act: Callable[[T], None]) -> None:
    """Do something with one item after the other."""
    for each in items:
        act(each)


class _Holder(Protocol):
    def begin_anew(self) -> None:
        """Abandon what is held."""


class _Holders(Protocol):
    def _all(self) -> Sequence[_Holder]: ...


class Interruptible:
    """What hands out messages: ``_is_waiting`` while it waits, and hands out none."""

    _inlets: _Holders
    _is_waiting = False

    def _interrupted(self) -> None:
        """Abandon what was being handed out when a signal handler raised; it is redelivered.

        That is Ctrl-C, or an exception of the application's own: a limit of time, say.
        """
        if not self._is_waiting:
            for inlet in self._inlets._all():  # noqa: SLF001  # between the two of them
                inlet.begin_anew()


class Signal(threading.Event):
    """Wakes whoever waits for it."""

    def wait_for(self, seconds: float | None) -> None:
        """Wait until it is set, for at most so many seconds."""
        self.wait(seconds)


class Worker:
    """Something that runs in a thread of its own until it is stopped; it is started once.

    Args:
        work: What runs.
        name: The thread's.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether it was started, and is not stopped."""
        return self._thread is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it is to end."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Begin, if it has not. Any thread may."""
        with self._lock:
            if self._stopped.is_set():
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            if self._thread.ident is None:  # else it runs; Ctrl-C may have come before it did
                self._thread.start()

    def pause(self, seconds: float) -> bool:
        """Wait, within ``work``; return whether it is to end."""
        return self._stopped.wait(seconds)

    def stop(self, wake: Callable[[], None], limit: float) -> bool:
        """End within so many seconds; return whether it was started. Any thread may.

        Args:
            wake: Wakes the thread.
            limit: How long to wait for it.
        """
        self.end(wake)
        return self.join(limit)

    def end(self, wake: Callable[[], None]) -> None:
        """Have it end."""
        self._stopped.set()
        wake()

    def join(self, limit: float) -> bool:
        """Wait for its end, for so many seconds at most; return whether it was started."""
        thread = self._thread
        if thread is None:
            return False
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(limit)
        self._thread = None
        return True


class Job:
    """Something short that is done now and then, in a thread of its own.

    Args:
        work: What is done.
        name: The thread's.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether it is being done in its thread."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin; it must not be running."""
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Do it in this thread: at the end of a process no other can be started."""
        self._work()

    def join(self, limit: float | None) -> None:
        """Wait until it is done, for at most so many seconds."""
        if self._thread is not None:
            self._thread.join(limit)


class Crew:
    """Things that are done side by side, each in a thread of its own.

    Args:
        name: The threads'.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def start(self, work: Callable[[], None]) -> None:
        """Begin with something; used by one thread at a time."""
        thread = threading.Thread(target=work, name=self._name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def run(self, work: Callable[[], None]) -> None:
        """Do something in this thread."""
        work()

    def join(self, limit: float) -> None:
        """Wait until all is done, for at most so many seconds."""
        deadline = monotonic() + limit
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - monotonic()))


class Bridge:
    """Lets a thread wait for what is done elsewhere: here, everything is done by the caller."""

    def wait_for(self, found: T) -> T:
        """Return what has come of it."""
        return found

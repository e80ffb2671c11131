"""The thread that waits for the disk on behalf of the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

__all__ = ["SyncThread"]

_Work = tuple[Callable[[], None], Callable[[BaseException | None], None]]


class SyncThread:
    """Runs one piece of work after the other, and tells the loop of each.

    An executor would do, at three times the cost: there is no future here, and one wake-up of
    the loop for each piece of work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pulque-sync", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Do ``work`` in the thread, then call ``done`` in the loop, with what it raised."""
        self._work.put((work, done))

    def stop(self) -> None:
        """End the thread once it has done what it was given."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            work, done = given
            problem: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # noqa: BLE001  # the loop has to hear of it
                problem = raised
            # A loop that is closed already has nobody left to tell.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(done, problem)

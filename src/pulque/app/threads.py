"""A thread pool for blocking handlers; threads that hang are replaced.

Call all methods on the event loop. The threads run jobs and report results to the loop; they
are daemons, so that none of them keeps the process alive.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HandlerJob", "Threads"]


class HandlerJob:
    """One call in a thread.

    Attributes:
        done: The future of the result or the exception.
        is_stuck: Whether the application gave it up.
    """

    __slots__ = ("call", "done", "is_stuck")

    def __init__(self, call: Callable[[], Any], done: "asyncio.Future[Any]") -> None:
        self.call = call
        self.done = done
        self.is_stuck = False


class Threads:
    """Runs blocking calls of one handler.

    Args:
        name: The name of the threads.
        on_late: Called when a call that was given up has ended after all.
    """

    def __init__(self, name: str, on_late: Callable[[], None]) -> None:
        self.stuck = 0
        """How many threads run a call that was given up."""
        self._name = name
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[HandlerJob | None] = queue.SimpleQueue()
        self._busy = 0
        self._started = 0

    def submit(self, call: Callable[[], Any]) -> HandlerJob:
        """Run a function in a thread, in the context of the caller."""
        context = contextvars.copy_context()
        job = HandlerJob(lambda: context.run(call), self._loop.create_future())
        self._busy += 1
        if self._busy + self.stuck > self._started:
            self._started += 1
            name = f"pulque-{self._name}-{self._started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        self._jobs.put(job)
        return job

    def give_up(self, job: HandlerJob) -> None:
        """Give up the thread of a call; the next call gets another one."""
        if not job.done.done() and not job.is_stuck:
            job.is_stuck = True
            self._busy -= 1
            self.stuck += 1

    def close(self) -> None:
        """End idle threads; busy ones end after their call, or with the process."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.call()
            except BaseException as problem:  # noqa: BLE001  # whoever waits for it decides
                error = problem
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._ended, job, result, error)

    def _ended(self, job: HandlerJob, result: Any, error: BaseException | None) -> None:
        if job.is_stuck:
            self.stuck -= 1
            self._on_late()
        else:
            self._busy -= 1
        if job.done.cancelled():
            return
        if error is None:
            job.done.set_result(result)
        elif isinstance(error, StopIteration):
            # A future takes it for its own end.
            job.done.set_exception(RuntimeError("the handler raised StopIteration"))
        else:
            job.done.set_exception(error)

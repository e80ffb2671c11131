"""Requests that are answered by a task of their own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from pulque.errors import PulqueError, UnavailableError

__all__ = ["RequestTasks"]

T = TypeVar("T")


class RequestTasks:
    """Runs the tasks that answer requests; none of them outlives the server.

    Args:
        server: What the server calls itself in errors.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        work: Coroutine[None, None, T],
        answer: Callable[[T], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Answer with what ``work`` returns, or refuse with what it raises."""

        async def do() -> None:
            try:
                answer(await work)  # an answer that cannot be encoded is refused, too
            except PulqueError as error:
                refuse(error)
            except asyncio.CancelledError:
                refuse(UnavailableError(f"the {self._server} stops"))
                raise

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is under way; each request is refused."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

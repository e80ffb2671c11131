"""Keeps what belongs to one event loop of one process from being used elsewhere; by hand."""

import asyncio

from pulque.client.connection.fork_safety import forked, on_fork
from pulque.errors import ForkedError, UsageError

__all__ = ["Guard"]

_REMEDY = "connect in the child, inside of the event loop that it runs"


class Guard:
    """Belongs to the event loop of its first check.

    Args:
        what: What is guarded, for the texts of errors.
        client: Of the client that it was made from, whose loop it has to be.
    """

    def __init__(self, what: str, client: "Guard | None" = None) -> None:
        self.forked: ForkedError | None = None
        """What to raise in a child."""
        self._what = what
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        on_fork(self, Guard.after_fork)

    def after_fork(self) -> None:
        """Refuse everything in a child."""
        self.forked = forked(self._what, _REMEDY)
        self._loop = None

    def check(self) -> None:
        """Raise ``UsageError`` in another event loop, and ``ForkedError`` in a child of fork."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)

    def check_process(self) -> None:
        """Raise ``ForkedError`` in a child of fork."""
        if self.forked is not None:
            raise self.forked.with_traceback(None)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self.check_process()
        if self._loop is not None:
            raise UsageError(
                f"this {self._what} belongs to another event loop: each loop needs a client of "
                "its own, made with pulque.aio.connect(); a loop in another thread can be given "
                "work with asyncio.run_coroutine_threadsafe"
            )
        if self._client is not None:
            self._client.check()
        self._loop = loop

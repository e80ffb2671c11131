"""How a server with a log ends: when it is asked to, or when it cannot be trusted any more."""

import asyncio
from collections.abc import Coroutine

import structlog

from pulque.errors import PulqueError, StorageError

__all__ = ["Supervised"]


class Supervised:
    """A server that stops as soon as something of it failed: it recovers from its logs.

    Args:
        log: Where it says so.
        failed: The event that says so.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger, failed: str) -> None:
        self._log = log
        self._failed = failed
        self._stop = asyncio.Event()
        self._failure: PulqueError | None = None

    def stop(self) -> None:
        """Ask the server to stop."""
        self._stop.set()

    async def stopped(self) -> None:
        """Wait until the server is asked to stop, or has to.

        Raises:
            PulqueError: Its disk failed, or it did.
        """
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    def callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Stop on a bug in a callback of the loop: who goes on half done loses messages."""
        del loop
        problem = context.get("exception")
        text = f"{context.get('message')}: {problem!r}"
        if problem is None or isinstance(problem, OSError):
            # A socket that died in an odd way; its connection is closed, and that is all.
            self._log.warning("connection_failed", reason=text)
        else:
            self._fail(StorageError(f"an inner callback failed: {text}"))

    async def _supervise(self, work: Coroutine[None, None, None]) -> None:
        """Run a task that must not end; if it does, the server stops and says why."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except PulqueError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  # the root of a task
            self._log.exception("task_failed")
            self._fail(StorageError(f"an inner task failed: {error!r}"))

    def _fail(self, error: PulqueError) -> None:
        """Stop taking writes: the process ends and recovers from its logs."""
        if self._failure is None:
            self._log.error(self._failed, reason=str(error))
            self._failure = error
        self._stop.set()

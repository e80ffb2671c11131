"""The parts of a meta server that others work with."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from pulque.clock import Clock
from pulque.meta.directory import Directory
from pulque.meta.online import OnlineClients
from pulque.meta.store import Store
from pulque.meta.watches import Watches

__all__ = ["Background", "Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each."""

    store: Store
    directory: Directory
    watches: Watches
    online: OnlineClients
    clock: Clock
    warn: Callable[..., None]
    """Logs an event with its fields."""


class Background:
    """Work that goes on while requests are answered; none of it outlives the server."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Begin work; if it fails, which it should not, the owner is told."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self, grace_s: float) -> None:
        """Let it come to its end; what does not within the grace is cancelled.

        A transaction that is cut off in the middle leaves a connection that cannot be closed.
        """
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

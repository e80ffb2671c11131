"""The parts of a meta server that others work with."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from pulque.clock import Clock
from pulque.errors import UnavailableError
from pulque.meta.database.store import ClusterStore
from pulque.meta.directory import Directory
from pulque.meta.online_clients import OnlineClients
from pulque.meta.route_watches import Watches

__all__ = ["Background", "MetaParts"]


@dataclass(frozen=True, slots=True)
class MetaParts:
    """One of each."""

    store: ClusterStore
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
        self._is_closed = False

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Begin work; if it fails, which it should not, the owner is told.

        Raises:
            UnavailableError: The server has stopped.
        """
        if self._is_closed:
            work.close()
            raise UnavailableError("this meta server has stopped")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self, grace_s: float) -> None:
        """Wait until all work has ended, also what it begins meanwhile; nothing begins afterwards.

        A transaction that is cut off in the middle leaves a connection that cannot be closed: so
        only what has not ended within the grace is cancelled.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while self._tasks and (left_s := deadline - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        self._is_closed = True
        late = list(self._tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

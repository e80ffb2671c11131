"""Deferring for asyncio: the blocking one's twin, in a task."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from pulque.client.blocking.deferral import ROUTE_LIMIT, Deferring
from pulque.errors import PulqueError

__all__ = ["TaskDeferrals"]


class TaskDeferrals:
    """Defers in a task of its own, so that the lease is kept meanwhile.

    Args:
        deferring: What does it.
        find_places: Returns all delay servers, found within so many seconds.
    """

    def __init__(
        self, deferring: Deferring, find_places: Callable[[float], Awaitable[Sequence[str]]]
    ) -> None:
        self._deferring = deferring
        self._find_places = find_places
        self._task: asyncio.Task[None] | None = None

    def go_on(self) -> None:
        """Begin with what there is, without waiting for it."""
        is_busy = self._task is not None and not self._task.done()
        if not is_busy and self._deferring.is_due(time.monotonic()):
            self._task = asyncio.create_task(self._put(), name="pulque-deferring")

    async def finish(self) -> None:
        """Wait for what is under way, and try the rest once.

        A cancelled wait leaves it under way: its thread cannot be stopped, and a second one beside
        it would take the same messages to a delay server again.
        """
        await self._ended()
        self.go_on()
        await self._ended()

    async def _ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _put(self) -> None:
        try:
            places = await self._find_places(ROUTE_LIMIT)
        except PulqueError as error:
            self._deferring.failed(error)
        else:
            await asyncio.to_thread(self._deferring.put, places)

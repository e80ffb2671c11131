"""Takes messages to delay servers that their group wants again at a certain time, for asyncio."""

import time
from collections.abc import Awaitable, Callable, Sequence

from pulque.client.aio.concurrency import Job
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.session import as_it_is
from pulque.client.receiving.deferral_core import (
    ANSWER_LIMIT,
    CONNECT_LIMIT,
    ROUTE_LIMIT,
    Deferring,
)
from pulque.errors import PulqueError
from pulque.wire.requests import Send
from pulque.wire.responses import Response

__all__ = ["BackgroundDeferrals", "Deferrals", "NoDeferrals"]


class Deferrals:
    """What takes messages to delay servers."""

    def go_on(self) -> None:
        """Begin with what there is, without waiting for it."""

    async def finish(self) -> None:
        """Wait for what is under way, and try the rest once."""


class NoDeferrals(Deferrals):
    """Where there are no delay servers: a lone broker's consumer has nothing to defer."""


class BackgroundDeferrals(Deferrals):
    """Defers in a task of its own, so that the lease is kept meanwhile.

    Args:
        deferring: What is wanted.
        find_places: Returns all delay servers, found within so many seconds.
        connect: Opens a connection to a place within so many seconds.
    """

    def __init__(
        self,
        deferring: Deferring,
        find_places: Callable[[float], Awaitable[Sequence[str]]],
        connect: Callable[[str, float], Awaitable[AsyncConnection]],
    ) -> None:
        self._deferring = deferring
        self._find_places = find_places
        self._connect = connect
        self._job = Job(self._put, "pulque-deferring")

    def go_on(self) -> None:
        """Begin with what there is, without waiting for it."""
        if not self._job.is_running and self._deferring.is_due(time.monotonic()):
            self._job.start()

    async def finish(self) -> None:
        """Wait for what is under way, and try the rest once.

        What is under way goes on if this wait is cancelled: a second one beside it would take
        the same messages to a delay server again.
        """
        await self._job.join(ROUTE_LIMIT + CONNECT_LIMIT + ANSWER_LIMIT)
        if not self._job.is_running and self._deferring.is_due(time.monotonic()):
            await self._job.run()

    async def _put(self) -> None:
        deferring = self._deferring
        try:
            request = deferring.begin(await self._find_places(ROUTE_LIMIT))
        except PulqueError as error:
            deferring.failed(error)
            return
        if request is None:
            return
        try:
            answer = await self._ask(request)
        except PulqueError as error:
            deferring.unanswered(error)
        else:
            deferring.answered(answer)

    async def _ask(self, request: Send) -> Response:
        connection = await self._connect(self._deferring.place, CONNECT_LIMIT)
        try:
            return await connection.request(request, ANSWER_LIMIT, as_it_is)
        finally:
            await connection.close()

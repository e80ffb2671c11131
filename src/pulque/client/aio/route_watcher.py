"""Keeps a client's routes fresh, for asyncio: the blocking one's twin."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from pulque.client.aio.connection import AsyncConnection
from pulque.client.blocking.route_watcher import ASK_EVERY, PATIENCE, PAUSE, WAIT, changed_of
from pulque.client.connection.backoff import Backoff
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.client.routing.targets import route_of
from pulque.errors import PulqueError, UnavailableError, UnsupportedError
from pulque.model.routes import RouteKind
from pulque.wire.requests import Route, Watch
from pulque.wire.routes import ChangedRoute

__all__ = ["Watcher"]

log = logging.getLogger("pulque.client")


class Watcher:
    """Watches the routes of one client.

    Args:
        table: What is known, and where news go.
        connect: Opens a connection to a server that knows routes.
        client: The same in every watch of this client.
        application: What the client belongs to.
        tell: Called when routes have changed.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        table: RouteTable,
        connect: Callable[[float], Awaitable[AsyncConnection]],
        *,
        client: str,
        application: str,
        tell: Callable[[list[RouteKey]], Awaitable[None]],
        draw: Callable[[], float],
    ) -> None:
        self._table = table
        self._connect = connect
        self._client = client
        self._application = application
        self._tell = tell
        self._backoff = Backoff(draw, first=0.1, largest=3.0)
        self._connection: AsyncConnection | None = None
        self._look = asyncio.Event()
        """Set when there is a reason not to wait."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if it has not."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pulque-routes")

    def look(self) -> None:
        """Ask again now: there are new routes to watch, or one of them seems to be wrong."""
        self._look.set()
        if self._connection is not None:
            self._connection.abort()

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE)
            try:
                self._connection = connection = await self._connect(PATIENCE)
                try:
                    self._look.clear()
                    await self._watch(connection)
                finally:
                    self._connection = None
                    await connection.close()
            except UnavailableError as error:
                if not self._look.is_set():
                    log.info("routes cannot be watched for now: %s", error)
                    await self._rest(self._backoff.next_wait())
            except PulqueError as error:
                log.warning("routes cannot be watched: %s", error)
                await self._rest(self._backoff.next_wait())
            except Exception:
                log.exception("routes cannot be watched")
                await self._rest(self._backoff.next_wait())

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._look.wait()

    async def _watch(self, connection: AsyncConnection) -> None:
        while not self._look.is_set():
            known = self._table.known()
            watch = Watch(self._client, self._application, known, int(WAIT * 1000))
            try:
                changed = await connection.request(watch, WAIT + PATIENCE, changed_of)
            except UnsupportedError:
                await self._ask_all(connection)
                continue
            self._backoff.reset()
            await self._take_in(changed)

    async def _ask_all(self, connection: AsyncConnection) -> None:
        """Ask for every route, where they cannot be watched, and wait a while."""
        changed = []
        for kind, subject, group, _ in self._table.known():
            request = Route(subject, group, kind)
            try:
                route = await connection.request(request, PATIENCE, route_of)
            except UnsupportedError:
                # An older server: perhaps it can be watched, but for what it does not know.
                if kind is RouteKind.FOLLOWERS and self._table.forget_followers():
                    return
                raise
            changed.append(ChangedRoute(kind, group, route))
        self._backoff.reset()
        await self._take_in(changed)
        await self._rest(ASK_EVERY)

    async def _take_in(self, changed: Iterable[ChangedRoute]) -> None:
        keys = self._table.take_in_changed(changed)
        if keys:
            log.info("routes changed: %s", ", ".join(sorted({key.subject for key in keys})))
            await self._tell(keys)

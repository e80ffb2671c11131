"""Calls that wait for an answer; by hand, as in asyncio all of them share one connection."""

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from pulque.client.aio.connection import AsyncConnection, connect_any
from pulque.client.aio.guard import Guard
from pulque.client.connection.backoff import Retries
from pulque.client.connection.url import Address
from pulque.errors import PulqueError, UnavailableError, UsageError
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """The connection of a client to one place, which all its calls share.

    Args:
        addresses: Where to connect to: any of these will do. Or what says so, each time.
        client: What this client calls itself.
        draw: Returns a random number in ``0.0..1.0``.
        guard: Keeps other event loops and processes away.
        stale: Told when nobody answers there, or who does not lead: it may be elsewhere by now.
    """

    def __init__(
        self,
        addresses: Sequence[Address] | Callable[[], Address],
        *,
        client: str,
        draw: Callable[[], float],
        guard: Guard,
        stale: Callable[[], None] | None = None,
    ) -> None:
        self.cluster = ""
        """The id of the cluster that the server belongs to; empty for a lone broker."""
        self.server = ""
        """What the server calls itself."""
        self.is_closed = False
        self._addresses = addresses if callable(addresses) else tuple(addresses)
        self._client = client
        self._draw = draw
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._guard = guard
        self._stale = stale
        self._opened: weakref.WeakSet[AsyncConnection] = weakref.WeakSet()
        self._has_moved = asyncio.Event()

    async def warm_up(self, timeout: float) -> AsyncConnection:
        """Return the connection; open one if need be."""
        self._guard.check()
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self.open(timeout)
            return self._connection

    async def open(self, timeout: float) -> AsyncConnection:
        """Open a connection for whoever needs one."""
        self._guard.check()
        self.check_open()
        found = self._addresses
        addresses = (found(),) if callable(found) else found
        if len(addresses) > 1:
            # Clients spread over servers that are all the same.
            addresses = tuple(sorted(addresses, key=lambda _: self._draw()))
        try:
            connection = await connect_any(addresses, client=self._client, timeout=timeout)
        except PulqueError as error:
            self._look_elsewhere(error)
            raise
        self.cluster = connection.welcome.cluster
        self.server = connection.welcome.broker
        connection.on_deposed = self._stale
        self._opened.add(connection)
        return connection

    def moved(self) -> None:
        """Take in that the place is elsewhere: nobody has to wait for who was there before."""
        found = self._addresses
        addresses = (found(),) if callable(found) else found
        for connection in [each for each in self._opened if each.address not in addresses]:
            connection.abort()
        self._has_moved.set()
        self._has_moved = asyncio.Event()

    async def _rest(self, seconds: float) -> None:
        """Wait before another try, but not when the place turns out to be elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_moved.wait()

    def _look_elsewhere(self, error: PulqueError) -> None:
        if self._stale is not None and isinstance(error, UnavailableError):
            self._stale()

    async def ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        """Ask what is safe to ask again, until there is an answer or the time is up."""
        started = time.monotonic()
        deadline = started + timeout
        retries = Retries(self._draw, started, deadline)
        left = timeout
        while True:
            was_asked = False
            try:
                connection = await self.warm_up(left)
                left = max(0.001, deadline - time.monotonic())
                was_asked = True
                return await connection.request(request, left, convert)
            except PulqueError as error:
                retries.failed(error, was_asked=was_asked)
                self._look_elsewhere(error)
                await self._rest(retries.next_wait(error, time.monotonic()))
                left = max(0.001, deadline - time.monotonic())

    def check_open(self) -> None:
        """Raise ``UsageError`` if the client is closed, or is not this process's."""
        self._guard.check_process()
        if self.is_closed:
            raise UsageError("this client is closed")

    async def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        if self._connection is not None:
            await self._connection.close()

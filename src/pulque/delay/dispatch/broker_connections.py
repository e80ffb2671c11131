"""The brokers of a delay server: routes of subjects, and connections."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.clock import Clock
from pulque.errors import (
    DisconnectedError,
    NotAllowedError,
    PulqueError,
    RemoteProtocolError,
    UnavailableError,
    error_from_wire,
)
from pulque.model.names import Subject
from pulque.model.routes import PartitionRoute, Route, RouteKind
from pulque.serving.metalink import MetaLink
from pulque.wire.adopt import Adopt
from pulque.wire.requests import Acks, Send
from pulque.wire.requests import Route as AskRoute
from pulque.wire.responses import Adopted, Response, Routed, Sent

__all__ = ["BrokerConnections", "Taker"]

T = TypeVar("T")

_ASK_S = 3.0
_CONNECT_S = 3.0
_FRESH_MS = 30_000
_MOST_ROUTES = 50_000


class Taker(Protocol):
    """The interface to brokers that take due messages."""

    async def route(self, subject: Subject) -> Route:
        """Return the route of a subject."""

    def forget(self, subject: Subject) -> None:
        """Drop a route, so that the next use asks a meta server again."""

    async def reach(self, target: PartitionRoute) -> None:
        """Connect to a broker, unless connected."""

    async def send(self, target: PartitionRoute, partition: str, batch: bytes) -> None:
        """Send a batch to a broker with ``acks="disk"``."""

    async def adopt(self, target: PartitionRoute, request: Adopt) -> None:
        """Ask a broker to adopt a message for one group."""

    async def close(self) -> None:
        """Close all connections."""


class BrokerConnections:
    """Asks meta servers for routes, and sends messages to brokers.

    Args:
        links: The meta servers.
        name: The delay server's name.
        clock: The time.
        timeout_s: The time-out of a request to a broker.
    """

    def __init__(
        self, links: Sequence[MetaLink], name: str, clock: Clock, *, timeout_s: float
    ) -> None:
        self._links = links
        self._name = name
        self._clock = clock
        self._timeout_s = timeout_s
        self._routes: dict[Subject, tuple[int, Route]] = {}
        self._lines: dict[Address, AsyncConnection] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._next = 0

    async def route(self, subject: Subject) -> Route:
        """Return the route of a subject; the last known one if no meta server answers.

        Raises:
            PulqueError: The route is unknown, or the subject may not be created.
        """
        found = self._routes.get(subject)
        now_ms = self._clock.monotonic_ms()
        if found is not None and now_ms - found[0] < _FRESH_MS:
            return found[1]
        try:
            route = await self._ask(subject)
        except UnavailableError:
            if found is None:
                raise
            return found[1]
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        self._routes[subject] = (now_ms, route)
        return route

    def forget(self, subject: Subject) -> None:
        """Drop a route, so that the next use asks a meta server again."""
        found = self._routes.get(subject)
        if found is not None:
            self._routes[subject] = (found[0] - _FRESH_MS, found[1])

    async def send(self, target: PartitionRoute, partition: str, batch: bytes) -> None:
        """Send a batch to a broker with ``acks="disk"``.

        Raises:
            PulqueError: The broker refused, or the outcome is unknown.
        """
        line = await self.line(target)
        request = Send(Acks.DISK, int(self._timeout_s * 1000), ((partition, batch),))
        (outcome,) = (await line.request(request, self._timeout_s, _sent)).outcomes
        if outcome.code:
            raise error_from_wire(outcome.code, outcome.text)

    async def adopt(self, target: PartitionRoute, request: Adopt) -> None:
        """Ask a broker to adopt a message for one group.

        Raises:
            PulqueError: The broker refused, or the outcome is unknown.
        """
        line = await self.line(target)
        await line.request(request, self._timeout_s, _adopted)

    async def reach(self, target: PartitionRoute) -> None:
        """Connect to a broker, unless connected.

        Raises:
            DisconnectedError: The broker is unreachable: nothing was sent.
        """
        await self.line(target)

    async def line(self, target: PartitionRoute) -> AsyncConnection:
        """Return an open connection to a broker.

        Raises:
            DisconnectedError: The broker is unreachable: nothing was sent.
        """
        address = Address(target.host, target.port)
        lock = self._opening.setdefault(address, asyncio.Lock())
        async with lock:
            line = self._lines.get(address)
            if line is None or not line.is_open:
                line = await AsyncConnection.open(
                    address, client=f"delay {self._name}", timeout=_CONNECT_S
                )
                self._lines[address] = line
            return line

    async def close(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            await line.close()

    async def _ask(self, subject: Subject) -> Route:
        self._next += 1
        problem: PulqueError = DisconnectedError("no meta server can be reached")
        for i in range(len(self._links)):
            connection = self._links[(self._next + i) % len(self._links)].connection
            if connection is None:
                continue
            try:
                request = AskRoute(subject, "", RouteKind.REALTIME)
                return (await connection.request(request, _ASK_S, _routed)).route
            except UnavailableError as error:
                problem = error
        if not self._links:
            raise NotAllowedError("no meta server is named in cluster.meta")
        raise problem


def _expecting(kind: type[T]) -> Callable[[Response], T]:
    def convert(response: Response) -> T:
        if not isinstance(response, kind):
            raise RemoteProtocolError(f"{type(response).__name__} came instead of {kind.__name__}")
        return response

    return convert


_sent = _expecting(Sent)
_routed = _expecting(Routed)
_adopted = _expecting(Adopted)

"""Requests to brokers and delay servers, each over one connection that is kept open."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from pulque.admin.cluster import KnownServer
from pulque.admin.models.pagination import Unreachable
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.client.inspecting.dead_letters import Talk
from pulque.client.inspecting.delayed_messages import DelayTalk
from pulque.errors import DisconnectedError, PulqueError, UnavailableError, UnsupportedError
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Answers", "BrokerRequests"]

T = TypeVar("T")
Answers = tuple[list[tuple[KnownServer, T]], list[Unreachable]]
"""What each broker answered, and those that did not answer."""
_AT_ONCE = 32


class BrokerRequests:
    """Connections to all brokers that were ever asked.

    Args:
        timeout: How long a broker may take to answer, in seconds.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._connections: dict[Address, AsyncConnection] = {}
        self._opening: dict[Address, asyncio.Lock] = {}

    async def ask(
        self, server: KnownServer, request: Request, convert: Callable[[Response], T]
    ) -> T:
        """Ask one broker.

        Raises:
            UnavailableError: It does not answer.
            PulqueError: It refuses.
        """
        if not server.is_alive:
            raise UnavailableError(f"broker {server.name} is {server.state}")
        connection = await self._connected(Address(server.host, server.port))
        try:
            return await connection.request(request, self._timeout, convert)
        except DisconnectedError:
            # It may have closed an idle connection just now; what is asked here can be repeated.
            connection = await self._connected(Address(server.host, server.port))
            return await connection.request(request, self._timeout, convert)

    async def talk(self, server: KnownServer, talk: Talk[T]) -> T:
        """Carry a conversation with one broker to its end."""

        def go_on(response: Response) -> Request | None:
            # An answer is valid until this returns, so it is handed on right here.
            try:
                return talk.send(response)
            except StopIteration as end:
                found.append(end.value)
                return None

        found: list[T] = []
        request: Request | None = next(talk)
        while request is not None:
            request = await self.ask(server, request, go_on)
        return found[0]

    async def talk_to_delay_servers(
        self, servers: Mapping[str, KnownServer], talk: DelayTalk[T]
    ) -> T:
        """Carry a conversation with several delay servers to its end."""
        try:
            name, request = next(talk)
            while True:
                try:
                    answer: Response | PulqueError = await self.ask(
                        servers[name], request, _as_it_is
                    )
                except PulqueError as error:
                    answer = error
                name, request = talk.send(answer)
        except StopIteration as end:
            found: T = end.value
            return found

    async def ask_all(
        self, servers: Sequence[KnownServer], question: Callable[[KnownServer], Awaitable[T]]
    ) -> Answers[T]:
        """Ask many brokers at once; those that do not answer, or do not know it, are named.

        Raises:
            PulqueError: One of them refuses.
        """
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(server: KnownServer) -> T | Unreachable:
            async with limit:
                try:
                    return await question(server)
                except (UnavailableError, UnsupportedError) as error:
                    return Unreachable(broker=server.name, message=str(error))

        found = await asyncio.gather(*map(one, servers), return_exceptions=True)
        answers: list[tuple[KnownServer, T]] = []
        silent: list[Unreachable] = []
        for server, each in zip(servers, found, strict=True):
            if isinstance(each, BaseException):
                raise each
            if isinstance(each, Unreachable):
                silent.append(each)
            else:
                answers.append((server, each))
        return answers, silent

    async def close(self) -> None:
        """Close all connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    async def _connected(self, address: Address) -> AsyncConnection:
        async with self._opening.setdefault(address, asyncio.Lock()):
            connection = self._connections.get(address)
            if connection is None or not connection.is_open:
                connection = await AsyncConnection.open(
                    address, client="pulque-admin", timeout=self._timeout
                )
                self._connections[address] = connection
            return connection


def _as_it_is(response: Response) -> Response:
    # Nothing in the answers of delay servers points into the connection's buffer.
    return response

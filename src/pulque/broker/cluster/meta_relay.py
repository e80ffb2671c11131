"""Questions that only a meta server can answer, asked on behalf of clients.

So any broker can be a client's home, and a client need not know where the meta servers are. While
they are away a route is answered as it was heard last: what a client sends goes on.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.errors import (
    DisconnectedError,
    PulqueError,
    RejectedError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnavailableError,
)
from pulque.model.names import Subject
from pulque.model.routes import Route as RouteOf
from pulque.model.routes import RouteKind
from pulque.serving.metalink import MOST_HELD, MetaLink
from pulque.serving.request_tasks import RequestTasks
from pulque.wire.ordered import Attend, Attended
from pulque.wire.requests import Route, Watch
from pulque.wire.responses import Response, Routed, Watched

__all__ = ["Relay"]

T = TypeVar("T", Routed, Watched, Attended)
_ROUTE_S = 3.0
_LONGEST_WAIT_MS = 60_000
_WHILE_AWAY_S = 2.0
_MOST_ROUTES = 50_000
_MOST_ON_A_LINE = MOST_HELD
"""Requests that wait on one connection to a meta server; further ones get another connection."""
_MOST_ROUTES_ASKED = MOST_HELD // 2
"""Questions for routes at a time: they share a connection with the broker's heartbeat, which must
not be refused. A meta server holds those that create a subject."""


class Relay:
    """Asks meta servers, one after the other until one answers.

    Args:
        links: The meta servers; those that are connected are asked.
        name: What the broker calls itself.
    """

    def __init__(self, links: Sequence[MetaLink], name: str) -> None:
        self._links = links
        self._name = name
        self._next = 0
        self._routes: OrderedDict[tuple[RouteKind, str], RouteOf] = OrderedDict()
        """As they were heard last, for whichever group; what nobody asked for in long is first."""
        self._lines: dict[AsyncConnection, int] = {}
        """Connections that requests wait on, and how many wait on each."""
        self._overdue: set[AsyncConnection] = set()
        """Those of them on which a request was not answered in time: they take no more."""
        self._opening: dict[Address, asyncio.Task[None]] = {}
        """Connections that are being opened."""
        self._asking = asyncio.Semaphore(_MOST_ROUTES_ASKED)
        self._tasks = RequestTasks("broker")

    def route(
        self,
        request: Route,
        answer: Callable[[Routed], None],
        refuse: Callable[[PulqueError], None],
        *,
        here: RouteOf | None = None,
    ) -> None:
        """Answer who serves a subject.

        Args:
            request: The question.
            answer: Takes the route.
            refuse: Takes why there is none.
            here: The route to this broker alone, if it has messages of the subject. If the
                cluster does not know the subject then, it is told: the broker stood alone before.
                And while nobody can tell more, this is the answer.
        """
        self._tasks.begin(self._route(request, here), answer, refuse)

    def watch(
        self,
        request: Watch,
        answer: Callable[[Watched], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Answer when a route changes, or when the time is up."""
        self._tasks.begin(self._watch(request), answer, refuse)

    def attend(
        self,
        request: Attend,
        answer: Callable[[Attended], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Tell a consumer of an ordered group which partitions are its own.

        Only a meta server knows: while none can be reached, the consumer is told so.
        """
        self._tasks.begin(self._attend(request), answer, refuse)

    def ask_route(
        self, subject: Subject, decided: Callable[[RouteOf | PulqueError], None]
    ) -> None:
        """Find out who serves a subject; it may be created by that."""
        self.route(
            Route(subject, "", RouteKind.REALTIME), lambda routed: decided(routed.route), decided
        )

    async def close(self) -> None:
        """Give up what is under way."""
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await self._tasks.close()
        await asyncio.gather(*opening, return_exceptions=True)
        for line in list(self._lines):
            await line.close()

    async def _route(self, request: Route, here: RouteOf | None) -> Routed:
        try:
            answer = await self._ask_route(request)
            if here is not None and request.group and not answer.route.partitions:
                with contextlib.suppress(RejectedError):
                    await self._ask_route(replace(request, group=""))
                    answer = await self._ask_route(request)
        except UnavailableError:
            known = self._routes.get((request.kind, request.subject))
            if known is None or not known.partitions:
                known = here or known
            if known is None or not (known.partitions or request.group):
                raise  # who sends cannot be told "nowhere": asked now, it would have been created
            return Routed(known)
        self._remember(request, answer.route)
        return answer

    def _remember(self, request: Route, route: RouteOf) -> None:
        self._routes[request.kind, request.subject] = route
        self._routes.move_to_end((request.kind, request.subject))
        if len(self._routes) > _MOST_ROUTES:
            self._routes.popitem(last=False)

    async def _ask_route(self, request: Route) -> Routed:
        async with self._asking:
            return await self._ask_any(
                lambda link: _connected(link).request(request, _ROUTE_S, _routed)
            )

    async def _watch(self, request: Watch) -> Watched:
        wait_s = min(request.wait_ms, _LONGEST_WAIT_MS) / 1000
        try:
            return await self._ask_any(lambda link: self._watch_at(link, request, wait_s))
        except UnavailableError:
            # The client knows what it knows; it asks again, and somebody may be back by then.
            await asyncio.sleep(min(wait_s, _WHILE_AWAY_S))
            return Watched(())

    async def _attend(self, request: Attend) -> Attended:
        wait_s = min(request.wait_ms, _LONGEST_WAIT_MS) / 1000
        return await self._ask_any(lambda link: self._attend_at(link, request, wait_s))

    async def _watch_at(self, link: MetaLink, request: Watch, wait_s: float) -> Watched:
        return await self._wait_at(link, request, wait_s, _watched)

    async def _attend_at(self, link: MetaLink, request: Attend, wait_s: float) -> Attended:
        return await self._wait_at(link, request, wait_s, _attended)

    async def _wait_at(
        self,
        link: MetaLink,
        request: Watch | Attend,
        wait_s: float,
        convert: Callable[[Response], T],
    ) -> T:
        _connected(link)
        line = await self._line(link)
        self._lines[line] += 1
        try:
            return await line.request(request, wait_s + _ROUTE_S, convert)
        except RequestTimeoutError:
            # The meta server still holds the request, and counts it: it would refuse others.
            self._overdue.add(line)
            raise
        finally:
            self._lines[line] -= 1
            if not self._lines[line] and (not line.is_open or line in self._overdue):
                self._forget(line)  # all who waited on it know by now

    def _has_room(self, line: AsyncConnection) -> bool:
        return self._lines[line] < _MOST_ON_A_LINE and line not in self._overdue

    def _forget(self, line: AsyncConnection) -> None:
        del self._lines[line]
        self._overdue.discard(line)
        line.abort()

    async def _line(self, link: MetaLink) -> AsyncConnection:
        """Return a connection to a meta server that has room for one more request."""
        while True:
            for line, used in list(self._lines.items()):
                if not line.is_open:
                    if not used:
                        self._forget(line)
                elif line.address == link.address and self._has_room(line):
                    return line
            # A crowd that comes at the same time waits for one connection, and shares it.
            if link.address not in self._opening:
                self._opening[link.address] = asyncio.create_task(self._open_line(link.address))
            await asyncio.shield(self._opening[link.address])

    async def _open_line(self, address: Address) -> None:
        try:
            line = await AsyncConnection.open(
                address, client=f"broker {self._name}", timeout=_ROUTE_S
            )
            self._lines[line] = 0
        finally:
            del self._opening[address]

    async def _ask_any(self, ask: Callable[[MetaLink], Coroutine[None, None, T]]) -> T:
        """Ask the meta servers in turn, beginning with another one each time."""
        self._next += 1
        count = len(self._links)
        problem: UnavailableError = DisconnectedError("no meta server can be reached")
        for i in range(count):
            try:
                return await ask(self._links[(self._next + i) % count])
            except UnavailableError as error:
                problem = error
        raise problem


def _connected(link: MetaLink) -> AsyncConnection:
    if link.connection is None:
        raise DisconnectedError(f"the meta server at {link.address} is away")
    return link.connection


def _routed(response: Response) -> Routed:
    if not isinstance(response, Routed):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Routed")
    return response


def _watched(response: Response) -> Watched:
    if not isinstance(response, Watched):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Watched")
    return response


def _attended(response: Response) -> Attended:
    if not isinstance(response, Attended):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Attended")
    return response

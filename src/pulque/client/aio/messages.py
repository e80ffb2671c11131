"""Finding stored messages, for asyncio: by key, id, time or position."""

import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial

from pulque.client.aio.brokers import ClientConnections
from pulque.client.aio.concurrency import side_by_side
from pulque.client.aio.connection_pool import Calls
from pulque.client.aio.conversation import talk_to
from pulque.client.inspecting.broker_answers import of_one
from pulque.client.inspecting.search import (
    Found,
    MessageSearch,
    MessagesFound,
    all_found,
    id_of,
    message_at,
    nobody_has,
    one_of,
    place_at,
    position_of,
    position_request,
    search_for,
    subject_at,
)
from pulque.client.routing.lookup import LOOKING
from pulque.client.routing.route_table import RouteKey
from pulque.client.sending.outgoing_message import Receipt
from pulque.errors import PulqueError
from pulque.model.message import Message
from pulque.model.names import EVERYTHING
from pulque.model.positions import Position
from pulque.model.routes import Route
from pulque.wire.find import FIND_LIMIT
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Messages"]


class Messages:
    """What is stored, to be found without a group and without effect: ``client.messages``.

    Args:
        brokers: The client's.
        timeout: The client's.
        client: It is closed when nobody holds it, so it is held here.
    """

    def __init__(self, brokers: ClientConnections, timeout: float, client: object) -> None:
        self._brokers = brokers
        self._timeout = timeout
        self._client = client

    async def find(  # noqa: PLR0913  # choices by keyword, each with a default
        self,
        subject: str,
        *,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = FIND_LIMIT,
        copies: bool = False,
        broker: str | None = None,
    ) -> MessagesFound:
        """Return stored messages of a subject, the newest first.

        All broker groups of the subject are asked. Those that do not answer are named in the
        result: ``missing``.

        Args:
            subject: Whose messages.
            key: Only those that were sent with this key.
            since: Only those stored at or after this instant, with a time zone …
            until: … and before this one.
            limit: At most so many, up to 1000.
            copies: Whether retries and dead letters of groups count, too.
            broker: Only this broker group's.

        Raises:
            UnknownSubjectError: No broker has the subject.
            UnavailableError: No broker answers.
            UsageError: There can be no such messages.
        """
        search = search_for(subject, key=key, since=since, until=until, limit=limit, copies=copies)
        return await self._search(search, broker)

    async def get(
        self, what: str | bytes | Receipt | Position, *, copies: bool = False
    ) -> Message:
        """Return one stored message.

        Args:
            what: Its id (32 hexadecimal digits, or 16 bytes), for which all brokers are asked; or
                its receipt or position, for which one is, and which is the direct way.
            copies: Whether an id may be that of a retry or a dead letter, too.

        Raises:
            UnknownMessageError: It is not stored, and the text says why.
            UnknownSubjectError: No broker has the subject of a position.
            UnavailableError: Whoever may have it does not answer.
            UsageError: It can be no message, or several brokers may have it: a position without
                a broker group.
        """
        if isinstance(what, Receipt | Position):
            wanted_id = what.id if isinstance(what, Receipt) else None
            return await self._at(position_of(what), wanted_id)
        wanted = id_of(what)
        search = search_for("", message_id=wanted, copies=copies)
        return one_of(await self._search(search, None), wanted)

    async def _search(self, search: MessageSearch, broker: str | None) -> MessagesFound:
        calls, route = await self._calls_for(search.subject)
        if not calls:
            raise nobody_has(search.subject)
        if broker is not None:
            chosen = of_one(calls, broker, "messages to find")
            calls, route = {chosen: calls[chosen]}, None
        until = time.monotonic() + self._timeout
        asks = [partial(self._ask, search, until, name, one) for name, one in calls.items()]
        return all_found(search, await side_by_side(asks), route)

    async def _ask(
        self, search: MessageSearch, until: float, name: str, calls: Calls
    ) -> tuple[str, Found, bool]:
        async def ask(request: Request) -> Response:
            return await calls.ask(request, max(until - time.monotonic(), 0.001), _as_it_is)

        found: list[Message] = []
        name = name or self._brokers.home.server
        try:
            talk = search.talk(name, lambda: time.monotonic() >= until, found)
            return name, found, await talk_to(talk, ask)
        except PulqueError as error:
            return name, error, False

    async def _at(self, position: Position, wanted_id: str | None) -> Message:
        calls, _ = await self._calls_for(subject_at(position))
        place = place_at(position, calls)
        position = position._replace(broker_group=place or self._brokers.home.server)
        convert = partial(message_at, position, wanted_id)
        return await calls[place].ask(position_request(position), self._timeout, convert)

    async def _calls_for(self, subject: str) -> tuple[Mapping[str, Calls], Route | None]:
        """Return whom to ask about a subject or a pattern, and the route that says so."""
        brokers = self._brokers
        places = await brokers.places(subject, LOOKING, self._timeout)
        route = brokers.table.route(RouteKey(subject, LOOKING)) if subject != EVERYTHING else None
        return {place: brokers.calls_at(place) for place in places}, route


def _as_it_is(response: Response) -> Response:
    return response

"""``/messages``: what brokers have stored, by key, time, id or position."""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime, StringConstraints

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context, instant
from pulque.admin.models.delay import MessageId
from pulque.admin.models.message import FoundPage, StoredMessage
from pulque.admin.models.names import PartitionField, ServerName, SubjectName
from pulque.admin.models.pagination import Unreachable
from pulque.client.inspecting.search import (
    Found,
    MessageSearch,
    MessagesFound,
    all_found,
    message_at,
    one_of,
    position_request,
    search_for,
)
from pulque.client.inspecting.stored_messages import text_or_base64
from pulque.errors import PulqueError
from pulque.model.message import Message
from pulque.model.positions import ConsumeSequence, Position
from pulque.wire.find import FIND_LIMIT, MAX_FOUND
from pulque.wire.responses import Response

__all__ = ["MessagesApi"]

_LONGEST_S = 4.0
_MAX_KEY = 65_535
_Key = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_KEY)]
SubjectInQuery = Annotated[SubjectName, Query(description="Of this subject.")]
KeyInQuery = Annotated[_Key | None, Query(description="Only those that were sent with this key.")]
Since = Annotated[AwareDatetime | None, Query(description="Stored then, or later.")]
Until = Annotated[AwareDatetime | None, Query(description="Stored before that.")]
Limit = Annotated[int, Query(ge=1, le=MAX_FOUND, description="At most so many messages.")]
Copies = Annotated[bool, Query(description="Retries and dead letters of groups, too.")]
IdInPath = Annotated[MessageId, Path(description="A message id.")]
BrokerInQuery = Annotated[ServerName, Query(description="The broker group that has it.")]
PartitionInQuery = Annotated[PartitionField, Query(description="The partition that it is in.")]
SequenceInQuery = Annotated[int, Query(ge=0, le=2**63 - 1, description="Its ordinal there.")]


class MessagesApi:
    """Answers for stored messages."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.router = router = APIRouter(prefix="/messages", tags=["messages"])
        router.get("", summary="Find messages by key or time")(self.find)
        router.get("/at", summary="Show the message of a position")(self.at)
        router.get("/{message_id}", summary="Show the message of an id")(self.show)

    async def find(
        self,
        subject: SubjectInQuery,
        key: KeyInQuery = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = FIND_LIMIT,
        copies: Copies = False,  # noqa: FBT002  # a query has names
    ) -> FoundPage:
        """Return messages of a subject, the newest first; for older ones give `until`."""
        search = search_for(subject, key=key, since=since, until=until, limit=limit, copies=copies)
        found, silent = await self._search(search)
        rows = [_message(each, is_whole=False) for each in found]
        return FoundPage(items=rows, unreachable=silent)

    async def show(
        self,
        message_id: IdInPath,
        copies: Copies = False,  # noqa: FBT002  # a query has names
    ) -> StoredMessage:
        """Return one message with its body."""
        search = search_for("", message_id=message_id, copies=copies)
        found, _ = await self._search(search)
        return _message(one_of(found, bytes.fromhex(message_id)), is_whole=True)

    async def at(
        self, broker_group: BrokerInQuery, partition: PartitionInQuery, sequence: SequenceInQuery
    ) -> StoredMessage:
        """Return the message of a position, with its body: the direct way."""
        (server, *_) = await self._context.serving(broker_group)
        position = Position(broker_group, partition, ConsumeSequence(sequence))
        request = position_request(position)

        def convert(response: Response) -> Message:
            return message_at(position, None, response)

        message = await self._context.brokers.ask(server, request, convert)
        return _message(message, is_whole=True)

    async def _search(self, search: MessageSearch) -> tuple[MessagesFound, list[Unreachable]]:
        until = time.monotonic() + _LONGEST_S
        servers = await self._context.serving()

        async def one(server: KnownServer) -> tuple[Found, bool]:
            return await self._ask(server, search, lambda: time.monotonic() >= until)

        answers, silent = await self._context.brokers.ask_all(servers, one)
        said = [(server.broker_group, *answer) for server, answer in answers]
        found = all_found(search, said, None)
        late = [Unreachable(broker=name, message=why) for name, why in found.missing.items()]
        named = {each.broker: each.message for each in silent}
        return MessagesFound(found.messages, {**found.missing, **named}), [*silent, *late]

    async def _ask(
        self, server: KnownServer, search: MessageSearch, is_over: Callable[[], bool]
    ) -> tuple[Found, bool]:
        """Return what one broker has, and whether it was asked to the end."""
        found: list[Message] = []
        talk = search.talk(server.broker_group, is_over, found)
        try:
            return found, await self._context.brokers.talk(server, talk)
        except PulqueError as error:
            if error.retryable:
                raise
            return error, False


def _message(message: Message, *, is_whole: bool) -> StoredMessage:
    text, encoded = text_or_base64(message.body) if is_whole else (None, None)
    return StoredMessage(
        id=message.id,
        subject=message.subject,
        broker_group=message.broker_group,
        partition=message.partition,
        sequence=message.sequence,
        key=message.key,
        order_key=message.order_key,
        tags=list(message.tags),
        headers=message.headers,
        attempt=message.attempt,
        priority=message.priority,
        created_at=instant(message.created_at_ms),
        stored_at=instant(message.stored_at_ms),
        size=len(message.body),
        body=text,
        body_base64=encoded,
    )

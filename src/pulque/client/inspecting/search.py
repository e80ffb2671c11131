"""Finding stored messages: what is asked, and what the answers of all brokers come to.

A search is a conversation with one broker, without I/O: it yields what to ask and is sent the
answers. A broker finds by hashes; that a message has the very key or id is seen here.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import overload

from pulque.client.arguments.due_times import ms_of
from pulque.client.inspecting.broker_answers import of_one
from pulque.client.inspecting.dead_letters import Talk
from pulque.client.inspecting.stored_messages import messages_of
from pulque.client.routing.targets import HOME
from pulque.client.sending.outgoing_message import Receipt
from pulque.errors import (
    CorruptionError,
    InvalidBatchError,
    PulqueError,
    RemoteProtocolError,
    UnavailableError,
    UnknownMessageError,
    UnknownSubjectError,
    UsageError,
)
from pulque.model.batch import seed_of, verify_crc
from pulque.model.ids import ID_SIZE
from pulque.model.message import Message, StoredBatch, check_message
from pulque.model.names import EVERYTHING, parse_partition, parse_subject, subject_of
from pulque.model.pack import encode_key
from pulque.model.positions import ConsumeSequence, Position
from pulque.model.routes import SLOTS, Route
from pulque.wire.find import ANY_TIME_MS, FIND_LIMIT, MAX_FOUND, Find, FoundMessage, FoundMessages
from pulque.wire.requests import Read
from pulque.wire.responses import ReadBack, Response

__all__ = [
    "Found",
    "MessageSearch",
    "MessagesFound",
    "all_found",
    "id_of",
    "message_at",
    "nobody_has",
    "one_of",
    "place_at",
    "position_of",
    "position_request",
    "search_for",
    "subject_at",
    "uncovered",
]

log = logging.getLogger("pulque.client")

_MAX_BYTES = 1024 * 1024
_LONGEST_MS = 1000
Found = list[Message] | PulqueError
"""What one broker has, or why it does not say."""


@dataclass(frozen=True, slots=True)
class MessagesFound(Sequence[Message]):
    """Messages that were found, the newest first; a list that knows what it lacks."""

    messages: list[Message]
    missing: dict[str, str] = field(default_factory=dict)
    """Broker groups that did not answer, or not in time, and what is known about it: messages of
    theirs may be missing."""

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self.messages[index]

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)


@dataclass(frozen=True, slots=True)
class MessageSearch:
    """What is looked for, as a conversation."""

    request: Find

    @property
    def subject(self) -> str:
        """Whose brokers to ask, as a subject or a pattern."""
        return self.request.subject or EVERYTHING

    @property
    def limit(self) -> int:
        """How many messages are wanted."""
        return self.request.max_messages

    def talk(
        self, broker_group: str, is_over: Callable[[], bool], found: list[Message]
    ) -> Talk[bool]:
        """Ask one broker; return whether it was asked to the end.

        Args:
            broker_group: Who that is.
            is_over: Says whether the time is up.
            found: Messages are added to it, the newest first.
        """
        request = self.request
        while True:
            answer = yield request
            if not isinstance(answer, FoundMessages):
                raise RemoteProtocolError(f"a request to find messages got {answer!r}")
            messages = _readable(_message_of(each, broker_group) for each in answer.messages)
            found += [message for message in messages if self._is_wanted(message)]
            if not answer.next or len(found) >= self.limit:
                return True
            if is_over():
                return False
            request = replace(request, after=answer.next, max_messages=self.limit - len(found))

    def _is_wanted(self, message: Message) -> bool:
        """Say whether it is not another one whose key or id has the same hash."""
        if self.request.id:
            return message.id == self.request.id.hex()
        return not self.request.key or message.key == self.request.key


def search_for(  # noqa: PLR0913  # choices by keyword, each with a default
    subject: str,
    *,
    key: str | None = None,
    message_id: str | bytes | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = FIND_LIMIT,
    copies: bool = False,
) -> MessageSearch:
    """Return a search.

    Raises:
        PulqueError: It cannot be, and the text says why.
    """
    if subject or message_id is None:
        parse_subject(subject)
    if key is not None and message_id is not None:
        raise UsageError("key and id contradict each other: messages are found by one of them")
    if key is not None and not encode_key(key, "key"):
        raise UsageError("an empty key; messages without a key cannot be found by it")
    if not _is_number(limit) or not 1 <= limit <= MAX_FOUND:
        raise UsageError(f"limit is {limit!r}; 1 to {MAX_FOUND} messages are allowed")
    since_ms = 0 if since is None else max(ms_of(since), 0)
    until_ms = ANY_TIME_MS if until is None else ms_of(until)
    if since_ms >= until_ms:
        raise UsageError(f"since {since} until {until}: there is no time between")
    found = b"" if message_id is None else id_of(message_id)
    return MessageSearch(
        Find(subject, key or "", found, since_ms, until_ms, limit, _MAX_BYTES, _LONGEST_MS, copies)
    )


def id_of(message_id: object) -> bytes:
    """Return an id as it stands in a record.

    Raises:
        UsageError: It is none.
    """
    encoded = b""
    if isinstance(message_id, bytes):
        encoded = message_id
    elif isinstance(message_id, str) and message_id.isascii():
        try:
            encoded = bytes.fromhex(message_id)
        except ValueError:
            encoded = b""
    if len(encoded) != ID_SIZE:
        shown = ascii(message_id)[:80]
        raise UsageError(f"id is {shown}; {2 * ID_SIZE} hexadecimal digits are wanted")
    return encoded


def all_found(
    search: MessageSearch, said: Iterable[tuple[str, Found, bool]], route: Route | None
) -> MessagesFound:
    """Return what all brokers together have.

    Args:
        search: What was looked for.
        said: Each broker group, what it has, and whether it was asked to the end.
        route: Of the subject, if there is one.

    Raises:
        PulqueError: One of them refused, none knows the subject, or none answered.
    """
    messages: list[Message] = []
    missing = {} if route is None else uncovered(route)
    unknown: PulqueError | None = None
    silent: PulqueError | None = None
    heard = 0
    for broker, found, is_whole in said:
        if isinstance(found, UnknownSubjectError):
            unknown = found
        elif isinstance(found, UnavailableError):
            silent = found
            missing[broker] = str(found)
        elif isinstance(found, PulqueError):
            raise found
        else:
            heard += 1
            messages += found
            if not is_whole:
                missing[broker] = "there was no time to look at all that it has"
    if not heard and (silent or unknown) is not None:
        raise silent or unknown  # type: ignore[misc]  # one of them is there
    messages.sort(
        key=lambda each: (each.stored_at_ms, each.partition, each.sequence), reverse=True
    )
    return MessagesFound(messages[: search.limit], missing)


def nobody_has(subject: str) -> PulqueError:
    """Return what to say when there is no broker to ask about a subject or a pattern."""
    if subject == EVERYTHING:
        return UnavailableError("no broker is there at present; try again")
    return UnknownSubjectError(f"no broker has a subject {subject}")


def uncovered(route: Route) -> dict[str, str]:
    """Say if a part of a subject is with brokers that nobody reaches: a route leaves them out."""
    at = 0
    for first, end in sorted(each.slots for each in route.partitions):
        if first > at:
            break
        at = max(at, end)
    if at >= SLOTS or not route.partitions:
        return {}
    return {"?": f"a broker that has a part of {route.subject} is not there now"}


def one_of(found: MessagesFound, message_id: bytes) -> Message:
    """Return the message of an id.

    Raises:
        UnknownMessageError: Nobody has it.
        UnavailableError: Nobody who answered has it.
    """
    if found.messages:
        return found.messages[-1]
    if found.missing:
        raise UnavailableError(
            f"message {message_id.hex()} is at no broker that answered; "
            + "; ".join(f"{name}: {why}" for name, why in found.missing.items())
        )
    raise UnknownMessageError(
        f"no broker has message {message_id.hex()}: it was never stored, retention removed it, or "
        "nobody can decode it"
    )


# ── by position ────────────────────────────────────────────────────────────────────────────


def position_of(what: Receipt | Position) -> Position:
    """Return where a message is.

    Raises:
        PulqueError: There can be nothing there.
    """
    if isinstance(what, Receipt):
        if what.due_at_ms:
            raise UsageError(
                f"message {what.id} was due later: ask for its id, once it is delivered"
            )
        what = what.position
    parse_partition(what.partition)
    if not _is_number(what.sequence) or not 0 <= what.sequence < 2**63:
        raise UsageError(f"sequence is {what.sequence!r}; a whole number from 0 is wanted")
    return what


def place_at(position: Position, places: Collection[str]) -> str:
    """Return which of the brokers of a subject to ask for a position.

    Raises:
        UnavailableError: The broker group that it names is away.
        UnknownSubjectError: It names none, and no broker has the subject.
        UsageError: It names none, and several brokers have the subject.
    """
    named = position.broker_group
    if named in places or HOME in places:
        return named if named in places else HOME
    where = f"{position.partition}/{position.sequence}"
    if named:
        raise UnavailableError(f"broker group {named} is not there now; it has {where}")
    if not places:
        raise nobody_has(subject_at(position))
    return of_one(places, None, where)


def position_request(position: Position) -> Read:
    """Return what to ask for a message by its position."""
    return Read(parse_partition(position.partition), position.sequence, 1, _MAX_BYTES, 0)


def message_at(position: Position, wanted_id: str | None, response: Response) -> Message:
    """Return the message of a position.

    Raises:
        UnknownMessageError: It is not there, and the text says why.
    """
    partition = parse_partition(position.partition)
    found = messages_of(partition, response, broker_group=position.broker_group)
    assert isinstance(response, ReadBack)  # noqa: S101  # messages_of has checked that
    where = f"{partition}/{position.sequence}"
    for message in found:
        if message.sequence == position.sequence:
            if wanted_id is not None and message.id != wanted_id:
                raise UnknownMessageError(f"{where} is message {message.id}, not {wanted_id}")
            return message
    if position.sequence >= response.end:
        raise UnknownMessageError(f"{where} is not stored: the next one to come is {response.end}")
    if position.sequence < response.start:
        raise UnknownMessageError(
            f"{where} is not stored any more: the oldest one is {response.start}"
        )
    raise UnknownMessageError(
        f"{where} cannot be read: its bytes are damaged, or nobody can decode them"
    )


def subject_at(position: Position) -> str:
    """Return whose brokers to ask about a position."""
    return subject_of(parse_partition(position.partition))


def _message_of(found: FoundMessage, broker_group: str) -> Message:
    """Return a message that was found, checked."""
    if not verify_crc(found.batch, seed_of(found.partition)):
        raise CorruptionError(
            found.partition, found.sequence, "the crc of a message that was found does not match"
        )
    batch = StoredBatch(
        found.batch,
        partition=found.partition,
        first_sequence=ConsumeSequence(found.sequence),
        stored_at_ms=found.stored_at_ms,
    )
    if len(batch) != 1:
        raise RemoteProtocolError(f"a message that was found is a batch of {len(batch)}")
    batch.broker_group = broker_group
    return Message(batch, 0)


def _readable(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages, except those that nobody can decode."""
    for message in messages:
        try:
            check_message(message)
        except InvalidBatchError as error:
            log.warning("not readable: %s/%d %s", message.partition, message.sequence, error)
        else:
            yield message


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

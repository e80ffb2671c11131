"""What a producer hands in, and what it gets back for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypedDict, cast

from pulque.client.arguments.due_times import AT_ONCE, due_of, ms_of
from pulque.client.sending.body_encoding import JSON_TYPE, TYPE_HEADER, encode_payload
from pulque.errors import UsageError
from pulque.model.names import DEFAULT_LEVEL, MAX_LEVEL, PartitionName
from pulque.model.pack import ONCE_HEADER, SYSTEM_PREFIX
from pulque.model.positions import ConsumeSequence, Position

__all__ = [
    "MessageParts",
    "Outgoing",
    "Receipt",
    "as_body",
    "check_priorities",
    "check_priority",
    "listed",
    "outgoing_of",
]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Receipt(NamedTuple):
    """The broker has the message, as durable as its ``acks`` asked for."""

    id: str
    """The message id: 32 hexadecimal digits, ordered by time."""
    partition: PartitionName
    """The partition that it is stored in."""
    sequence: ConsumeSequence
    """Its ordinal there."""
    stored_at_ms: int
    """When the broker stored it."""
    broker_group: str
    """Who keeps it."""
    is_duplicate: bool
    """An earlier try had stored it already; it is there once."""
    may_be_doubled: bool = False
    """Another broker was sent it before, and nobody knows whether it stored it: the message, known
    by its id, may be there twice."""
    due_at_ms: int = AT_ONCE
    """When it is to be delivered, in milliseconds since 1970; 0 for at once. Until then a delay
    server has it, the one that ``broker_group`` names."""

    @property
    def due_at(self) -> datetime | None:
        """When it is to be delivered; None for at once."""
        return _EPOCH + self.due_at_ms * _MILLISECOND if self.due_at_ms else None

    @property
    def position(self) -> Position:
        """Where it rests: broker group, partition and sequence."""
        return Position(self.broker_group, self.partition, self.sequence)


class MessageParts(TypedDict, total=False):
    """What a message may have beside its body."""

    key: str | None
    """What it is about; it can be found by it."""
    order_key: str | None
    """Messages of one order key stay in one partition, in the order in which they are sent."""
    tags: Iterable[str]
    """Words that consumers may filter by."""
    headers: Mapping[str, str] | None
    expires_at: datetime | None
    """When it is no longer worth delivering; with a time zone."""
    priority: int
    """0 to 9, higher first."""
    reliable: bool
    """False for a message that is delivered once, whatever becomes of it."""
    delay: float | timedelta | None
    """How long from now it is to be delivered, in seconds or as a timedelta."""
    at: datetime | None
    """When it is to be delivered; with a time zone. What is past is delivered at once."""
    level: int | None
    """1 to 18: a delay of 1, 5, 10 or 30 seconds, 1 to 10, 20 or 30 minutes, 1 or 2 hours."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send that is more than a body."""

    body: object
    """Bytes or a text as they are; all else as JSON, with ``content-type: application/json`` among
    the headers, unless they have one. Once made, it has bytes."""
    key: str | None = None
    """What the message is about; it can be found by it."""
    order_key: str | None = None
    """Messages of one order key stay in one partition, in the order in which they are sent."""
    tags: Iterable[str] = ()
    """Words that consumers may filter by."""
    headers: Mapping[str, str] | None = None
    expires_at: datetime | None = None
    """When it is no longer worth delivering; with a time zone."""
    priority: int = DEFAULT_LEVEL
    """0 to 9, higher first. Messages of one order key keep their order within a priority."""
    reliable: bool = True
    """False for a message that is delivered once, whatever becomes of it."""
    delay: float | timedelta | None = None
    """How long from now it is to be delivered, in seconds or as a timedelta."""
    at: datetime | None = None
    """When it is to be delivered; with a time zone. What is past is delivered at once."""
    level: int | None = None
    """1 to 18: a delay of 1, 5, 10 or 30 seconds, 1 to 10, 20 or 30 minutes, 1 or 2 hours."""

    def __post_init__(self) -> None:
        if type(self.body) is not bytes:
            self._encode_body()
        _check_text("key", self.key)
        _check_text("order_key", self.order_key)
        if self.headers is not None:
            _check_headers(self.headers)
        if type(self.tags) is not tuple:
            self._keep_tags()
        if type(self.reliable) is not bool:
            raise UsageError(f"reliable is {self.reliable!r}; True and False are allowed")

    def _encode_body(self) -> None:
        body = encode_payload(self.body)
        is_json = not isinstance(self.body, bytes | bytearray | memoryview | str)
        object.__setattr__(self, "body", body)
        if is_json and (self.headers is None or isinstance(self.headers, Mapping)):
            object.__setattr__(self, "headers", {TYPE_HEADER: JSON_TYPE, **(self.headers or {})})

    def _keep_tags(self) -> None:
        if not isinstance(self.tags, Iterable):
            raise UsageError(f"tags is {self.tags!r}; a str, or some of them, is allowed")
        if not isinstance(self.tags, str):
            # A generator has its tags only once, and a message may have to be packed twice.
            object.__setattr__(self, "tags", tuple(self.tags))

    def due_at_ms(self, now_ms: int) -> int:
        """Return when it is due, in milliseconds since 1970; 0 for at once.

        Raises:
            UsageError: That cannot be, or it expires before.
        """
        due_ms = due_of(self.delay, self.at, self.level, now_ms)
        expires_ms = ms_of(self.expires_at)
        if due_ms and expires_ms and expires_ms <= due_ms:
            raise UsageError(
                f"expires_at is {self.expires_at!r}, and the message is due in "
                f"{(due_ms - now_ms) / 1000:g} s, after that: nobody would ever get it"
            )
        return due_ms

    def all_headers(self) -> Mapping[str, str] | None:
        """Return the headers as they travel."""
        return self.headers if self.reliable else {**(self.headers or {}), ONCE_HEADER: "1"}


def _check_text(name: str, text: object) -> None:
    if text is not None and not isinstance(text, str):
        raise UsageError(f"{name} is {text!r}; a str is allowed, or None for none")


def _check_headers(headers: object) -> None:
    if not isinstance(headers, Mapping):
        raise UsageError(
            f"headers is {headers!r}; a dict of names and values, all str, is allowed"
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(
                f"headers has {name!r}: {value!r}; names and values are to be str, so write "
                f"{str(name)!r}: {str(value)!r}"
            )
        if name.startswith(SYSTEM_PREFIX):
            raise UsageError(
                f"headers has {name!r}; names that begin with {SYSTEM_PREFIX} belong to the "
                "system, choose another one"
            )


def check_priority(priority: object) -> int:
    """Return a priority that there is.

    Raises:
        UsageError: There is no such.
    """
    if type(priority) is int and 0 <= priority <= MAX_LEVEL:
        return priority
    raise UsageError(
        f"priority is {priority!r}; a whole number from 0 to {MAX_LEVEL} is allowed, higher first"
    )


def check_priorities(messages: Iterable[object]) -> None:
    """Raise ``UsageError`` if a message has a priority that there is not."""
    for message in messages:
        if isinstance(message, Outgoing):
            check_priority(message.priority)


def listed(messages: Iterable[object]) -> list[object]:
    """Return messages as a list.

    Raises:
        UsageError: They are one message, or none at all.
    """
    if isinstance(messages, list):
        return messages
    if isinstance(messages, str | bytes | bytearray | memoryview | Mapping | Outgoing):
        raise UsageError(
            f"messages is one {type(messages).__name__}; a list of messages is allowed: "
            "to send one, use send"
        )
    if not isinstance(messages, Iterable):
        raise UsageError(f"messages is {messages!r}; a list of messages is allowed")
    return list(messages)


def outgoing_of(messages: Iterable[object]) -> list[bytes | Outgoing]:
    """Return what to send of each of some messages: bytes as they are, all else with its parts.

    Raises:
        UsageError: They are one message, or one of them is none.
    """
    items = listed(messages)
    if set(map(type, items)) <= {bytes, Outgoing}:
        return cast(list[bytes | Outgoing], items)
    return [each if isinstance(each, bytes | Outgoing) else Outgoing(each) for each in items]


def as_body(body: object) -> bytes:
    """Return a body as bytes, whatever bytes-like thing it is.

    Raises:
        UsageError: It is not bytes at all.
    """
    if isinstance(body, bytes):
        return body
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    raise UsageError(f"a body must be bytes, not {type(body).__name__}; encode it first")

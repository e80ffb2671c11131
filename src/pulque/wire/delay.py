"""Delayed messages on the wire: cancelling them, moving them, and asking what is due when.

A delayed message is sent as any other, by ``Send``, in a batch with a due time for each of its
messages, to a server of the route for delayed sends.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.errors import RemoteProtocolError
from pulque.model.ids import ID_SIZE
from pulque.model.names import PartitionName
from pulque.wire.codec import Reader, Writer
from pulque.wire.groups import known
from pulque.wire.opcodes import Opcode

__all__ = [
    "ANY_DUE",
    "MAX_LISTED",
    "Cancel",
    "Cancelled",
    "Fate",
    "HourCount",
    "Listing",
    "Move",
    "Reschedule",
    "Rescheduled",
    "Scheduled",
    "ScheduledListed",
    "ScheduledMessage",
    "Ticket",
]

ANY_DUE = 0
"""As the due time of a message that is to be found by its id alone."""
MAX_LISTED = 1000
"""How many ids one request may name, and how many rows one answer holds at most."""
_KIND = Struct("<B")
_DUE = Struct("<q")
_MOVED = Struct("<qq")


class Fate(IntEnum):
    """What became of a message that was to be cancelled or moved."""

    CANCELLED = 0
    """It was cancelled in time, and is never delivered."""
    ALREADY_CANCELLED = 1
    """It had been cancelled before."""
    TOO_LATE = 2
    """It is due: on its way to a broker, or there."""
    UNKNOWN = 3
    """This server has no such message at that time, or, asked for any time, at none."""
    MOVED = 4
    """It was moved in time, and is delivered at the new time only."""


class Listing(IntEnum):
    """What is asked about the messages that are scheduled."""

    COUNTS = 0
    """How many there are, by hour and subject."""
    NEXT = 1
    """Which are due next, without their contents."""
    ONE = 2
    """One by its id, with its content."""


class Ticket(NamedTuple):
    """Names one scheduled message."""

    id: bytes
    """Sixteen bytes."""
    due_ms: int = ANY_DUE
    """When it is due, as its receipt says; ``ANY_DUE`` searches for it, which costs more."""


class Move(NamedTuple):
    """One scheduled message, and when it is to be delivered instead."""

    id: bytes
    """Sixteen bytes."""
    due_ms: int
    """When it is due now, or ``ANY_DUE``."""
    new_due_ms: int
    """When it is to be due."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Never deliver these."""

    opcode: ClassVar[Opcode] = Opcode.CANCEL

    tickets: tuple[Ticket, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.tickets))
        for each in self.tickets:
            to.blob(each.id)
            to.pack(_DUE, each.due_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        count = source.count("messages to cancel", most=MAX_LISTED, least_size=12)
        return cls(tuple([Ticket(_read_id(source), *source.unpack(_DUE)) for _ in range(count)]))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to ``Cancel``: what became of each, which is on disk."""

    opcode: ClassVar[Opcode] = Opcode.CANCEL

    fates: tuple[Fate, ...]
    """In the order of the request."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        _write_fates(self.fates, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(_read_fates(source))


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Deliver these at another time."""

    opcode: ClassVar[Opcode] = Opcode.RESCHEDULE

    moves: tuple[Move, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.moves))
        for each in self.moves:
            to.blob(each.id)
            to.pack(_MOVED, each.due_ms, each.new_due_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        count = source.count("messages to reschedule", most=MAX_LISTED, least_size=20)
        return cls(tuple([Move(_read_id(source), *source.unpack(_MOVED)) for _ in range(count)]))


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The answer to ``Reschedule``: what became of each, which is on disk."""

    opcode: ClassVar[Opcode] = Opcode.RESCHEDULE

    fates: tuple[Fate, ...]
    """In the order of the request; one that was cancelled before stays so."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        _write_fates(self.fates, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(_read_fates(source))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What is due when?"""

    opcode: ClassVar[Opcode] = Opcode.SCHEDULED
    _form: ClassVar[Struct] = Struct("<BqqI")

    listing: Listing
    subject: str = ""
    """Of this subject only; empty for all."""
    from_ms: int = 0
    """Due at this time or later …"""
    until_ms: int = 0
    """… and before this one; 0 for no end."""
    max_rows: int = 100
    """Answer with at most so many, and never with more than ``MAX_LISTED``."""
    after: bytes = b""
    """Where the last page ended, as its answer said; empty for the first."""
    id: bytes = b""
    """Of the one that is asked for; ``from_ms`` may name its due time, else it is searched for."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.listing, self.from_ms, self.until_ms, self.max_rows)
        to.text(self.subject)
        to.blob(self.after)
        to.blob(self.id)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        listing, from_ms, until_ms, max_rows = source.unpack(cls._form)
        kind = known(Listing, listing, "a listing of kind")
        subject, after, message_id = source.text(), bytes(source.blob()), bytes(source.blob())
        return cls(kind, subject, from_ms, until_ms, max_rows, after, message_id)


class HourCount(NamedTuple):
    """How many messages of a subject are due in an hour."""

    hour_ms: int
    """When the hour begins, in UTC."""
    subject: str
    messages: int


class ScheduledMessage(NamedTuple):
    """A message that waits for its time."""

    id: bytes
    """Sixteen bytes."""
    due_ms: int
    partition: PartitionName
    """Where it goes when it is due: its subject, or the retry partition of one group."""
    size: int
    """Bytes of its keys, tags, headers and body."""
    batch: bytes
    """The message itself as a batch of one, for that partition; empty if not asked for."""


@dataclass(frozen=True, slots=True)
class ScheduledListed:
    """The answer to ``Scheduled``."""

    opcode: ClassVar[Opcode] = Opcode.SCHEDULED
    _hour: ClassVar[Struct] = Struct("<q")
    _count: ClassVar[Struct] = Struct("<Q")
    _size: ClassVar[Struct] = Struct("<I")

    counts: tuple[HourCount, ...]
    """In the order of hours; empty unless asked for."""
    messages: tuple[ScheduledMessage, ...]
    """In the order of due times; of one, itself, or nothing if it is not here."""
    next: bytes
    """Where the next page begins: give it back as ``after``; empty if this was the last one."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.counts))
        for count in self.counts:
            to.pack(self._hour, count.hour_ms)
            to.text(count.subject)
            to.pack(self._count, count.messages)
        to.count(len(self.messages))
        for each in self.messages:
            to.blob(each.id)
            to.pack(_DUE, each.due_ms)
            to.text(each.partition)
            to.pack(self._size, each.size)
            to.blob(each.batch)
        to.blob(self.next)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        counts = tuple([cls._read_count(source) for _ in range(source.count())])
        messages = tuple([cls._read_message(source) for _ in range(source.count())])
        return cls(counts, messages, bytes(source.blob()))

    @classmethod
    def _read_count(cls, source: Reader) -> HourCount:
        (hour_ms,) = source.unpack(cls._hour)
        return HourCount(hour_ms, source.text(), *source.unpack(cls._count))

    @classmethod
    def _read_message(cls, source: Reader) -> ScheduledMessage:
        message_id = _read_id(source)
        (due_ms,) = source.unpack(_DUE)
        partition = PartitionName(source.text())
        (size,) = source.unpack(cls._size)
        return ScheduledMessage(message_id, due_ms, partition, size, bytes(source.blob()))


def _read_id(source: Reader) -> bytes:
    message_id = bytes(source.blob())
    if len(message_id) != ID_SIZE:
        raise RemoteProtocolError(f"an id of {len(message_id)} bytes; all have {ID_SIZE}")
    return message_id


def _write_fates(fates: tuple[Fate, ...], to: Writer) -> None:
    to.count(len(fates))
    for fate in fates:
        to.pack(_KIND, fate)


def _read_fates(source: Reader) -> tuple[Fate, ...]:
    return tuple([known(Fate, source.unpack(_KIND)[0], "fate") for _ in range(source.count())])

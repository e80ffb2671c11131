"""Delayed messages on the wire: cancelling them, moving them, and asking what is due when.

A delayed message is sent as any other, by ``Send``, in a batch with a due time for each of its
messages, to a server of the route for delayed sends.
"""

from enum import IntEnum
from typing import Annotated, NamedTuple

from pulque.model.names import PartitionName
from pulque.wire.kinds import I64, U32, U64, Id, choice, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

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

    id: Id
    """Sixteen bytes."""
    due_ms: I64 = ANY_DUE
    """When it is due, as its receipt says; ``ANY_DUE`` searches for it, which costs more."""


class Move(NamedTuple):
    """One scheduled message, and when it is to be delivered instead."""

    id: Id
    """Sixteen bytes."""
    due_ms: I64
    """When it is due now, or ``ANY_DUE``."""
    new_due_ms: I64
    """When it is to be due."""


@packet(Opcode.CANCEL)
class Cancel(Packet):
    """Never deliver these."""

    tickets: Annotated[tuple[Ticket, ...], many("messages to cancel", most=MAX_LISTED)]


@packet(Opcode.CANCEL)
class Cancelled(Response):
    """The answer to ``Cancel``: what became of each, which is on disk."""

    fates: Annotated[tuple[Fate, ...], many(each="fate")]
    """In the order of the request."""


@packet(Opcode.RESCHEDULE)
class Reschedule(Packet):
    """Deliver these at another time."""

    moves: Annotated[tuple[Move, ...], many("messages to reschedule", most=MAX_LISTED)]


@packet(Opcode.RESCHEDULE)
class Rescheduled(Response):
    """The answer to ``Reschedule``: what became of each, which is on disk."""

    fates: Annotated[tuple[Fate, ...], many(each="fate")]
    """In the order of the request; one that was cancelled before stays so."""


@packet(Opcode.SCHEDULED, first="listing from_ms until_ms max_rows")
class Scheduled(Packet):
    """What is due when?"""

    listing: Annotated[Listing, choice(Listing, "a listing of kind")]
    subject: str = ""
    """Of this subject only; empty for all."""
    from_ms: I64 = 0
    """Due at this time or later …"""
    until_ms: I64 = 0
    """… and before this one; 0 for no end."""
    max_rows: U32 = 100
    """Answer with at most so many, and never with more than ``MAX_LISTED``."""
    after: bytes = b""
    """Where the last page ended, as its answer said; empty for the first."""
    id: bytes = b""
    """Of the one that is asked for; ``from_ms`` may name its due time, else it is searched for."""


class HourCount(NamedTuple):
    """How many messages of a subject are due in an hour."""

    hour_ms: I64
    """When the hour begins, in UTC."""
    subject: str
    messages: U64


class ScheduledMessage(NamedTuple):
    """A message that waits for its time."""

    id: Id
    """Sixteen bytes."""
    due_ms: I64
    partition: PartitionName
    """Where it goes when it is due: its subject, or the retry partition of one group."""
    size: U32
    """Bytes of its keys, tags, headers and body."""
    batch: bytes
    """The message itself as a batch of one, for that partition; empty if not asked for."""


@packet(Opcode.SCHEDULED)
class ScheduledListed(Response):
    """The answer to ``Scheduled``."""

    counts: tuple[HourCount, ...]
    """In the order of hours; empty unless asked for."""
    messages: tuple[ScheduledMessage, ...]
    """In the order of due times; of one, itself, or nothing if it is not here."""
    next: bytes
    """Where the next page begins: give it back as ``after``; empty if this was the last one."""

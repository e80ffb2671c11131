"""Delayed messages that brokers refuse for good, on the wire: which they are, and why."""

from typing import NamedTuple

from pulque.model.names import PartitionName
from pulque.wire.kinds import I64, U32, Id, row
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["StuckListed", "StuckMessage", "StuckMessages"]


@packet(Opcode.STUCK, first="max_rows")
class StuckMessages(Packet):
    """Which messages are overdue, as brokers refuse them?"""

    subject: str = ""
    """Of this subject only; empty for all."""
    max_rows: U32 = 100
    """Answer with at most so many, and never with more than ``MAX_LISTED``."""
    after: bytes = b""
    """Where the last page ended, as its answer said; empty for the first."""


@row(first="id due_ms since_ms size")
class StuckMessage(NamedTuple):
    """A message that was put aside."""

    id: Id
    """Sixteen bytes."""
    due_ms: I64
    partition: PartitionName
    """Where it was to go: its subject, or the retry partition of one group."""
    size: U32
    """Bytes of its keys, tags, headers and body."""
    since_ms: I64
    """When it was put aside, or another one of its tick for the same reason."""
    reason: str
    """What the broker said."""


@packet(Opcode.STUCK)
class StuckListed(Response):
    """The answer to ``StuckMessages``."""

    messages: tuple[StuckMessage, ...]
    """In the order of due times."""
    next: bytes
    """Where the next page begins: give it back as ``after``; empty if this was the last one."""

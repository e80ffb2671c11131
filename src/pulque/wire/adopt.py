"""A nack whose broker is away, taken over by another one with the whole message."""

from typing import NamedTuple

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.kinds import I64, U16, Blob
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["Adopt", "Adopted", "Origin"]


class Origin(NamedTuple):
    """Where a message was delivered from."""

    broker_group: str
    partition: PartitionName
    sequence: ConsumeSequence


@packet(Opcode.ADOPT)
class Adopt(Packet):
    """Have this message retried by you, as its own broker is away."""

    group: str
    consumer: str
    reason: str
    """Why it could not be processed, for people."""
    delay_ms: I64
    """How long to wait before the next attempt; -1 leaves it to the group, -2 wants none."""
    attempt: U16
    """Which attempt failed: 1 for the first."""
    origin: Origin
    """Tells whether it was adopted before."""
    batch: Blob
    """The whole message, as a batch of one. Decoded, a copy that may be kept."""


@packet(Opcode.ADOPT)
class Adopted(Response):
    """The answer to ``Adopt``: it is stored, and the origin need not hear of the nack."""

    partition: PartitionName
    """Where the message is now: waiting, to be retried, or among the dead letters."""
    sequence: ConsumeSequence
    is_duplicate: bool
    """It had been adopted before."""

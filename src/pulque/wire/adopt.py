"""A nack whose broker is away, taken over by another one with the whole message."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["Adopt", "Adopted", "Origin"]

_SEQUENCE = Struct("<Q")


class Origin(NamedTuple):
    """Where a message was delivered from."""

    broker_group: str
    partition: PartitionName
    sequence: ConsumeSequence


@dataclass(frozen=True, slots=True)
class Adopt:
    """Have this message retried by you, as its own broker is away."""

    opcode: ClassVar[Opcode] = Opcode.ADOPT
    _form: ClassVar[Struct] = Struct("<qH")

    group: str
    consumer: str
    reason: str
    """Why it could not be processed, for people."""
    delay_ms: int
    """How long to wait before the next attempt; -1 leaves it to the group, -2 wants none."""
    attempt: int
    """Which attempt failed: 1 for the first."""
    origin: Origin
    """Tells whether it was adopted before."""
    batch: bytes | memoryview
    """The whole message, as a batch of one. Decoded, a copy that may be kept."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.consumer)
        to.text(self.reason)
        to.pack(self._form, self.delay_ms, self.attempt)
        to.text(self.origin.broker_group)
        to.text(self.origin.partition)
        to.pack(_SEQUENCE, self.origin.sequence)
        to.blob(self.batch)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, consumer, reason = source.text(), source.text(), source.text()
        delay_ms, attempt = source.unpack(cls._form)
        broker_group, partition = source.text(), PartitionName(source.text())
        (sequence,) = source.unpack(_SEQUENCE)
        origin = Origin(broker_group, partition, sequence)
        return cls(group, consumer, reason, delay_ms, attempt, origin, bytes(source.blob()))


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer to ``Adopt``: it is stored, and the origin need not hear of the nack."""

    opcode: ClassVar[Opcode] = Opcode.ADOPT
    _form: ClassVar[Struct] = Struct("<Q?")

    partition: PartitionName
    """Where the message is now: waiting, to be retried, or among the dead letters."""
    sequence: ConsumeSequence
    is_duplicate: bool
    """It had been adopted before."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.pack(self._form, self.sequence, self.is_duplicate)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(PartitionName(source.text()), *source.unpack(cls._form))

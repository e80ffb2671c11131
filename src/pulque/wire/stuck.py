"""Delayed messages that brokers refuse for good, on the wire: which they are, and why."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.errors import RemoteProtocolError
from pulque.model.ids import ID_SIZE
from pulque.model.names import PartitionName
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["StuckListed", "StuckMessage", "StuckMessages"]


@dataclass(frozen=True, slots=True)
class StuckMessages:
    """Which messages are overdue, as brokers refuse them?"""

    opcode: ClassVar[Opcode] = Opcode.STUCK
    _form: ClassVar[Struct] = Struct("<I")

    subject: str = ""
    """Of this subject only; empty for all."""
    max_rows: int = 100
    """Answer with at most so many, and never with more than ``MAX_LISTED``."""
    after: bytes = b""
    """Where the last page ended, as its answer said; empty for the first."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.max_rows)
        to.text(self.subject)
        to.blob(self.after)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        (max_rows,) = source.unpack(cls._form)
        return cls(source.text(), max_rows, bytes(source.blob()))


class StuckMessage(NamedTuple):
    """A message that was put aside."""

    id: bytes
    """Sixteen bytes."""
    due_ms: int
    partition: PartitionName
    """Where it was to go: its subject, or the retry partition of one group."""
    size: int
    """Bytes of its keys, tags, headers and body."""
    since_ms: int
    """When it was put aside, or another one of its tick for the same reason."""
    reason: str
    """What the broker said."""


@dataclass(frozen=True, slots=True)
class StuckListed:
    """The answer to ``StuckMessages``."""

    opcode: ClassVar[Opcode] = Opcode.STUCK
    _row: ClassVar[Struct] = Struct("<qqI")

    messages: tuple[StuckMessage, ...]
    """In the order of due times."""
    next: bytes
    """Where the next page begins: give it back as ``after``; empty if this was the last one."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.messages))
        for each in self.messages:
            to.blob(each.id)
            to.pack(self._row, each.due_ms, each.since_ms, each.size)
            to.text(each.partition)
            to.text(each.reason)
        to.blob(self.next)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        messages = tuple([cls._read_message(source) for _ in range(source.count())])
        return cls(messages, bytes(source.blob()))

    @classmethod
    def _read_message(cls, source: Reader) -> StuckMessage:
        message_id = bytes(source.blob())
        if len(message_id) != ID_SIZE:
            raise RemoteProtocolError(f"an id of {len(message_id)} bytes; all have {ID_SIZE}")
        due_ms, since_ms, size = source.unpack(cls._row)
        partition = PartitionName(source.text())
        return StuckMessage(message_id, due_ms, partition, size, since_ms, source.text())

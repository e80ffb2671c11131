"""Finding stored messages, on the wire: by key, by id, or by when they were stored."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["ANY_TIME_MS", "FIND_LIMIT", "MAX_FOUND", "Find", "FoundMessage", "FoundMessages"]

FIND_LIMIT = 32
"""How many messages are answered with, unless more are asked for."""
MAX_FOUND = 1000
"""No answer has more of them."""
ANY_TIME_MS = 2**63 - 1
"""As the end of a range of time: it has none."""


@dataclass(frozen=True, slots=True)
class Find:
    """Which messages have this key, or this id, or were stored at that time?"""

    opcode: ClassVar[Opcode] = Opcode.FIND
    _form: ClassVar[Struct] = Struct("<qqIII?")

    subject: str
    """Of this subject; empty for all, if an id is looked for."""
    key: str = ""
    """With this key; empty for any. Messages with another key of the same hash may be among the
    answers: whoever asks compares."""
    id: bytes = b""
    """With this id, sixteen bytes; empty for any. The same holds for it."""
    since_ms: int = 0
    """Stored at or after this instant …"""
    until_ms: int = ANY_TIME_MS
    """… and before this one."""
    max_messages: int = FIND_LIMIT
    """At most so many, and never more than ``MAX_FOUND``."""
    max_bytes: int = 1024 * 1024
    """About so many bytes of them; one is answered with, however large."""
    timeout_ms: int = 1000
    """How long to look; what is found by then is answered with, and where to go on."""
    copies: bool = False
    """Whether retries and dead letters of the subject's groups count, too."""
    after: bytes = b""
    """Where the last answer ended, as it said; empty for the first."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.key)
        to.blob(self.id)
        to.pack(
            self._form,
            self.since_ms,
            self.until_ms,
            self.max_messages,
            self.max_bytes,
            self.timeout_ms,
            self.copies,
        )
        to.blob(self.after)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        subject, key, message_id = source.text(), source.text(), bytes(source.blob())
        since, until, messages, size, timeout, copies = source.unpack(cls._form)
        after = bytes(source.blob())
        return cls(subject, key, message_id, since, until, messages, size, timeout, copies, after)


class FoundMessage(NamedTuple):
    """A message that was found."""

    partition: PartitionName
    sequence: ConsumeSequence
    stored_at_ms: int
    batch: bytes
    """A batch of this message alone, not compressed."""


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """The answer to ``Find``."""

    opcode: ClassVar[Opcode] = Opcode.FIND
    _row: ClassVar[Struct] = Struct("<Qq")

    messages: tuple[FoundMessage, ...]
    """From newer to older ones."""
    next: bytes
    """Where to go on: give it back as ``after``; empty if all was looked at."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.messages))
        for each in self.messages:
            to.text(each.partition)
            to.pack(self._row, each.sequence, each.stored_at_ms)
            to.blob(each.batch)
        to.blob(self.next)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        messages = tuple([cls._read_message(source) for _ in range(source.count())])
        return cls(messages, bytes(source.blob()))

    @classmethod
    def _read_message(cls, source: Reader) -> FoundMessage:
        partition = PartitionName(source.text())
        sequence, stored_at_ms = source.unpack(cls._row)
        return FoundMessage(partition, sequence, stored_at_ms, bytes(source.blob()))

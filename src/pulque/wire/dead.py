"""Dead letters on the wire: which there are, forgetting them, and delivering them again."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from pulque.model.pack import MAX_HEADERS
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["MAX_RESENT", "Dead", "DeadListed", "Resend", "Resent"]

MAX_RESENT = 1000
"""How many dead letters one request may resend."""


@dataclass(frozen=True, slots=True)
class Dead:
    """Which dead letters does a group have, or: forget them."""

    opcode: ClassVar[Opcode] = Opcode.DEAD
    _form: ClassVar[Struct] = Struct("<QQI?")

    subject: str
    group: str
    first: int
    """From this sequence on …"""
    last: int
    """… up to and including this one."""
    max_letters: int
    """Name at most so many of them. Not used by a purge."""
    is_purge: bool = False
    """Whether they are to be forgotten, instead of named."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.group)
        to.pack(self._form, self.first, self.last, self.max_letters, self.is_purge)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), source.text(), *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Resend:
    """Deliver dead letters to their group again, as first attempts."""

    opcode: ClassVar[Opcode] = Opcode.RESEND
    _sequence: ClassVar[Struct] = Struct("<Q")
    _flag: ClassVar[Struct] = Struct("<?")

    subject: str
    group: str
    sequences: tuple[int, ...]
    """Which ones."""
    replaces_body: bool = False
    """Whether the body is a new one; for a single one only."""
    body: bytes = b""
    """In the place of its own."""
    replaces_headers: bool = False
    """Whether the headers are new ones; for a single one only."""
    headers: tuple[tuple[str, str], ...] = ()
    """In the place of its own."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.group)
        to.count(len(self.sequences))
        for sequence in self.sequences:
            to.pack(self._sequence, sequence)
        to.pack(self._flag, self.replaces_body)
        to.blob(self.body)
        to.pack(self._flag, self.replaces_headers)
        to.count(len(self.headers))
        for name, value in self.headers:
            to.text(name)
            to.text(value)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        subject, group = source.text(), source.text()
        count = source.count("dead letters to resend", most=MAX_RESENT, least_size=8)
        sequences = tuple([source.unpack(cls._sequence)[0] for _ in range(count)])
        (replaces_body,) = source.unpack(cls._flag)
        body = bytes(source.blob())
        (replaces_headers,) = source.unpack(cls._flag)
        count = source.count("headers", most=MAX_HEADERS, least_size=4)
        headers = tuple([(source.text(), source.text()) for _ in range(count)])
        return cls(subject, group, sequences, replaces_body, body, replaces_headers, headers)


@dataclass(frozen=True, slots=True)
class DeadListed:
    """The answer to ``Dead``."""

    opcode: ClassVar[Opcode] = Opcode.DEAD
    _form: ClassVar[Struct] = Struct("<QQQ")
    _range: ClassVar[Struct] = Struct("<QI")

    start: ConsumeSequence
    """The oldest dead letter that is stored."""
    end: ConsumeSequence
    """The next dead letter to come."""
    count: int
    """How many of those asked for nobody had dealt with; after a purge, how many are gone."""
    ranges: tuple[tuple[ConsumeSequence, int], ...]
    """The first of them, and how many follow each other from there; empty after a purge."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.start, self.end, self.count)
        to.count(len(self.ranges))
        for each in self.ranges:
            to.pack(self._range, *each)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        start, end, count = source.unpack(cls._form)
        ranges = tuple(source.unpack(cls._range) for _ in range(source.count()))
        return cls(start, end, count, ranges)


@dataclass(frozen=True, slots=True)
class Resent:
    """The answer to ``Resend``: what became of each of them."""

    opcode: ClassVar[Opcode] = Opcode.RESEND
    _sequence: ClassVar[Struct] = Struct("<Q")

    resent: tuple[int, ...]
    """They are in the group's retry partition, on disk."""
    done: tuple[int, ...]
    """They had been resent or purged before."""
    missing: tuple[int, ...]
    """They are not stored any more, or never were."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        for sequences in (self.resent, self.done, self.missing):
            to.count(len(sequences))
            for sequence in sequences:
                to.pack(self._sequence, sequence)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(cls._take(source), cls._take(source), cls._take(source))

    @classmethod
    def _take(cls, source: Reader) -> tuple[int, ...]:
        return tuple(source.unpack(cls._sequence)[0] for _ in range(source.count()))

"""Replication on the wire: how followers copy the logs of their leader, byte for byte."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from pulque.model.leadership import EpochStart
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = [
    "NO_ROOM",
    "CheckpointPart",
    "CopyCheckpoint",
    "Follow",
    "Followed",
    "Replicate",
    "Replicated",
]

_EPOCH = Struct("<IQQ")


NO_ROOM = 3
"""Not 2: a leader that knows only of yes and no sees one that is ready."""


@dataclass(frozen=True, slots=True)
class Follow:
    """I want to copy your logs; this is what I have."""

    opcode: ClassVar[Opcode] = Opcode.FOLLOW
    _form: ClassVar[Struct] = Struct("<IQQ")

    broker_group: str
    name: str
    """The follower's own."""
    directory: str
    """The id of its data directory."""
    epoch: int
    """The epoch that it takes the leader to lead in."""
    message_end: int
    """How far its message log reaches; 0 if it has nothing."""
    action_end: int
    """The same of its action log."""
    epochs: tuple[EpochStart, ...]
    """Where its logs were when each leadership began; the oldest first."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.broker_group)
        to.text(self.name)
        to.text(self.directory)
        to.pack(self._form, self.epoch, self.message_end, self.action_end)
        _write_epochs(self.epochs, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, name, directory = source.text(), source.text(), source.text()
        epoch, messages, actions = source.unpack(cls._form)
        return cls(group, name, directory, epoch, messages, actions, _read_epochs(source))


@dataclass(frozen=True, slots=True)
class Followed:
    """The answer to ``Follow``: where to go on from."""

    opcode: ClassVar[Opcode] = Opcode.FOLLOW
    _form: ClassVar[Struct] = Struct("<I?QQQ")

    epoch: int
    """The epoch that the leader leads in."""
    is_anew: bool
    """Whether the follower has nothing to build on: it empties its logs first."""
    message_end: int
    """Up to here the message logs are the same: what the follower has behind it must go."""
    action_end: int
    """The same of the action logs."""
    checkpoint: int
    """The number of the leader's newest checkpoint; 0 if it has none."""
    epochs: tuple[EpochStart, ...]
    """The leader's; the follower writes them down before it copies anything."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(
            self._form,
            self.epoch,
            self.is_anew,
            self.message_end,
            self.action_end,
            self.checkpoint,
        )
        _write_epochs(self.epochs, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        epoch, is_anew, messages, actions, checkpoint = source.unpack(cls._form)
        return cls(epoch, is_anew, messages, actions, checkpoint, _read_epochs(source))


@dataclass(frozen=True, slots=True)
class Replicate:
    """This is what I have by now; what comes next?"""

    opcode: ClassVar[Opcode] = Opcode.REPLICATE
    _form: ClassVar[Struct] = Struct("<IQQQQBII")

    directory: str
    """The id of the follower's data directory."""
    epoch: int
    """The epoch that it follows in."""
    message_offset: int
    """The next byte of the message log that it wants."""
    action_offset: int
    """The next byte of the action log that it wants."""
    message_synced: int
    """How much of the message log survives a power cut."""
    action_synced: int
    """How much of the action log does."""
    ready: int
    """Whether it could lead, once it has all: 0 for no; 1 for yes, it has a checkpoint to begin
    from; ``NO_ROOM`` for yes, but its disk is full: it would take no messages."""
    max_bytes: int
    """How much to answer with, of each log; one whole record in any case. With 0, nothing."""
    wait_ms: int
    """Answer after this time at the latest, though there is nothing new."""

    @property
    def is_ready(self) -> bool:
        """Whether it could lead, once it has all."""
        return self.ready > 0

    @property
    def has_room(self) -> bool:
        """Whether it would take messages then."""
        return self.ready != NO_ROOM

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.directory)
        to.pack(
            self._form,
            self.epoch,
            self.message_offset,
            self.action_offset,
            self.message_synced,
            self.action_synced,
            self.ready,
            self.max_bytes,
            self.wait_ms,
        )

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Replicated:
    """The answer to ``Replicate``: bytes of both logs, none if there is nothing new.

    Bytes lie within one segment. They may end in the middle of a record; the follower keeps whole
    records and asks for the rest again.
    """

    opcode: ClassVar[Opcode] = Opcode.REPLICATE
    _form: ClassVar[Struct] = Struct("<IQQQQQQQQQ")

    epoch: int
    """The epoch that the leader leads in."""
    message_base: int
    """The segment of the message log that the bytes are of …"""
    message_offset: int
    """… and where they begin. At the base, a new segment begins with them."""
    action_base: int
    """The same for the action log …"""
    action_offset: int
    """… which may begin later than asked for, if the leader's has a hole there."""
    message_end: int
    """How far the leader's message log reaches."""
    confirmed: int
    """Up to here all that are in sync have the message log."""
    message_oldest: int
    """Where the leader's message log begins: segments before it can go."""
    checkpoint: int
    """The number of the leader's newest checkpoint; 0 if it has none."""
    action_end: int
    """How far the leader's action log reaches."""
    messages: bytes | memoryview
    actions: bytes | memoryview

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(
            self._form,
            self.epoch,
            self.message_base,
            self.message_offset,
            self.action_base,
            self.action_offset,
            self.message_end,
            self.confirmed,
            self.message_oldest,
            self.checkpoint,
            self.action_end,
        )
        to.blob(self.messages)
        to.blob(self.actions)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        epoch, base, offset, action_base, action_offset, *rest = source.unpack(cls._form)
        end, confirmed, oldest, checkpoint, action_end = rest
        return cls(
            epoch,
            base,
            offset,
            action_base,
            action_offset,
            end,
            confirmed,
            oldest,
            checkpoint,
            action_end,
            source.blob(),
            source.blob(),
        )


@dataclass(frozen=True, slots=True)
class CopyCheckpoint:
    """Give me a part of your checkpoint, so that I need not replay all from the beginning."""

    opcode: ClassVar[Opcode] = Opcode.COPY_CHECKPOINT
    _form: ClassVar[Struct] = Struct("<QQI")

    number: int
    offset: int
    """Where in it the part begins."""
    max_bytes: int

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.number, self.offset, self.max_bytes)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The answer to ``CopyCheckpoint``."""

    opcode: ClassVar[Opcode] = Opcode.COPY_CHECKPOINT
    _form: ClassVar[Struct] = Struct("<QQ")

    number: int
    """The checkpoint that it is of; 0 if the one asked for is gone."""
    size: int
    """Of the whole checkpoint."""
    data: bytes | memoryview

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.number, self.size)
        to.blob(self.data)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        number, size = source.unpack(cls._form)
        return cls(number, size, source.blob())


def _write_epochs(epochs: tuple[EpochStart, ...], to: Writer) -> None:
    to.count(len(epochs))
    for each in epochs:
        to.pack(_EPOCH, *each)


def _read_epochs(source: Reader) -> tuple[EpochStart, ...]:
    count = source.count("epochs", least_size=_EPOCH.size)
    return tuple(map(EpochStart._make, _EPOCH.iter_unpack(source.take(count * _EPOCH.size))))

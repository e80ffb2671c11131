"""Where groups are, and how they are set to another place."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.groups import FROM_EARLIEST, Mode, Start, StartKind
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Reader, Writer
from pulque.wire.groups import known
from pulque.wire.opcodes import Opcode

__all__ = [
    "GroupConsumer",
    "GroupPosition",
    "Groups",
    "GroupsReport",
    "Reset",
    "ResetDone",
    "ResetRow",
]

UNHEARD = -1
"""As the time for which a consumer was silent: it is gone."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Have a group go on from another place."""

    opcode: ClassVar[Opcode] = Opcode.RESET
    _target: ClassVar[Struct] = Struct("<Bq?")

    group: str
    """A group, or one consumer of a broadcast: ``#consumer``."""
    subject: str
    """A subject, or a pattern."""
    partition: str = ""
    """Only this partition; empty for all of the subject."""
    target: Start = FROM_EARLIEST
    is_dry_run: bool = False
    """Only say what would happen."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.subject)
        to.text(self.partition)
        to.pack(self._target, *self.target, self.is_dry_run)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        names = source.text(), source.text(), source.text()
        kind, value, is_dry_run = source.unpack(cls._target)
        return cls(*names, Start(known(StartKind, kind, "target"), value), is_dry_run)


class ResetRow(NamedTuple):
    """What a reset does in one partition."""

    partition: PartitionName
    position: ConsumeSequence
    """The next message of the group, before the reset …"""
    target: ConsumeSequence
    """… and after it."""
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    held: int
    """How many deliveries are taken from consumers."""


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The answer to ``Reset``: for each partition, what happened or would."""

    opcode: ClassVar[Opcode] = Opcode.RESET
    _row: ClassVar[Struct] = Struct("<QQQQI")

    rows: tuple[ResetRow, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.rows))
        for row in self.rows:
            self.write_row(row, to)

    @classmethod
    def write_row(cls, row: ResetRow, to: Writer) -> None:
        """Append one row, of an answer that is made in steps."""
        to.text(row.partition)
        to.pack(cls._row, *row[1:])

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(
            tuple(
                ResetRow(PartitionName(source.text()), *source.unpack(cls._row))
                for _ in range(source.count())
            )
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """Where are the groups?"""

    opcode: ClassVar[Opcode] = Opcode.GROUPS

    subject: str = ""
    """Only those of this subject or pattern; empty for all."""
    group: str = ""
    """Only this one; empty for all."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.group)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), source.text())


class GroupConsumer(NamedTuple):
    """One consumer of a group, in one partition."""

    consumer: ConsumerId
    held: int
    """How many deliveries it has not settled."""
    silent_ms: int
    """For how long nothing was heard of it; -1 if it is gone."""


class GroupPosition(NamedTuple):
    """One group in one partition."""

    partition: PartitionName
    group: Group
    mode: Mode
    next_sequence: ConsumeSequence
    """The next message that nobody of the group was handed."""
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    pending: int
    """How many messages are on their way to be retried."""
    consumers: tuple[GroupConsumer, ...]

    @property
    def held(self) -> int:
        """How many deliveries its consumers have not settled."""
        return sum(each.held for each in self.consumers)

    @property
    def lag(self) -> int:
        """How many messages are stored and not settled."""
        return max(self.end - max(self.next_sequence, self.start), 0) + self.held + self.pending


@dataclass(frozen=True, slots=True)
class GroupsReport:
    """The answer to ``Groups``."""

    opcode: ClassVar[Opcode] = Opcode.GROUPS
    _position: ClassVar[Struct] = Struct("<BQQQI")
    _consumer: ClassVar[Struct] = Struct("<Iq")
    _cut: ClassVar[Struct] = Struct("<?")

    positions: tuple[GroupPosition, ...]
    is_cut: bool = False
    """There are more: ask for fewer."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.positions))
        for each in self.positions:
            self.write_position(each, to)
        to.pack(self._cut, self.is_cut)

    @classmethod
    def write_position(cls, each: GroupPosition, to: Writer) -> None:
        """Append one position, of an answer that is made in steps."""
        to.text(each.partition)
        to.text(each.group)
        numbers = (each.next_sequence, each.start, each.end, each.pending)
        to.pack(cls._position, each.mode, *numbers)
        to.count(len(each.consumers))
        for consumer in each.consumers:
            to.text(consumer.consumer)
            to.pack(cls._consumer, consumer.held, consumer.silent_ms)

    @classmethod
    def write_end(cls, to: Writer, *, is_cut: bool) -> None:
        """Append what follows the positions, of an answer that is made in steps."""
        to.pack(cls._cut, is_cut)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        positions = tuple([cls._read_position(source) for _ in range(source.count())])
        return cls(positions, *source.unpack(cls._cut))

    @classmethod
    def _read_position(cls, source: Reader) -> GroupPosition:
        partition, group = PartitionName(source.text()), Group(source.text())
        mode, next_sequence, start, end, pending = source.unpack(cls._position)
        consumers = tuple(
            GroupConsumer(ConsumerId(source.text()), *source.unpack(cls._consumer))
            for _ in range(source.count())
        )
        return GroupPosition(
            partition,
            group,
            known(Mode, mode, "mode"),
            next_sequence,
            start,
            end,
            pending,
            consumers,
        )

"""Where groups are, and how they are set to another place."""

from struct import Struct
from typing import Annotated, NamedTuple

from pulque.model.groups import FROM_EARLIEST, Mode, Start, StartKind
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Writer
from pulque.wire.kinds import I64, U32, Field, FieldsOf, choice, kind_of
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, coder_of, packet

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
_CUT = Struct("<?")
TARGET = FieldsOf(
    Start, (Field("kind", choice(StartKind, "target")), Field("value", kind_of(I64)))
)


@packet(Opcode.RESET)
class Reset(Packet):
    """Have a group go on from another place."""

    group: str
    """A group, or one consumer of a broadcast: ``#consumer``."""
    subject: str
    """A subject, or a pattern."""
    partition: str = ""
    """Only this partition; empty for all of the subject."""
    target: Annotated[Start, TARGET] = FROM_EARLIEST
    is_dry_run: bool = False
    """Only say what would happen."""


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
    held: U32
    """How many deliveries are taken from consumers."""


@packet(Opcode.RESET)
class ResetDone(Response):
    """The answer to ``Reset``: for each partition, what happened or would."""

    rows: tuple[ResetRow, ...]

    write_row = staticmethod(coder_of(kind_of(ResetRow)).write)
    """Appends one row, of an answer that is made in steps."""


@packet(Opcode.GROUPS)
class Groups(Packet):
    """Where are the groups?"""

    subject: str = ""
    """Only those of this subject or pattern; empty for all."""
    group: str = ""
    """Only this one; empty for all."""


class GroupConsumer(NamedTuple):
    """One consumer of a group, in one partition."""

    consumer: ConsumerId
    held: U32
    """How many deliveries it has not settled."""
    silent_ms: I64
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
    pending: U32
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


@packet(Opcode.GROUPS)
class GroupsReport(Response):
    """The answer to ``Groups``."""

    positions: tuple[GroupPosition, ...]
    is_cut: bool = False
    """There are more: ask for fewer."""

    write_position = staticmethod(coder_of(kind_of(GroupPosition)).write)
    """Appends one position, of an answer that is made in steps."""

    @staticmethod
    def write_end(to: Writer, *, is_cut: bool) -> None:
        """Append what follows the positions, of an answer that is made in steps."""
        to.pack(_CUT, is_cut)

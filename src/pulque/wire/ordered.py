"""Order on the wire: which partitions are a consumer's, and the locks that make them its own."""

from typing import NamedTuple

from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.model.positions import ConsumeSequence
from pulque.wire.kinds import I64, U16, U32, U64, describe, row
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = [
    "NOT_STUCK",
    "NO_TOKEN",
    "Attend",
    "Attended",
    "Close",
    "Closed",
    "Lock",
    "Locked",
    "Ordered",
    "OrderedReport",
    "OrderedRow",
    "Skip",
    "Skipped",
    "Unlock",
    "Unlocked",
]

NO_TOKEN = 0
"""As a token: there is none. Those that are granted begin with 1."""
NOT_STUCK = 0
"""As the instant since when a group waits for a message: it waits for none."""
describe(Allotted, broker_group=str, partition=PartitionName, host=str, port=U16)


@packet(Opcode.ATTEND, first="consumer subject group")
class Attend(Packet):
    """I consume this subject in order: tell me which partitions are mine, and when that changes.

    It is the consumer's heartbeat, too. Asked at home: meta servers answer, brokers relay it to
    them, and a lone broker answers for itself.
    """

    consumer: str
    incarnation: U64
    """Which run of this consumer; a higher one fences the lower."""
    subject: str
    """A subject; patterns are not consumed in order."""
    group: str
    is_online: bool = True
    """False if it stops: its partitions go to others at once."""
    version: U64 = 0
    """Of the answer that it has; 0 for none."""
    wait_ms: U32 = 0
    """Answer after this time at the latest, and at once if the answer differs."""


@packet(Opcode.ATTEND)
class Attended(Response):
    """The answer to ``Attend``."""

    strategy: ConsumeStrategy
    """Only if it is exclusive may the consumer count on order."""
    order: OrderStrategy
    version: U64
    """Differs when anything of this answer does; of every server the same."""
    authorised_ms: U32
    """How long the consumer may go on, counted from when it sent the request."""
    heartbeat_ms: U32
    """How long to wait for an answer at most, so as not to be silent for too long."""
    partitions: tuple[Allotted, ...]
    """What is the consumer's alone; nothing, if there are more consumers than partitions."""


@packet(Opcode.LOCK)
class Lock(Packet):
    """Let me be the only one of my group to pull from this partition, or go on being it."""

    partition: str
    group: str
    consumer: str
    incarnation: U64
    order: OrderStrategy
    """What the meta server said: under the strict one, nothing that failed is retried later."""
    token: U64 = NO_TOKEN
    """The token that the consumer has: if it is the newest one, it stays, for a whole time."""
    wait_ms: U32 = 0
    """How long to wait for another consumer to give it up."""


@packet(Opcode.LOCK)
class Locked(Response):
    """The answer to ``Lock``; a token that is new is on disk."""

    token: U64
    """To be given with every pull and every settle; grows with every grant. 0 if another consumer
    has the lock."""
    lock_ms: U32
    """How long it lasts after each pull, settle or ``Lock``; if another has it, how long it may
    still be so."""
    holder: str = ""
    """Who has it, if it is another."""


@packet(Opcode.UNLOCK)
class Unlock(Packet):
    """I am done with this partition: what I did not settle is the next consumer's."""

    partition: str
    group: str
    consumer: str
    incarnation: U64
    token: U64


@packet(Opcode.UNLOCK)
class Unlocked(Response):
    """The answer to ``Unlock``."""

    was_held: bool
    """Whether the token was the newest; if not, there was nothing to give up."""


@packet(Opcode.SKIP, first="partition group reason")
class Skip(Packet):
    """Give up the message that an ordered group waits for: it becomes a dead letter."""

    partition: str
    group: str
    sequence: U64
    """Its consume sequence; it must be the first one that is not settled."""
    reason: str = ""
    """Why, for people."""


@packet(Opcode.SKIP)
class Skipped(Response):
    """The answer to ``Skip``: it is on disk that the group goes on with the next one."""

    next_sequence: U64


@packet(Opcode.ORDERED)
class Ordered(Packet):
    """How far are the ordered groups of a subject?"""

    subject: str
    group: str = ""
    """Only this one, also in partitions where it never was; empty for all."""


@row(first="partition group holder")
class OrderedRow(NamedTuple):
    """One ordered group in one partition."""

    partition: PartitionName
    group: Group
    is_closed: bool
    """The partition takes no sends any more: it was split or merged."""
    settled: ConsumeSequence
    """The first message that is not settled."""
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    held: U32
    """How many deliveries the holder has not settled."""
    token: U64
    """Of the newest lock; 0 if there never was one."""
    holder: ConsumerId
    """Who has the lock; empty if nobody."""
    left_ms: U32
    """How long it has it, if nothing more is heard of it."""
    stuck_since_ms: I64
    """Since when the first unsettled message is that; 0 if none was handed out."""

    @property
    def is_drained(self) -> bool:
        """Whether there is nothing left, and nothing to come."""
        return self.is_closed and self.settled >= self.end


@packet(Opcode.ORDERED)
class OrderedReport(Response):
    """The answer to ``Ordered``."""

    rows: tuple[OrderedRow, ...]


@packet(Opcode.CLOSE)
class Close(Packet):
    """Take no more sends to this partition: others take its order keys from now on."""

    partition: str


@packet(Opcode.CLOSE)
class Closed(Response):
    """The answer to ``Close``: it is on disk that nothing follows."""

    end: U64
    """The consume sequence after the last message."""

"""Order on the wire: which partitions are a consumer's, and the locks that make them its own."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.model.positions import ConsumeSequence
from pulque.wire.codec import Reader, Writer
from pulque.wire.groups import known
from pulque.wire.opcodes import Opcode

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


@dataclass(frozen=True, slots=True)
class Attend:
    """I consume this subject in order: tell me which partitions are mine, and when that changes.

    It is the consumer's heartbeat, too. Asked at home: meta servers answer, brokers relay it to
    them, and a lone broker answers for itself.
    """

    opcode: ClassVar[Opcode] = Opcode.ATTEND
    _form: ClassVar[Struct] = Struct("<Q?QI")

    consumer: str
    incarnation: int
    """Which run of this consumer; a higher one fences the lower."""
    subject: str
    """A subject; patterns are not consumed in order."""
    group: str
    is_online: bool = True
    """False if it stops: its partitions go to others at once."""
    version: int = 0
    """Of the answer that it has; 0 for none."""
    wait_ms: int = 0
    """Answer after this time at the latest, and at once if the answer differs."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.consumer)
        to.text(self.subject)
        to.text(self.group)
        to.pack(self._form, self.incarnation, self.is_online, self.version, self.wait_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        consumer, subject, group = source.text(), source.text(), source.text()
        incarnation, is_online, version, wait_ms = source.unpack(cls._form)
        return cls(consumer, incarnation, subject, group, is_online, version, wait_ms)


@dataclass(frozen=True, slots=True)
class Attended:
    """The answer to ``Attend``."""

    opcode: ClassVar[Opcode] = Opcode.ATTEND
    _form: ClassVar[Struct] = Struct("<BBQII")
    _port: ClassVar[Struct] = Struct("<H")

    strategy: ConsumeStrategy
    """Only if it is exclusive may the consumer count on order."""
    order: OrderStrategy
    version: int
    """Differs when anything of this answer does; of every server the same."""
    authorised_ms: int
    """How long the consumer may go on, counted from when it sent the request."""
    heartbeat_ms: int
    """How long to wait for an answer at most, so as not to be silent for too long."""
    partitions: tuple[Allotted, ...]
    """What is the consumer's alone; nothing, if there are more consumers than partitions."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(
            self._form,
            self.strategy,
            self.order,
            self.version,
            self.authorised_ms,
            self.heartbeat_ms,
        )
        to.count(len(self.partitions))
        for each in self.partitions:
            to.text(each.broker_group)
            to.text(each.partition)
            to.text(each.host)
            to.pack(self._port, each.port)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        strategy, order, version, authorised_ms, heartbeat_ms = source.unpack(cls._form)
        partitions = tuple([cls._take_partition(source) for _ in range(source.count())])
        return cls(
            known(ConsumeStrategy, strategy, "strategy of consumption"),
            known(OrderStrategy, order, "strategy of order"),
            version,
            authorised_ms,
            heartbeat_ms,
            partitions,
        )

    @classmethod
    def _take_partition(cls, source: Reader) -> Allotted:
        broker_group, partition, host = source.text(), source.text(), source.text()
        return Allotted(broker_group, PartitionName(partition), host, *source.unpack(cls._port))


@dataclass(frozen=True, slots=True)
class Lock:
    """Let me be the only one of my group to pull from this partition, or go on being it."""

    opcode: ClassVar[Opcode] = Opcode.LOCK
    _form: ClassVar[Struct] = Struct("<QBQI")

    partition: str
    group: str
    consumer: str
    incarnation: int
    order: OrderStrategy
    """What the meta server said: under the strict one, nothing that failed is retried later."""
    token: int = NO_TOKEN
    """The token that the consumer has: if it is the newest one, it stays, for a whole time."""
    wait_ms: int = 0
    """How long to wait for another consumer to give it up."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.text(self.group)
        to.text(self.consumer)
        to.pack(self._form, self.incarnation, self.order, self.token, self.wait_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        partition, group, consumer = source.text(), source.text(), source.text()
        incarnation, order, token, wait_ms = source.unpack(cls._form)
        found = known(OrderStrategy, order, "strategy of order")
        return cls(partition, group, consumer, incarnation, found, token, wait_ms)


@dataclass(frozen=True, slots=True)
class Locked:
    """The answer to ``Lock``; a token that is new is on disk."""

    opcode: ClassVar[Opcode] = Opcode.LOCK
    _form: ClassVar[Struct] = Struct("<QI")

    token: int
    """To be given with every pull and every settle; grows with every grant. 0 if another consumer
    has the lock."""
    lock_ms: int
    """How long it lasts after each pull, settle or ``Lock``; if another has it, how long it may
    still be so."""
    holder: str = ""
    """Who has it, if it is another."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.token, self.lock_ms)
        to.text(self.holder)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        token, lock_ms = source.unpack(cls._form)
        return cls(token, lock_ms, source.text())


@dataclass(frozen=True, slots=True)
class Unlock:
    """I am done with this partition: what I did not settle is the next consumer's."""

    opcode: ClassVar[Opcode] = Opcode.UNLOCK
    _form: ClassVar[Struct] = Struct("<QQ")

    partition: str
    group: str
    consumer: str
    incarnation: int
    token: int

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.text(self.group)
        to.text(self.consumer)
        to.pack(self._form, self.incarnation, self.token)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        partition, group, consumer = source.text(), source.text(), source.text()
        return cls(partition, group, consumer, *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Unlocked:
    """The answer to ``Unlock``."""

    opcode: ClassVar[Opcode] = Opcode.UNLOCK
    _form: ClassVar[Struct] = Struct("<?")

    was_held: bool
    """Whether the token was the newest; if not, there was nothing to give up."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.was_held)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Skip:
    """Give up the message that an ordered group waits for: it becomes a dead letter."""

    opcode: ClassVar[Opcode] = Opcode.SKIP
    _form: ClassVar[Struct] = Struct("<Q")

    partition: str
    group: str
    sequence: int
    """Its consume sequence; it must be the first one that is not settled."""
    reason: str = ""
    """Why, for people."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.text(self.group)
        to.text(self.reason)
        to.pack(self._form, self.sequence)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        partition, group, reason = source.text(), source.text(), source.text()
        (sequence,) = source.unpack(cls._form)
        return cls(partition, group, sequence, reason)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The answer to ``Skip``: it is on disk that the group goes on with the next one."""

    opcode: ClassVar[Opcode] = Opcode.SKIP
    _form: ClassVar[Struct] = Struct("<Q")

    next_sequence: int

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.next_sequence)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Ordered:
    """How far are the ordered groups of a subject?"""

    opcode: ClassVar[Opcode] = Opcode.ORDERED

    subject: str
    group: str = ""
    """Only this one, also in partitions where it never was; empty for all."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.group)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), source.text())


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
    held: int
    """How many deliveries the holder has not settled."""
    token: int
    """Of the newest lock; 0 if there never was one."""
    holder: ConsumerId
    """Who has the lock; empty if nobody."""
    left_ms: int
    """How long it has it, if nothing more is heard of it."""
    stuck_since_ms: int
    """Since when the first unsettled message is that; 0 if none was handed out."""

    @property
    def is_drained(self) -> bool:
        """Whether there is nothing left, and nothing to come."""
        return self.is_closed and self.settled >= self.end


@dataclass(frozen=True, slots=True)
class OrderedReport:
    """The answer to ``Ordered``."""

    opcode: ClassVar[Opcode] = Opcode.ORDERED
    _row: ClassVar[Struct] = Struct("<?QQQIQIq")

    rows: tuple[OrderedRow, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.rows))
        for row in self.rows:
            to.text(row.partition)
            to.text(row.group)
            to.text(row.holder)
            numbers = (row.is_closed, row.settled, row.start, row.end, row.held, row.token)
            to.pack(self._row, *numbers, row.left_ms, row.stuck_since_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(tuple([cls._take_row(source) for _ in range(source.count())]))

    @classmethod
    def _take_row(cls, source: Reader) -> OrderedRow:
        partition, group = PartitionName(source.text()), Group(source.text())
        holder = ConsumerId(source.text())
        is_closed, settled, start, end, held, token, left_ms, since_ms = source.unpack(cls._row)
        return OrderedRow(
            partition,
            group,
            is_closed,
            settled,
            start,
            end,
            held,
            token,
            holder,
            left_ms,
            since_ms,
        )


@dataclass(frozen=True, slots=True)
class Close:
    """Take no more sends to this partition: others take its order keys from now on."""

    opcode: ClassVar[Opcode] = Opcode.CLOSE

    partition: str

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text())


@dataclass(frozen=True, slots=True)
class Closed:
    """The answer to ``Close``: it is on disk that nothing follows."""

    opcode: ClassVar[Opcode] = Opcode.CLOSE
    _form: ClassVar[Struct] = Struct("<Q")

    end: int
    """The consume sequence after the last message."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.end)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))

"""What a client may ask: one class per opcode, each field explained.

``encode`` gives the buffers of a whole frame, so that a large batch is handed to the socket as
it is and never copied. ``decode_request`` is its inverse.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import ClassVar, NamedTuple, Self, get_args

from pulque.errors import RemoteProtocolError, UnsupportedError
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.wire.adopt import Adopt
from pulque.wire.clients import Clients
from pulque.wire.codec import Reader, Writer
from pulque.wire.dead import Dead, Resend
from pulque.wire.delay import Cancel, Reschedule, Scheduled
from pulque.wire.find import Find
from pulque.wire.frame import Frame, pack_frame_header
from pulque.wire.groups import ChangeGroup, Subscribe, Subscriptions
from pulque.wire.leadership import ChangeInSync, HandOver, Lead
from pulque.wire.opcodes import Opcode
from pulque.wire.ordered import NO_TOKEN, Attend, Close, Lock, Ordered, Skip, Unlock
from pulque.wire.registration import Register
from pulque.wire.replication import CopyCheckpoint, Follow, Replicate
from pulque.wire.resets import Groups, Reset
from pulque.wire.routes import MAX_WATCHED, Route, Watch
from pulque.wire.stuck import StuckMessages

__all__ = [
    "EARLIEST",
    "FROM_SETTLED",
    "LATEST",
    "MAX_BATCHES",
    "MAX_COVERS",
    "MAX_NACKED",
    "MAX_WANTED",
    "Acks",
    "Adopt",
    "Attend",
    "Cancel",
    "ChangeGroup",
    "ChangeInSync",
    "Clients",
    "Close",
    "CopyCheckpoint",
    "Dead",
    "Find",
    "Follow",
    "Groups",
    "HandOver",
    "Heartbeat",
    "Hello",
    "Lead",
    "Lock",
    "Nacked",
    "Opcode",
    "Ordered",
    "Positions",
    "Pull",
    "Read",
    "Register",
    "Replicate",
    "Request",
    "Reschedule",
    "Resend",
    "Reset",
    "Route",
    "Scheduled",
    "Seal",
    "Send",
    "Settle",
    "Skip",
    "Status",
    "StuckMessages",
    "Subscribe",
    "Subscriptions",
    "Unlock",
    "Wanted",
    "Watch",
    "decode_request",
    "encode_request",
]

EARLIEST = -2
"""As the start of a new group: the oldest message that is stored."""
LATEST = -1
"""As the start of a new group: the next message to come."""
FROM_SETTLED = -1
"""As the expected pull sequence: whatever follows what I settled."""
NO_TIME = -1
"""As an instant: not asked for."""
MAX_BATCHES = 1024
"""How many batches one send may have."""
MAX_WANTED = 10_000
"""How many partitions one pull may name."""
MAX_COVERS = 1000
"""How many subjects and patterns one pull may cover."""
MAX_NACKED = 10_000
"""How many nacked deliveries one settle may have."""


class Acks(IntEnum):
    """How durable a send must be before it is answered."""

    MEMORY = 0
    DISK = 1
    REPLICA = 2


_ACKS = tuple(Acks)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame on every connection: who is there and what it understands."""

    opcode: ClassVar[Opcode] = Opcode.HELLO
    _form: ClassVar[Struct] = Struct("<BB")

    min_version: int
    """The oldest protocol version that the client speaks."""
    max_version: int
    """The newest one; the broker answers with the newest that both know."""
    client: str
    """What the client calls itself, for logs."""
    mechanism: str = ""
    """How it proves who it is; empty for not at all."""
    credentials: bytes = b""
    """The first message of that proof."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.min_version, self.max_version)
        to.text(self.client)
        to.text(self.mechanism)
        to.blob(self.credentials)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        oldest, newest = source.unpack(cls._form)
        return cls(oldest, newest, source.text(), source.text(), bytes(source.blob()))


@dataclass(frozen=True, slots=True)
class Send:
    """Store these batches, each in its partition; each gets an outcome of its own."""

    opcode: ClassVar[Opcode] = Opcode.SEND
    _form: ClassVar[Struct] = Struct("<BI")
    _head: ClassVar[Struct] = Struct("<BIH")

    acks: Acks
    """How durable they must be before the answer."""
    timeout_ms: int
    """How long the answer may take; work not begun by then is not begun."""
    batches: tuple[tuple[str, bytes | memoryview], ...]
    """Partition name and batch. Decoded, a batch is a copy that may be kept."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.acks, self.timeout_ms)
        to.count(len(self.batches))
        to.named_blobs(self.batches)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        acks, timeout_ms, count = source.unpack(cls._head)
        if acks >= len(_ACKS):
            raise UnsupportedError(
                f"acks {acks} is unknown; 0 (memory), 1 (disk) and 2 (replica) are known"
            )
        source.check_count(count, "batches in a send", most=MAX_BATCHES, least_size=6)
        return cls(_ACKS[acks], timeout_ms, tuple(source.named_blobs(count)))


class Wanted(NamedTuple):
    """One partition of a pull."""

    partition: str
    expected: int
    """The pull sequence that this consumer wants next, or ``FROM_SETTLED``."""
    token: int = NO_TOKEN
    """Of the lock, where the group is an ordered one."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Hand me messages: first what I hold already from the expected sequence on, then new ones."""

    opcode: ClassVar[Opcode] = Opcode.PULL
    _form: ClassVar[Struct] = Struct("<QIIIq")
    _expected: ClassVar[Struct] = Struct("<qQ")
    _version: ClassVar[Struct] = Struct("<I")

    group: str
    consumer: str
    incarnation: int
    """Which run of this consumer; a higher one fences the lower."""
    max_messages: int
    """Return at once when there are this many …"""
    max_bytes: int
    """… or about this many bytes (a single larger message is still returned) …"""
    timeout_ms: int
    """… and with what there is, at the latest after this time."""
    start_at: int
    """Where a new group starts: a consume sequence, ``EARLIEST`` or ``LATEST``."""
    wanted: tuple[Wanted, ...]
    """The partitions; higher priorities come first, and those of one in the order given."""
    covers: tuple[str, ...] = ()
    """The subjects and patterns that they are all known partitions of."""
    routes_version: int = 0
    """The version of the route that they come from; newer ones are told of at once."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(
            self._form,
            self.incarnation,
            self.max_messages,
            self.max_bytes,
            self.timeout_ms,
            self.start_at,
        )
        to.text(self.group)
        to.text(self.consumer)
        to.count(len(self.wanted))
        for wanted in self.wanted:
            to.text(wanted.partition)
            to.pack(self._expected, wanted.expected, wanted.token)
        to.count(len(self.covers))
        for pattern in self.covers:
            to.text(pattern)
        to.pack(self._version, self.routes_version)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        incarnation, messages, size, timeout_ms, start_at = source.unpack(cls._form)
        group, consumer = source.text(), source.text()
        count = source.count("partitions in a pull", most=MAX_WANTED, least_size=18)
        wanted = tuple(map(Wanted._make, source.named_numbers(count, cls._expected)))
        count = source.count(
            "subjects and patterns that a pull covers", most=MAX_COVERS, least_size=2
        )
        covers = tuple([source.text() for _ in range(count)])
        (version,) = source.unpack(cls._version)
        return cls(
            group,
            consumer,
            incarnation,
            messages,
            size,
            timeout_ms,
            start_at,
            wanted,
            covers,
            version,
        )


class Nacked(NamedTuple):
    """One delivery of a settled range that could not be processed."""

    sequence: int
    """Its pull sequence."""
    delay_ms: int
    """How long to wait before the next attempt; -1 leaves it to the group, -2 wants none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """I am done with deliveries ``first..last``, both included, except for the nacked ones."""

    opcode: ClassVar[Opcode] = Opcode.SETTLE
    _form: ClassVar[Struct] = Struct("<QIIQQQ")
    _nacked: ClassVar[Struct] = Struct("<Qq")

    partition: str
    group: str
    consumer: str
    incarnation: int
    tenure: Tenure
    """Under which epoch and start the deliveries were handed out."""
    first: int
    """Must follow what is settled; lower is a repetition, higher is refused."""
    last: int
    nacked: tuple[Nacked, ...] = ()
    """In ascending order, all within ``first..last``."""
    token: int = NO_TOKEN
    """Of the lock, where the group is an ordered one."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.text(self.group)
        to.text(self.consumer)
        to.pack(self._form, self.incarnation, *self.tenure, self.first, self.last, self.token)
        to.count(len(self.nacked))
        for nacked in self.nacked:
            to.pack(self._nacked, nacked.sequence, nacked.delay_ms)
            to.text(nacked.reason)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        partition, group, consumer = source.text(), source.text(), source.text()
        incarnation, epoch, start, first, last, token = source.unpack(cls._form)
        tenure = Tenure(Epoch(epoch), StartCount(start))
        count = source.count("nacked deliveries in a settle", most=MAX_NACKED, least_size=18)
        nacked = tuple(map(Nacked._make, source.numbers_named(count, cls._nacked)))
        return cls(partition, group, consumer, incarnation, tenure, first, last, nacked, token)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """This consumer lives, or is leaving and hands back what it holds."""

    opcode: ClassVar[Opcode] = Opcode.HEARTBEAT
    _form: ClassVar[Struct] = Struct("<Q?")

    group: str
    consumer: str
    incarnation: int
    is_leaving: bool = False

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.consumer)
        to.pack(self._form, self.incarnation, self.is_leaving)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, consumer = source.text(), source.text()
        return cls(group, consumer, *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Read:
    """Show me messages of a partition from a sequence on, without a group and without effect."""

    opcode: ClassVar[Opcode] = Opcode.READ
    _form: ClassVar[Struct] = Struct("<QIII")

    partition: str
    sequence: int
    max_messages: int
    max_bytes: int
    timeout_ms: int

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.pack(self._form, self.sequence, self.max_messages, self.max_bytes, self.timeout_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Positions:
    """Where does a partition begin and end, and what was the first message at an instant?"""

    opcode: ClassVar[Opcode] = Opcode.POSITIONS
    _form: ClassVar[Struct] = Struct("<q")

    partition: str
    at_ms: int = NO_TIME
    """Looks for the first message stored at or after this instant."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.partition)
        to.pack(self._form, self.at_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Status:
    """How is the broker doing?"""

    opcode: ClassVar[Opcode] = Opcode.STATUS

    def write(self, to: Writer) -> None:
        """There are no fields."""

    @classmethod
    def read(cls, source: Reader) -> Self:
        """There are no fields."""
        return cls()


@dataclass(frozen=True, slots=True)
class Seal:
    """Close the open segment of the message log, so that it can be archived."""

    opcode: ClassVar[Opcode] = Opcode.SEAL

    def write(self, to: Writer) -> None:
        """There are no fields."""

    @classmethod
    def read(cls, source: Reader) -> Self:
        """There are no fields."""
        return cls()


Request = (
    Hello
    | Route
    | Send
    | Pull
    | Settle
    | Heartbeat
    | Read
    | Positions
    | Subscribe
    | Register
    | Watch
    | Adopt
    | Attend
    | Lock
    | Unlock
    | Skip
    | Ordered
    | Close
    | Status
    | Seal
    | Reset
    | Groups
    | ChangeGroup
    | Subscriptions
    | Clients
    | Dead
    | Resend
    | Cancel
    | Reschedule
    | Scheduled
    | StuckMessages
    | Find
    | Lead
    | ChangeInSync
    | Follow
    | Replicate
    | CopyCheckpoint
    | HandOver
)
_KINDS: dict[int, type[Request]] = {kind.opcode: kind for kind in get_args(Request)}
VERSION = 1
"""The version of every request so far."""


def encode_request(request: Request, request_id: int, epoch: int) -> list[bytes | memoryview]:
    """Return the buffers of a frame that asks ``request``."""
    payload = Writer()
    request.write(payload)
    header = pack_frame_header(request.opcode, VERSION, payload.size(), request_id, epoch)
    return [header, *payload.parts]


def decode_request(frame: Frame, *, max_watched: int = MAX_WATCHED) -> Request:
    """Return what a frame asks.

    Args:
        frame: Of any opcode.
        max_watched: How many routes one watch may name.

    Raises:
        InvalidRequestError: A list in it is longer than allowed; the connection may go on.
        UnsupportedError: The opcode or its version is unknown; the connection may go on.
        RemoteProtocolError: The payload is not what the opcode calls for.
    """
    kind = _KINDS.get(frame.opcode)
    if kind is None:
        known = ", ".join(f"{code.value} {code.name.lower()}" for code in Opcode)
        raise UnsupportedError(f"opcode {frame.opcode} is unknown; known are {known}")
    if frame.version != VERSION:
        raise UnsupportedError(
            f"version {frame.version} of {kind.__name__} is unknown; known is {VERSION}"
        )
    reader = Reader(frame.payload)
    try:
        request = (
            Watch.read(reader, max_watched=max_watched) if kind is Watch else kind.read(reader)
        )
    except ValueError as problem:
        raise RemoteProtocolError(f"{kind.__name__} cannot be read: {problem}") from None
    reader.end()
    return request

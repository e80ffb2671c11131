"""What a client may ask: one class per opcode, each field explained.

``encode`` gives the buffers of a whole frame, so that a large batch is handed to the socket as
it is and never copied. ``decode_request`` is its inverse.
"""

from enum import IntEnum
from struct import Struct
from typing import Annotated, NamedTuple, Self, get_args

from pulque.errors import RemoteProtocolError, UnsupportedError
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.wire.adopt import Adopt
from pulque.wire.clients import Clients
from pulque.wire.codec import LimitedReader, Reader, Writer
from pulque.wire.dead import Dead, Resend
from pulque.wire.delay import Cancel, Reschedule, Scheduled
from pulque.wire.find import Find
from pulque.wire.frame import Frame, pack_frame_header
from pulque.wire.groups import ChangeGroup, Subscribe, Subscriptions
from pulque.wire.kinds import I64, U8, U32, U64, Blob, many
from pulque.wire.leadership import ChangeInSync, HandOver, Lead
from pulque.wire.opcodes import Opcode
from pulque.wire.ordered import NO_TOKEN, Attend, Close, Lock, Ordered, Skip, Unlock
from pulque.wire.packet import Packet, packet
from pulque.wire.registration import Register
from pulque.wire.replication import CopyCheckpoint, Follow, Replicate
from pulque.wire.resets import Groups, Reset
from pulque.wire.routes import MAX_WATCHED, WATCHED, Route, Watch
from pulque.wire.stuck import StuckMessages
from pulque.wire.versions import OLDEST

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


# ``Send``, ``Pull`` and ``Settle`` are written and read by hand: by their declarations, 1.1 to 1.4
# times as long. A test compares both ways.
_ACKS = tuple(Acks)
_SEND = Struct("<BI")
_SEND_HEAD = Struct("<BIH")
_PULL = Struct("<QIIIq")
_WANTED = Struct("<qQ")
_ROUTES = Struct("<I")
_SETTLE = Struct("<QIIQQQ")
_NACKED = Struct("<Qq")


@packet(Opcode.HELLO)
class Hello(Packet):
    """The first frame on every connection: who is there and what it understands."""

    min_version: U8
    """The oldest protocol version that the client speaks."""
    max_version: U8
    """The newest one; the broker answers with the newest that both know."""
    client: str
    """What the client calls itself, for logs."""
    mechanism: str = ""
    """How it proves who it is; empty for not at all."""
    credentials: bytes = b""
    """The first message of that proof."""


@packet(Opcode.SEND)
class Send(Packet):
    """Store these batches, each in its partition; each gets an outcome of its own."""

    acks: Acks
    """How durable they must be before the answer."""
    timeout_ms: U32
    """How long the answer may take; work not begun by then is not begun."""
    batches: Annotated[
        tuple[tuple[str, Blob], ...],
        many("batches in a send", most=MAX_BATCHES, each="partition batch"),
    ]
    """Partition name and batch. Decoded, a batch is a copy that may be kept."""

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields."""
        to.pack(_SEND, self.acks, self.timeout_ms)
        to.count(len(self.batches))
        to.named_blobs(self.batches)

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields."""
        acks, timeout_ms, count = source.unpack(_SEND_HEAD)
        if acks >= len(_ACKS):
            raise UnsupportedError(
                f"acks {acks} is unknown; 0 (memory), 1 (disk) and 2 (replica) are known"
            )
        source.check_count(count, "batches in a send", most=MAX_BATCHES, least_size=6)
        return cls(_ACKS[acks], timeout_ms, tuple(source.named_blobs(count)))


class Wanted(NamedTuple):
    """One partition of a pull."""

    partition: str
    expected: I64
    """The pull sequence that this consumer wants next, or ``FROM_SETTLED``."""
    token: U64 = NO_TOKEN
    """Of the lock, where the group is an ordered one."""


@packet(Opcode.PULL, first="incarnation max_messages max_bytes timeout_ms start_at")
class Pull(Packet):
    """Hand me messages: first what I hold already from the expected sequence on, then new ones."""

    group: str
    consumer: str
    incarnation: U64
    """Which run of this consumer; a higher one fences the lower."""
    max_messages: U32
    """Return at once when there are this many …"""
    max_bytes: U32
    """… or about this many bytes (a single larger message is still returned) …"""
    timeout_ms: U32
    """… and with what there is, at the latest after this time."""
    start_at: I64
    """Where a new group starts: a consume sequence, ``EARLIEST`` or ``LATEST``."""
    wanted: Annotated[tuple[Wanted, ...], many("partitions in a pull", most=MAX_WANTED)]
    """The partitions; higher priorities come first, and those of one in the order given."""
    covers: Annotated[
        tuple[str, ...],
        many("subjects and patterns that a pull covers", most=MAX_COVERS, each="pattern"),
    ] = ()
    """The subjects and patterns that they are all known partitions of."""
    routes_version: U32 = 0
    """The version of the route that they come from; newer ones are told of at once."""

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields."""
        to.pack(
            _PULL,
            self.incarnation,
            self.max_messages,
            self.max_bytes,
            self.timeout_ms,
            self.start_at,
        )
        to.texts((self.group, self.consumer))
        to.count(len(self.wanted))
        to.names_numbers(self.wanted, _WANTED)
        to.count(len(self.covers))
        if self.covers:
            to.texts(self.covers)
        to.pack(_ROUTES, self.routes_version)

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields."""
        incarnation, messages, size, timeout_ms, start_at = source.unpack(_PULL)
        group, consumer = source.texts(2)
        count = source.count("partitions in a pull", most=MAX_WANTED, least_size=18)
        wanted = tuple(map(Wanted._make, source.named_numbers(count, _WANTED)))
        count = source.count(
            "subjects and patterns that a pull covers", most=MAX_COVERS, least_size=2
        )
        covers = tuple(source.texts(count))
        (routes,) = source.unpack(_ROUTES)
        limits = (messages, size, timeout_ms)
        return cls(group, consumer, incarnation, *limits, start_at, wanted, covers, routes)


class Nacked(NamedTuple):
    """One delivery of a settled range that could not be processed."""

    sequence: U64
    """Its pull sequence."""
    delay_ms: I64
    """How long to wait before the next attempt; -1 leaves it to the group, -2 wants none."""
    reason: str


@packet(Opcode.SETTLE, first="partition group consumer incarnation tenure first last token")
class Settle(Packet):
    """I am done with deliveries ``first..last``, both included, except for the nacked ones."""

    partition: str
    group: str
    consumer: str
    incarnation: U64
    tenure: Tenure
    """Under which epoch and start the deliveries were handed out."""
    first: U64
    """Must follow what is settled; lower is a repetition, higher is refused."""
    last: U64
    nacked: Annotated[
        tuple[Nacked, ...], many("nacked deliveries in a settle", most=MAX_NACKED)
    ] = ()
    """In ascending order, all within ``first..last``."""
    token: U64 = NO_TOKEN
    """Of the lock, where the group is an ordered one."""

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields."""
        to.texts((self.partition, self.group, self.consumer))
        to.pack(_SETTLE, self.incarnation, *self.tenure, self.first, self.last, self.token)
        to.count(len(self.nacked))
        for nacked in self.nacked:
            to.pack(_NACKED, nacked.sequence, nacked.delay_ms)
            to.text(nacked.reason)

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields."""
        partition, group, consumer = source.texts(3)
        incarnation, epoch, start, first, last, token = source.unpack(_SETTLE)
        tenure = Tenure(Epoch(epoch), StartCount(start))
        count = source.count("nacked deliveries in a settle", most=MAX_NACKED, least_size=18)
        nacked = tuple(map(Nacked._make, source.numbers_named(count, _NACKED)))
        return cls(partition, group, consumer, incarnation, tenure, first, last, nacked, token)


@packet(Opcode.HEARTBEAT)
class Heartbeat(Packet):
    """This consumer lives, or is leaving and hands back what it holds."""

    group: str
    consumer: str
    incarnation: U64
    is_leaving: bool = False


@packet(Opcode.READ)
class Read(Packet):
    """Show me messages of a partition from a sequence on, without a group and without effect."""

    partition: str
    sequence: U64
    max_messages: U32
    max_bytes: U32
    timeout_ms: U32


@packet(Opcode.POSITIONS)
class Positions(Packet):
    """Where does a partition begin and end, and what was the first message at an instant?"""

    partition: str
    at_ms: I64 = NO_TIME
    """Looks for the first message stored at or after this instant."""


@packet(Opcode.STATUS)
class Status(Packet):
    """How is the broker doing?"""


@packet(Opcode.SEAL)
class Seal(Packet):
    """Close the open segment of the message log, so that it can be archived."""


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
VERSION = OLDEST
"""What a frame is written for, unless its peer is known to speak a newer version."""


def encode_request(
    request: Request, request_id: int, epoch: int, version: int = VERSION
) -> list[bytes | memoryview]:
    """Return the buffers of a frame that asks ``request``, as a peer of ``version`` knows it."""
    payload = Writer()
    layout = OLDEST if version == OLDEST else request.layout(version)
    request.write(payload, layout)
    header = pack_frame_header(request.opcode, layout, payload.size(), request_id, epoch)
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
    version = frame.version
    if version != OLDEST and version not in kind.declared.versions:
        raise UnsupportedError(
            f"version {version} of {kind.__name__} is unknown; {_known(kind.declared.versions)}"
        )
    payload = frame.payload
    reader = LimitedReader(payload, {WATCHED: max_watched}) if kind is Watch else Reader(payload)
    try:
        request = kind.read(reader, version)
    except ValueError as problem:
        raise RemoteProtocolError(f"{kind.__name__} cannot be read: {problem}") from None
    reader.end()
    return request


def _known(versions: tuple[int, ...]) -> str:
    return f"known {'is' if len(versions) == 1 else 'are'} {', '.join(map(str, versions))}"

"""What a broker answers: one class per opcode, and the error that any of them may get instead."""

from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, Self

from pulque.errors import ErrorCode, PulqueError, RemoteProtocolError, error_from_wire
from pulque.model.positions import ConsumeSequence, PullSequence, Tenure
from pulque.model.routes import Role
from pulque.wire.adopt import Adopted
from pulque.wire.clients import ClientsListed
from pulque.wire.codec import Reader, Writer
from pulque.wire.dead import DeadListed, Resent
from pulque.wire.delay import Cancelled, Rescheduled, ScheduledListed
from pulque.wire.find import FoundMessages
from pulque.wire.frame import Frame, pack_frame_header
from pulque.wire.groups import GroupChanged, Subscribed, SubscriptionsListed
from pulque.wire.kinds import I64, U8, U16, U32, U64, Code, Records, code_of
from pulque.wire.leadership import HandedOver, InSyncChanged, Led
from pulque.wire.opcodes import Opcode
from pulque.wire.ordered import Attended, Closed, Locked, OrderedReport, Skipped, Unlocked
from pulque.wire.packet import ANSWER, ANSWERS, Response, packet
from pulque.wire.registration import Registered
from pulque.wire.replication import CheckpointPart, Followed, Replicated
from pulque.wire.requests import VERSION
from pulque.wire.resets import GroupsReport, ResetDone
from pulque.wire.routes import Routed, Watched
from pulque.wire.stuck import StuckListed
from pulque.wire.versions import OLDEST

__all__ = [
    "ANSWER",
    "ERROR",
    "Adopted",
    "Attended",
    "Beaten",
    "Cancelled",
    "CheckpointPart",
    "ClientsListed",
    "Closed",
    "DeadListed",
    "Delivered",
    "Followed",
    "FoundMessages",
    "GroupChanged",
    "GroupsReport",
    "HandedOver",
    "InSyncChanged",
    "Led",
    "Located",
    "Locked",
    "OrderedReport",
    "Outcome",
    "Pulled",
    "ReadBack",
    "Registered",
    "Replicated",
    "Rescheduled",
    "Resent",
    "ResetDone",
    "Response",
    "Routed",
    "ScheduledListed",
    "Sealed",
    "Sent",
    "Settled",
    "Skipped",
    "State",
    "StatusReport",
    "StuckListed",
    "Subscribed",
    "SubscriptionsListed",
    "Unlocked",
    "Watched",
    "Welcome",
    "decode_response",
    "encode_error",
    "encode_response",
    "frame_of",
]

ERROR = 0xFF
"""The opcode of an answer that is an error."""

# ``Sent`` and ``Pulled`` are written and read by hand: by their declarations, 1.4 to 2 times as
# long. A test compares both ways.
_OUTCOME = Struct("<H?Qq")
_OUTCOME_HEAD = Struct("<H?QqH")
"""With the size of the text."""
_STATE = Struct("<HQQ")
_DELIVERED = Struct("<HIIQQII")
_ROUTES = Struct("<I?")
_new = tuple.__new__


@packet(Opcode.HELLO, first="version tenure max_payload max_message lease_ms max_delay_ms role")
class Welcome(Response):
    """The answer to ``Hello``."""

    version: U8
    """The protocol version that both sides speak from now on."""
    broker: str
    """The name of the server."""
    tenure: Tenure
    """Its epoch and start."""
    max_payload: U32
    """The largest payload of a frame that it takes."""
    max_message: U32
    """The largest message that it takes."""
    lease_ms: U32
    """How long a consumer may be silent."""
    max_delay_ms: U64
    """The longest delay that a nack may ask for."""
    role: Role = Role.BROKER
    """What the server is there for; a meta server's limits for messages are 0."""
    cluster: str = ""
    """The id of its cluster; empty for a lone broker."""


class Outcome(NamedTuple):
    """What became of one batch of a send."""

    code: Code
    """``NONE`` if it is stored."""
    is_duplicate: bool
    """It had been stored before; this is the outcome of that time."""
    first_sequence: ConsumeSequence
    """The consume sequence of its first message."""
    stored_at_ms: I64
    text: str = ""
    """What went wrong."""


@packet(Opcode.SEND)
class Sent(Response):
    """The answer to ``Send``: an outcome for each batch, in order."""

    outcomes: tuple[Outcome, ...]

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields."""
        to.count(len(self.outcomes))
        for code, is_duplicate, first, stored_at_ms, text in self.outcomes:
            if text:
                to.pack(_OUTCOME, code, is_duplicate, first, stored_at_ms)
                to.text(text)
            else:
                to.pack(_OUTCOME_HEAD, code, is_duplicate, first, stored_at_ms, 0)

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields."""
        outcomes = []
        for _ in range(source.count()):
            code, is_duplicate, first, stored_at_ms, size = source.unpack(_OUTCOME_HEAD)
            text = str(source.take(size), "utf-8") if size else ""
            known = code_of(code) if code else ErrorCode.NONE
            outcomes.append(_new(Outcome, (known, is_duplicate, first, stored_at_ms, text)))
        return cls(tuple(outcomes))


@dataclass(frozen=True, slots=True)
class State:
    """Where the consumer stands in one partition of a pull, after the pull."""

    code: Code
    """``POSITION_LOST`` if the expected sequence was beyond ``next_pull``; ``LOCK_LOST`` if the
    group is an ordered one, and the token is not that of its newest lock."""
    settled: PullSequence
    """All deliveries before it are settled; what the consumer holds of them is not its own."""
    next_pull: PullSequence
    """The pull sequence after the last delivery."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run of deliveries out of one partition: records of the message log as they are stored.

    The records may begin before and end after the run; what counts are the ``count`` messages
    from ``first_sequence`` on.
    """

    index: U16
    """Which of the wanted partitions."""
    tenure: Tenure
    """To be given back in the settle."""
    first_pull: PullSequence
    first_sequence: ConsumeSequence
    count: U32
    records: Records
    """To be written: buffers. Decoded: a view that is valid as long as its frame."""


@packet(Opcode.PULL)
class Pulled(Response):
    """The answer to ``Pull``."""

    states: tuple[State, ...]
    """One for each wanted partition, in order."""
    deliveries: tuple[Delivered, ...]
    routes_version: U32 = 0
    """Up to this version of the routes, the pull named every partition that it covers."""
    routes_changed: bool = False
    """There are partitions that the pull covers and did not name: ask for the route again."""

    def write(self, to: Writer, version: int = OLDEST) -> None:
        """Append the fields."""
        to.count(len(self.states))
        for state in self.states:
            to.pack(_STATE, state.code, state.settled, state.next_pull)
        to.count(len(self.deliveries))
        for each in self.deliveries:
            buffers = each.records if isinstance(each.records, tuple) else (each.records,)
            to.pack(
                _DELIVERED,
                each.index,
                *each.tenure,
                each.first_pull,
                each.first_sequence,
                each.count,
                sum(map(len, buffers)),
            )
            to.parts.extend(buffers)
        to.pack(_ROUTES, self.routes_version, self.routes_changed)

    @classmethod
    def read(cls, source: Reader, version: int = OLDEST) -> Self:
        """Take the fields."""
        states = []
        for _ in range(source.count()):
            code, settled, next_pull = source.unpack(_STATE)
            states.append(State(code_of(code), settled, next_pull))
        deliveries = []
        for _ in range(source.count()):
            index, epoch, start, pull, first, count, size = source.unpack(_DELIVERED)
            tenure = Tenure(epoch, start)
            deliveries.append(Delivered(index, tenure, pull, first, count, source.take(size)))
        return cls(tuple(states), tuple(deliveries), *source.unpack(_ROUTES))


@packet(Opcode.SETTLE)
class Settled(Response):
    """The answer to ``Settle``."""

    settled: PullSequence
    """All deliveries before it are settled."""


@packet(Opcode.HEARTBEAT)
class Beaten(Response):
    """The answer to ``Heartbeat``."""

    lease_ms: U32
    """How long the consumer may be silent from now on."""


@packet(Opcode.READ)
class ReadBack(Response):
    """The answer to ``Read``: records as they are stored, see ``Delivered``."""

    first_sequence: ConsumeSequence
    """Where the answer begins: where it was asked to, or where the partition begins now."""
    count: U32
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    records: Records


@packet(Opcode.POSITIONS)
class Located(Response):
    """The answer to ``Positions``."""

    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    at: ConsumeSequence
    """The first message stored at or after the instant asked for; ``end`` if there is none."""


@packet(Opcode.STATUS)
class StatusReport(Response):
    """The answer to ``Status``."""

    report: bytes
    """A JSON object; fields are added without notice."""


@packet(Opcode.SEAL)
class Sealed(Response):
    """The answer to ``Seal``."""

    end: U64
    """The offset at which the next segment begins."""


_ERROR = Struct("<H")


def encode_response(
    response: Response, request_id: int, epoch: int, version: int = VERSION
) -> list[bytes | memoryview]:
    """Return the buffers of a frame that answers, as a peer of ``version`` knows the answer."""
    payload = Writer()
    layout = OLDEST if version == OLDEST else response.layout(version)
    response.write(payload, layout)
    return frame_of(response.opcode, payload, request_id, epoch, layout)


def frame_of(
    opcode: Opcode, payload: Writer, request_id: int, epoch: int, version: int = VERSION
) -> list[bytes | memoryview]:
    """Return the buffers of a frame whose answer was written a part at a time."""
    size = payload.size()
    return [
        pack_frame_header(opcode | ANSWER, version, size, request_id, epoch),
        *payload.parts,
    ]


def encode_error(error: PulqueError, request_id: int, epoch: int) -> bytes:
    """Return a frame that answers with an error."""
    payload = Writer()
    payload.pack(_ERROR, error.code)
    payload.text(str(error)[:2000].encode(errors="backslashreplace").decode())
    return pack_frame_header(ERROR, VERSION, payload.size(), request_id, epoch) + payload.join()


def decode_response(frame: Frame) -> Response | PulqueError:
    """Return what a frame answers; an error is returned, not raised.

    Raises:
        RemoteProtocolError: The frame is not an answer.
    """
    reader = Reader(frame.payload)
    if frame.opcode == ERROR:
        (code,) = reader.unpack(_ERROR)
        return error_from_wire(code, reader.text())
    kind = ANSWERS.get(frame.opcode)
    version = frame.version
    if kind is None or (version != OLDEST and version not in kind.declared.versions):
        raise RemoteProtocolError(
            f"opcode {frame.opcode:#x} version {version} is not an answer known here"
        )
    try:
        response = kind.read(reader, version)
    except ValueError as problem:
        raise RemoteProtocolError(f"{kind.__name__} cannot be read: {problem}") from None
    reader.end()
    return response

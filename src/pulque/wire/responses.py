"""What a broker answers: one class per opcode, and the error that any of them may get instead."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self, get_args

from pulque.errors import ErrorCode, PulqueError, RemoteProtocolError, error_from_wire
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.model.routes import Role
from pulque.wire.adopt import Adopted
from pulque.wire.clients import ClientsListed
from pulque.wire.codec import Reader, Writer
from pulque.wire.dead import DeadListed, Resent
from pulque.wire.delay import Cancelled, Rescheduled, ScheduledListed
from pulque.wire.find import FoundMessages
from pulque.wire.frame import Frame, pack_frame_header
from pulque.wire.groups import GroupChanged, Subscribed, SubscriptionsListed, known
from pulque.wire.leadership import HandedOver, InSyncChanged, Led
from pulque.wire.opcodes import Opcode
from pulque.wire.ordered import Attended, Closed, Locked, OrderedReport, Skipped, Unlocked
from pulque.wire.registration import Registered
from pulque.wire.replication import CheckpointPart, Followed, Replicated
from pulque.wire.resets import GroupsReport, ResetDone
from pulque.wire.routes import Routed, Watched
from pulque.wire.stuck import StuckListed

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

ANSWER = 0x80
"""Set in the opcode of every answer."""
ERROR = 0xFF
"""The opcode of an answer that is an error."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to ``Hello``."""

    opcode: ClassVar[Opcode] = Opcode.HELLO
    _form: ClassVar[Struct] = Struct("<BIIIIIQB")

    version: int
    """The protocol version that both sides speak from now on."""
    broker: str
    """The name of the server."""
    tenure: Tenure
    """Its epoch and start."""
    max_payload: int
    """The largest payload of a frame that it takes."""
    max_message: int
    """The largest message that it takes."""
    lease_ms: int
    """How long a consumer may be silent."""
    max_delay_ms: int
    """The longest delay that a nack may ask for."""
    role: Role = Role.BROKER
    """What the server is there for; a meta server's limits for messages are 0."""
    cluster: str = ""
    """The id of its cluster; empty for a lone broker."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(
            self._form,
            self.version,
            *self.tenure,
            self.max_payload,
            self.max_message,
            self.lease_ms,
            self.max_delay_ms,
            self.role,
        )
        to.text(self.broker)
        to.text(self.cluster)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        version, epoch, start, payload, message, lease, delay, role = source.unpack(cls._form)
        tenure = Tenure(Epoch(epoch), StartCount(start))
        name, cluster = source.text(), source.text()
        found = known(Role, role, "role")
        return cls(version, name, tenure, payload, message, lease, delay, found, cluster)


class Outcome(NamedTuple):
    """What became of one batch of a send."""

    code: ErrorCode
    """``NONE`` if it is stored."""
    is_duplicate: bool
    """It had been stored before; this is the outcome of that time."""
    first_sequence: ConsumeSequence
    """The consume sequence of its first message."""
    stored_at_ms: int
    text: str = ""
    """What went wrong."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The answer to ``Send``: an outcome for each batch, in order."""

    opcode: ClassVar[Opcode] = Opcode.SEND
    _form: ClassVar[Struct] = Struct("<H?Qq")
    _head: ClassVar[Struct] = Struct("<H?QqH")
    """With the size of the text."""

    outcomes: tuple[Outcome, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.outcomes))
        for code, is_duplicate, first, stored_at_ms, text in self.outcomes:
            if text:
                to.pack(self._form, code, is_duplicate, first, stored_at_ms)
                to.text(text)
            else:
                to.pack(self._head, code, is_duplicate, first, stored_at_ms, 0)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        outcomes = []
        for _ in range(source.count()):
            code, is_duplicate, first, stored_at_ms, size = source.unpack(cls._head)
            text = str(source.take(size), "utf-8") if size else ""
            known = _known(code) if code else ErrorCode.NONE
            outcomes.append(_new(Outcome, (known, is_duplicate, first, stored_at_ms, text)))
        return cls(tuple(outcomes))


@dataclass(frozen=True, slots=True)
class State:
    """Where the consumer stands in one partition of a pull, after the pull."""

    code: ErrorCode
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

    index: int
    """Which of the wanted partitions."""
    tenure: Tenure
    """To be given back in the settle."""
    first_pull: PullSequence
    first_sequence: ConsumeSequence
    count: int
    records: bytes | memoryview | tuple[bytes | memoryview, ...]
    """To be written: buffers. Decoded: a view that is valid as long as its frame."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to ``Pull``."""

    opcode: ClassVar[Opcode] = Opcode.PULL
    _state: ClassVar[Struct] = Struct("<HQQ")
    _delivered: ClassVar[Struct] = Struct("<HIIQQII")
    _routes: ClassVar[Struct] = Struct("<I?")

    states: tuple[State, ...]
    """One for each wanted partition, in order."""
    deliveries: tuple[Delivered, ...]
    routes_version: int = 0
    """Up to this version of the routes, the pull named every partition that it covers."""
    routes_changed: bool = False
    """There are partitions that the pull covers and did not name: ask for the route again."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.states))
        for state in self.states:
            to.pack(self._state, state.code, state.settled, state.next_pull)
        to.count(len(self.deliveries))
        for each in self.deliveries:
            buffers = each.records if isinstance(each.records, tuple) else (each.records,)
            to.pack(
                self._delivered,
                each.index,
                *each.tenure,
                each.first_pull,
                each.first_sequence,
                each.count,
                sum(map(len, buffers)),
            )
            to.parts.extend(buffers)
        to.pack(self._routes, self.routes_version, self.routes_changed)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        states = []
        for _ in range(source.count()):
            code, settled, next_pull = source.unpack(cls._state)
            states.append(State(_known(code), settled, next_pull))
        deliveries = []
        for _ in range(source.count()):
            index, epoch, start, pull, first, count, size = source.unpack(cls._delivered)
            tenure = Tenure(epoch, start)
            deliveries.append(Delivered(index, tenure, pull, first, count, source.take(size)))
        return cls(tuple(states), tuple(deliveries), *source.unpack(cls._routes))


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to ``Settle``."""

    opcode: ClassVar[Opcode] = Opcode.SETTLE
    _form: ClassVar[Struct] = Struct("<Q")

    settled: PullSequence
    """All deliveries before it are settled."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.settled)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Beaten:
    """The answer to ``Heartbeat``."""

    opcode: ClassVar[Opcode] = Opcode.HEARTBEAT
    _form: ClassVar[Struct] = Struct("<I")

    lease_ms: int
    """How long the consumer may be silent from now on."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.lease_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The answer to ``Read``: records as they are stored, see ``Delivered``."""

    opcode: ClassVar[Opcode] = Opcode.READ
    _form: ClassVar[Struct] = Struct("<QIQQI")

    first_sequence: ConsumeSequence
    """Where the answer begins: where it was asked to, or where the partition begins now."""
    count: int
    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    records: bytes | memoryview | tuple[bytes | memoryview, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        buffers = self.records if isinstance(self.records, tuple) else (self.records,)
        size = sum(map(len, buffers))
        to.pack(self._form, self.first_sequence, self.count, self.start, self.end, size)
        to.parts.extend(buffers)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        first, count, start, end, size = source.unpack(cls._form)
        return cls(first, count, start, end, source.take(size))


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to ``Positions``."""

    opcode: ClassVar[Opcode] = Opcode.POSITIONS
    _form: ClassVar[Struct] = Struct("<QQQ")

    start: ConsumeSequence
    """The oldest message that is stored."""
    end: ConsumeSequence
    """The next message to come."""
    at: ConsumeSequence
    """The first message stored at or after the instant asked for; ``end`` if there is none."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.start, self.end, self.at)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The answer to ``Status``."""

    opcode: ClassVar[Opcode] = Opcode.STATUS

    report: bytes
    """A JSON object; fields are added without notice."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.blob(self.report)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(bytes(source.blob()))


@dataclass(frozen=True, slots=True)
class Sealed:
    """The answer to ``Seal``."""

    opcode: ClassVar[Opcode] = Opcode.SEAL
    _form: ClassVar[Struct] = Struct("<Q")

    end: int
    """The offset at which the next segment begins."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.end)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


Response = (
    Welcome
    | Routed
    | Sent
    | Pulled
    | Settled
    | Beaten
    | ReadBack
    | Located
    | Subscribed
    | Registered
    | Watched
    | Adopted
    | Attended
    | Locked
    | Unlocked
    | Skipped
    | OrderedReport
    | Closed
    | ResetDone
    | GroupsReport
    | StatusReport
    | Sealed
    | GroupChanged
    | SubscriptionsListed
    | ClientsListed
    | DeadListed
    | Resent
    | Cancelled
    | Rescheduled
    | ScheduledListed
    | StuckListed
    | FoundMessages
    | Led
    | InSyncChanged
    | Followed
    | Replicated
    | CheckpointPart
    | HandedOver
)
_KINDS: dict[int, type[Response]] = {kind.opcode | ANSWER: kind for kind in get_args(Response)}
_new = tuple.__new__
_ERROR = Struct("<H")
_CODES = frozenset(ErrorCode)


def _known(code: int) -> ErrorCode:
    """Return a code; one of a newer broker counts as unknown, as in ``error_from_wire``."""
    return ErrorCode(code) if code in _CODES else ErrorCode.UNKNOWN


def encode_response(response: Response, request_id: int, epoch: int) -> list[bytes | memoryview]:
    """Return the buffers of a frame that answers with ``response``."""
    payload = Writer()
    response.write(payload)
    return frame_of(response.opcode, payload, request_id, epoch)


def frame_of(
    opcode: Opcode, payload: Writer, request_id: int, epoch: int
) -> list[bytes | memoryview]:
    """Return the buffers of a frame whose answer was written a part at a time."""
    size = payload.size()
    return [
        pack_frame_header(opcode | ANSWER, VERSION, size, request_id, epoch),
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
    kind = _KINDS.get(frame.opcode)
    if kind is None or frame.version != VERSION:
        raise RemoteProtocolError(
            f"opcode {frame.opcode:#x} version {frame.version} is not an answer known here"
        )
    try:
        response = kind.read(reader)
    except ValueError as problem:
        raise RemoteProtocolError(f"{kind.__name__} cannot be read: {problem}") from None
    reader.end()
    return response

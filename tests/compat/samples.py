"""What the files of version 1 hold: values that never change, beside the bytes that never do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from struct import pack
from typing import Any, TypeVar, get_args
from zlib import crc32

from pulque.client.persistence.nack_spool import SpooledNack, encode_nack
from pulque.client.receiving.saved_positions import KeptPosition, KeptRange, encode_positions
from pulque.errors import ErrorCode, NotLeaderError, PulqueError
from pulque.model.batch import Codec, seed_of
from pulque.model.gathered import pack_gathered
from pulque.model.groups import (
    BROKERS_CHOICE,
    EVERYTHING,
    Filter,
    FilterKind,
    GroupSettings,
    Mode,
    RetrySettings,
    Start,
    StartKind,
)
from pulque.model.leadership import EpochStart, Leadership
from pulque.model.names import ConsumerId, Group, PartitionName, Pattern
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.model.pack import BatchPacker, ProducedBy, encode_headers, encode_tags
from pulque.model.positions import (
    ActionOffset,
    ConsumeSequence,
    Epoch,
    MessageOffset,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, pack_envelope
from pulque.model.routes import PartitionRoute, Role, RouteKind, Slots
from pulque.model.routes import Route as RouteOfSubject
from pulque.wire.adopt import Origin
from pulque.wire.clients import ConnectedClient, ConnectedConsumer
from pulque.wire.delay import Fate, HourCount, Listing, Move, ScheduledMessage, Ticket
from pulque.wire.find import FoundMessage
from pulque.wire.groups import Subscription
from pulque.wire.kinds import TEXT, FieldKind, FieldsOf, Id, ListOf, kind_of
from pulque.wire.leadership import (
    ChangeInSync,
    HandedOver,
    HandOver,
    InSyncChanged,
    Lead,
    Led,
)
from pulque.wire.ordered import OrderedRow
from pulque.wire.packet import ANSWERS, Packet
from pulque.wire.registration import ServerState
from pulque.wire.replication import (
    CheckpointPart,
    CopyCheckpoint,
    Follow,
    Followed,
    Replicate,
    Replicated,
)
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Adopt,
    Attend,
    Cancel,
    ChangeGroup,
    Clients,
    Close,
    Dead,
    Find,
    Groups,
    Heartbeat,
    Hello,
    Lock,
    Nacked,
    Ordered,
    Positions,
    Pull,
    Read,
    Register,
    Request,
    Reschedule,
    Resend,
    Reset,
    Route,
    Scheduled,
    Seal,
    Send,
    Settle,
    Skip,
    Status,
    StuckMessages,
    Subscribe,
    Subscriptions,
    Unlock,
    Wanted,
    Watch,
    encode_request,
)
from pulque.wire.resets import GroupConsumer, GroupPosition, ResetRow
from pulque.wire.responses import (
    Adopted,
    Attended,
    Beaten,
    Cancelled,
    ClientsListed,
    Closed,
    DeadListed,
    Delivered,
    FoundMessages,
    GroupChanged,
    GroupsReport,
    Located,
    Locked,
    OrderedReport,
    Outcome,
    Pulled,
    ReadBack,
    Registered,
    Rescheduled,
    Resent,
    ResetDone,
    Response,
    Routed,
    ScheduledListed,
    Sealed,
    Sent,
    Settled,
    Skipped,
    State,
    StatusReport,
    StuckListed,
    Subscribed,
    SubscriptionsListed,
    Unlocked,
    Watched,
    Welcome,
    encode_error,
    encode_response,
)
from pulque.wire.routes import ChangedRoute, KnownRoute
from pulque.wire.stuck import StuckMessage

__all__ = [
    "BATCHES",
    "CREATED_AT_MS",
    "ENVELOPE",
    "EPOCH",
    "ERROR",
    "FULL",
    "KEPT",
    "OWNER",
    "PARTITION",
    "PLAIN",
    "PRODUCED_BY",
    "REQUESTS",
    "REQUEST_ID",
    "RESPONSES",
    "SEED",
    "SPOOLED",
    "Sample",
    "encoded",
    "made_of",
]

T = TypeVar("T", bound=Packet)
PARTITION = PartitionName("orders")
SEED = seed_of(PARTITION)
CREATED_AT_MS = 1_763_000_000_000
PRODUCED_BY = ProducedBy(producer_id=0x1122334455667788, incarnation=3, sequence=17, named=True)
REQUEST_ID = 0x01020304
EPOCH = 5
TENURE = Tenure(Epoch(5), StartCount(2))
ID = bytes.fromhex("019a7b3c8d5e7f00a0b1c2d3e4f50617")


@dataclass(frozen=True, slots=True)
class Sample:
    """One message as it goes in and as it must come out."""

    id: bytes
    body: bytes
    key: str | None = None
    order_key: str | None = None
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] | None = None
    expires_at_ms: int = 0
    created_at_ms: int = CREATED_AT_MS
    attempt: int = 1


PLAIN = (
    Sample(bytes(15) + b"\x01", b"first"),
    Sample(bytes(15) + b"\x02", b""),
    Sample(bytes(15) + b"\x03", "Grüße, 世界".encode()),
)
FULL = (
    Sample(bytes(15) + b"\x01", b"plain among others"),
    Sample(
        bytes(15) + b"\x02",
        b'{"total": 12}',
        key="order-7",
        order_key="customer-ü",
        tags=("new", "vip", "日本"),
        headers={"content-type": "application/json", "empty": ""},
        expires_at_ms=1_763_999_999_999,
    ),
    Sample(
        ID,
        bytes(range(256)),
        key="order-8",
        headers={"pulque.origin": "orders/41"},
        created_at_ms=1_762_000_000_000,
        attempt=4,
    ),
)
BATCHES: dict[str, tuple[tuple[Sample, ...], Codec]] = {
    "batch-plain": (PLAIN, Codec.NONE),
    "batch-full": (FULL, Codec.NONE),
    "batch-lz4": (FULL, Codec.LZ4),
    "batch-zstd": (FULL, Codec.ZSTD),
}


def packed(samples: tuple[Sample, ...], codec: Codec) -> bytes:
    packer = BatchPacker()
    for sample in samples:
        is_old = sample.created_at_ms != CREATED_AT_MS
        packer.add_encoded(
            sample.body,
            key=(sample.key or "").encode(),
            order_key=(sample.order_key or "").encode(),
            tags=encode_tags(sample.tags),
            headers=encode_headers(sample.headers or {}),
            expires_at_ms=sample.expires_at_ms,
            created_at_ms=sample.created_at_ms if is_old else 0,
            attempt=sample.attempt,
            message_id=sample.id if is_old else b"",
        )
    return packer.encode(
        seed=SEED,
        ids=b"".join(sample.id for sample in samples),
        created_at_ms=CREATED_AT_MS,
        produced_by=PRODUCED_BY,
        priority=6,
        codec=codec,
    )


RECORD = packed(PLAIN, Codec.NONE)
ENVELOPE = Envelope(
    RecordType.BATCH,
    ENVELOPE_SIZE + len(RECORD),
    MessageOffset(4096),
    MessageOffset(2048),
    Epoch(5),
    PartitionId(9),
    ConsumeSequence(41),
    1_763_000_000_123,
    3,
)
LEADERSHIP = Leadership(
    "group-a", Epoch(5), 12, "0123456789abcdef", "7c21d0aa", ("0123456789abcdef", "fedc"), 2
)
EPOCHS = (
    EpochStart(Epoch(1), MessageOffset(0), ActionOffset(0)),
    EpochStart(Epoch(5), MessageOffset(2**40), ActionOffset(4_096)),
)

_REQUESTS: tuple[Request, ...] = (
    Hello(1, 3, "pulque-python/0.1 é", "token", b"\x00\x01secret"),
    Route("orders.*", "billing", RouteKind.LOCAL),
    Register(
        "7f3a9c01",
        "broker-a",
        "group-a",
        Role.DELAY,
        "10.0.0.1",
        7_450,
        "0123456789abcdef",
        9,
        1_763_000_000_000,
        ServerState.FULL,
        40_000,
        2**40,
    ),
    Watch(
        "host/shop/1",
        "shop",
        (
            KnownRoute(RouteKind.REALTIME, "orders", "", 2**63 + 1),
            KnownRoute(RouteKind.DELAYED, "orders.*", "billing", 12),
        ),
        30_000,
    ),
    Adopt(
        "billing",
        "host:app/0",
        "no such customer",
        -1,
        3,
        Origin("group-a", PartitionName("orders"), ConsumeSequence(41)),
        b"a batch",
    ),
    Clients(1_000, 50),
    Attend("host:app/0", 7, "orders", "billing", True, 2**63 + 5, 3_000),
    Lock("orders#3", "billing", "host:app/0", 7, OrderStrategy.STRICT, 41, 20_000),
    Unlock("orders#3", "billing", "host:app/0", 7, 41),
    Skip("orders#3", "billing", 2**40, "no such customer"),
    Ordered("orders", "billing"),
    Close("orders"),
    Send(Acks.DISK, 30_000, (("orders", b"a batch"), ("%retry%a%b", b""))),
    Pull(
        "billing",
        "host:app/0",
        7,
        100,
        1_048_576,
        20_000,
        EARLIEST,
        (Wanted("orders", 41, 9), Wanted("%retry%orders%billing", FROM_SETTLED)),
        ("orders", "refunds.*"),
        12,
    ),
    Settle(
        "orders",
        "billing",
        "host:app/0",
        7,
        TENURE,
        41,
        50,
        (Nacked(43, 5_000, "no such customer"), Nacked(50, -1, "")),
        9,
    ),
    Heartbeat("billing", "host:app/0", 7, is_leaving=True),
    Read("orders", 2**40, 10, 65_536, 0),
    Positions("orders", 1_763_000_000_000),
    Reset("billing", "orders.*", "orders.eu", Start(StartKind.TIME, 1_763_000_000_000), True),
    Groups("orders", "#host:app/0"),
    Subscribe(
        "billing",
        "host:app/0",
        7,
        "orders",
        Mode.SHARED,
        Filter(FilterKind.TAGS, ("new", "vip"), ("日本",)),
        Start(StartKind.TIME, 1_763_000_000_000),
        RetrySettings((1_000, 60_000), 10, 16),
    ),
    Status(),
    Seal(),
    ChangeGroup(
        "billing",
        "orders.*",
        True,
        Mode.ONCE,
        True,
        Filter(FilterKind.TAGS, (), ("vip",)),
        RetrySettings((), 255, 3),
    ),
    Subscriptions("billing", "billing", "orders.*", 20),
    Dead("orders", "billing", 3, 2**64 - 1, 100, is_purge=True),
    Resend("orders", "billing", (3,), True, b"a new body", True, (("who", "é"), ("empty", ""))),
    Cancel((Ticket(ID, 1_763_000_000_000), Ticket(ID))),
    Reschedule((Move(ID, 0, 1_763_000_000_000),)),
    Scheduled(Listing.NEXT, "orders", 1_763_000_000_000, 1_764_000_000_000, 50, b"a place", ID),
    StuckMessages("orders", 50, b"a place"),
    Find(
        "orders",
        "4711 é",
        ID,
        1_763_000_000_000,
        1_764_000_000_000,
        32,
        1_048_576,
        1000,
        True,
        b"a place",
    ),
    Lead("group-a", "broker-a", "0123456789abcdef", "7c21d0aa", 12, 2**40, 2, True, 1_000),
    ChangeInSync("group-a", "7c21d0aa", 5, 12, ("0123456789abcdef", "fedc")),
    Follow("group-a", "broker-b", "fedc", 5, 2**40, 4_096, EPOCHS),
    Replicate("fedc", 5, 2**40, 4_096, 2**40 - 90, 4_000, True, 1_048_576, 500),
    CopyCheckpoint(41, 65_536, 1_048_576),
    HandOver("fedc"),
)
_RESPONSES: tuple[Response, ...] = (
    Welcome(
        1, "broker-a", TENURE, 17_825_792, 4_194_304, 60_000, 3_600_000, Role.META, "7f3a9c01"
    ),
    Routed(
        RouteOfSubject(
            Pattern("orders.*"),
            2**63 + 12,
            (
                PartitionRoute(
                    PartitionName("orders#0"), "group-a", "10.0.0.1", 7_400, True, Slots(0, 512)
                ),
                PartitionRoute(
                    PartitionName("orders#1"), "group-b", "::1", 7_401, False, Slots(512, 1024)
                ),
            ),
        )
    ),
    Registered(
        "7f3a9c01", 5_000, True, False, True, 12, ("refunds", "old.*"), "its clock is 90 s ahead"
    ),
    Watched(
        (
            ChangedRoute(
                RouteKind.REALTIME,
                "billing",
                RouteOfSubject(
                    Pattern("orders"),
                    13,
                    (PartitionRoute(PartitionName("orders"), "group-a", "", 0),),
                ),
            ),
            ChangedRoute(RouteKind.DELAYED, "", RouteOfSubject(Pattern("refunds"), 0, ())),
        )
    ),
    Adopted(PartitionName("%retry%orders%billing"), ConsumeSequence(7), True),
    Attended(
        ConsumeStrategy.EXCLUSIVE,
        OrderStrategy.STRICT,
        2**63 + 6,
        10_000,
        3_000,
        (Allotted("group-a", PartitionName("orders#3"), "10.0.0.1", 7_450),),
    ),
    Locked(42, 10_000, "host:app/1"),
    Unlocked(True),
    Skipped(2**40 + 1),
    OrderedReport(
        (
            OrderedRow(
                PartitionName("orders"),
                Group("billing"),
                True,
                ConsumeSequence(41),
                ConsumeSequence(7),
                ConsumeSequence(99),
                3,
                42,
                ConsumerId("host:app/1"),
                9_000,
                1_763_000_000_000,
            ),
        )
    ),
    Closed(99),
    ClientsListed(
        (
            ConnectedClient(
                1_001,
                "pulque 0.1 shop",
                "10.0.0.9:51234",
                1_763_000_000_000,
                1_500,
                (
                    ConnectedConsumer(
                        ConsumerId("host:app/0"), Group("billing"), Pattern("orders.*"), 3
                    ),
                ),
            ),
        ),
        10_000,
        True,
    ),
    Sent(
        (
            Outcome(ErrorCode.NONE, True, ConsumeSequence(41), 1_763_000_000_123),
            Outcome(ErrorCode.INVALID_NAME, False, ConsumeSequence(0), 0, "subject '' is …"),
        )
    ),
    Pulled(
        (
            State(ErrorCode.NONE, PullSequence(41), PullSequence(44)),
            State(ErrorCode.POSITION_LOST, PullSequence(0), PullSequence(0)),
        ),
        (
            Delivered(
                0,
                TENURE,
                PullSequence(41),
                ConsumeSequence(90),
                3,
                pack_envelope(ENVELOPE) + RECORD,
            ),
        ),
        12,
        True,
    ),
    Settled(PullSequence(51)),
    Beaten(60_000),
    ReadBack(
        ConsumeSequence(41), 3, ConsumeSequence(7), ConsumeSequence(2**40), b"records as stored"
    ),
    Located(ConsumeSequence(7), ConsumeSequence(2**40), ConsumeSequence(41)),
    ResetDone(
        (
            ResetRow(
                PartitionName("orders.eu"),
                ConsumeSequence(90),
                ConsumeSequence(41),
                ConsumeSequence(7),
                ConsumeSequence(2**40),
                3,
            ),
        )
    ),
    GroupsReport(
        (
            GroupPosition(
                PartitionName("%retry%orders#p9%billing"),
                Group("billing"),
                Mode.SHARED,
                ConsumeSequence(90),
                ConsumeSequence(7),
                ConsumeSequence(2**40),
                2,
                (
                    GroupConsumer(ConsumerId("host:app/0"), 3, 1_500),
                    GroupConsumer(ConsumerId("host:app/1"), 0, -1),
                ),
            ),
        ),
        True,
    ),
    Subscribed(
        "#host:app/0",
        Mode.BROADCAST,
        Filter(FilterKind.TAGS, ("new", "vip"), ("日本",)),
        RetrySettings((1_000, 60_000), 10, 16),
    ),
    StatusReport(b'{"broker": "broker-a"}'),
    Sealed(1_073_741_824),
    GroupChanged(Mode.ONCE, Filter(FilterKind.TAGS, (), ("vip",)), RetrySettings((), 255, 3)),
    SubscriptionsListed(
        (
            Subscription(
                Group("billing"),
                Pattern("orders.*"),
                GroupSettings(
                    Mode.ONCE,
                    Filter(FilterKind.TAGS, (), ("vip",)),
                    RetrySettings((1_000, 60_000), 255, 3),
                ),
            ),
            Subscription(
                Group("audit"),
                Pattern("*"),
                GroupSettings(Mode.SHARED, EVERYTHING, BROKERS_CHOICE),
            ),
        )
    ),
    DeadListed(
        ConsumeSequence(3),
        ConsumeSequence(90),
        41,
        ((ConsumeSequence(3), 1), (ConsumeSequence(5), 40)),
    ),
    Resent((3, 5), (4,), (2**40,)),
    Cancelled((Fate.CANCELLED, Fate.UNKNOWN)),
    Rescheduled((Fate.MOVED, Fate.TOO_LATE)),
    ScheduledListed(
        (HourCount(1_763_000_000_000, "orders", 2**40),),
        (ScheduledMessage(ID, 1_763_000_000_000, PartitionName("orders"), 90, b"a batch"),),
        b"a place",
    ),
    StuckListed(
        (
            StuckMessage(
                ID,
                1_763_000_000_000,
                PartitionName("orders"),
                90,
                1_763_000_000_500,
                "a message of 90 bytes — 80 are allowed",
            ),
        ),
        b"a place",
    ),
    FoundMessages(
        (FoundMessage(PartitionName("orders"), ConsumeSequence(41), CREATED_AT_MS, b"a batch"),),
        b"a place",
    ),
    Led(LEADERSHIP, "broker-a", "10.0.0.1", 7_450, 5_000),
    InSyncChanged(True, LEADERSHIP),
    Followed(5, False, 2**40 - 90, 4_000, 41, EPOCHS),
    Replicated(
        5,
        2**30,
        2**40,
        0,
        4_096,
        2**40 + 500,
        2**40 + 90,
        2**20,
        41,
        4_200,
        b"records of the message log",
        b"facts",
    ),
    CheckpointPart(41, 100_000, b"a part of it"),
    HandedOver(LEADERSHIP),
)


def made_of(kind: FieldKind, name: str) -> Any:
    """Return a value of a kind that says its name: for messages that have no sample above."""
    if isinstance(kind, FieldsOf):
        return kind.build([made_of(by_name(kind)[each], each) for each in kind.names])
    if isinstance(kind, ListOf):
        return tuple(made_of(kind.of, f"{name} {i}") for i in range(2))
    if kind.choices:
        return kind.choices[-1]
    if kind.code:
        return crc32(name.encode()) % 2 ** (8 * kind.least) // 2 if kind.name != "bool" else True
    if kind is kind_of(Id):
        return ID
    return f"{name} é" if kind is TEXT else name.encode()


def by_name(declared: FieldsOf) -> dict[str, FieldKind]:
    return {field.name: field.kind for field in declared.fields}


def by_file(kinds: Iterable[type[T]], samples: tuple[T, ...]) -> dict[str, T]:
    """Return a sample of each kind of message, by what its file is called."""
    own = {type(sample): sample for sample in samples}
    return {
        kind.opcode.name.lower().replace("_", "-"): own.get(kind)
        or made_of(kind.declared, kind.__name__)
        for kind in kinds
    }


REQUESTS = by_file(get_args(Request), _REQUESTS)
RESPONSES = by_file(ANSWERS.values(), _RESPONSES)
ERROR: PulqueError = NotLeaderError("broker-b leads orders#1 — ask there")
GATHERED_PLACES = (0, 7, 2**18)
GATHERED_TIMES = (CREATED_AT_MS, CREATED_AT_MS + 5, 2**42)
OWNER = {"group": "ticketing", "consumer": "host/shop/orders/0"}
SPOOLED = SpooledNack(
    PARTITION, TENURE, 7, 41, CREATED_AT_MS, 5000, "no paper — later", packed(PLAIN, Codec.NONE)
)
KEPT = [
    KeptPosition(
        PARTITION,
        5,
        8,
        (KeptRange(TENURE, 5, 2, 39, CREATED_AT_MS), SPOOLED.as_range()),
    ),
    KeptPosition(PartitionName("%retry%orders%ticketing"), 2, 2, ()),
]


def gathered() -> bytes:
    """Return messages that were gathered out of several batches."""
    batch = packed(PLAIN, Codec.NONE)
    places, times = pack("<3I", *GATHERED_PLACES), pack("<3q", *GATHERED_TIMES)
    return pack_gathered(41, 3, places, times, batch)


def encoded() -> dict[str, bytes]:
    """Return what today's code writes, by the name of the file."""
    files = {name: packed(samples, codec) for name, (samples, codec) in BATCHES.items()}
    files["record-batch"] = pack_envelope(ENVELOPE) + RECORD
    files["record-gathered"] = gathered()
    for name, request in REQUESTS.items():
        files[f"request-{name}"] = b"".join(encode_request(request, REQUEST_ID, EPOCH))
    for name, response in RESPONSES.items():
        files[f"response-{name}"] = b"".join(encode_response(response, REQUEST_ID, EPOCH))
    files["client-settled"] = encode_positions(OWNER, KEPT)
    files["client-nacks"] = encode_nack(SPOOLED)
    files["response-error"] = encode_error(ERROR, REQUEST_ID, EPOCH)
    return files

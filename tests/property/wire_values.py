"""Any request and any answer, and how to take them through a connection."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from pulque.errors import ErrorCode
from pulque.model.groups import (
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
from pulque.model.positions import Tenure
from pulque.model.routes import ALONE, PartitionRoute, Role, RouteKind, Slots
from pulque.model.routes import Route as RouteOfSubject
from pulque.wire.adopt import Origin
from pulque.wire.clients import ConnectedClient, ConnectedConsumer
from pulque.wire.delay import Fate, HourCount, Listing, Move, ScheduledMessage, Ticket
from pulque.wire.find import FoundMessage
from pulque.wire.frame import Frame, FrameReader
from pulque.wire.groups import Subscription
from pulque.wire.leadership import (
    ChangeInSync,
    HandedOver,
    HandOver,
    InSyncChanged,
    Lead,
    Led,
)
from pulque.wire.ordered import OrderedRow
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
)
from pulque.wire.routes import ChangedRoute, KnownRoute
from pulque.wire.stuck import StuckMessage

__all__ = [
    "REQUESTS",
    "RESPONSES",
    "copied",
    "epochs",
    "feed",
    "frame_of",
    "request_ids",
    "requests",
    "responses",
]

_T = TypeVar("_T")

u8 = st.integers(0, 2**8 - 1)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
request_ids = u32
epochs = u32
text = st.text(st.characters(codec="utf-8"), max_size=12)
blob = st.binary(max_size=60)
ids = st.binary(min_size=16, max_size=16)
tenures = st.builds(Tenure, u32, u32)
codes = st.sampled_from(ErrorCode)


def _few(of: st.SearchStrategy[_T]) -> st.SearchStrategy[tuple[_T, ...]]:
    return st.lists(of, max_size=4).map(tuple)


filters = st.builds(Filter, kind=st.sampled_from(FilterKind), any_of=_few(text), all_of=_few(text))
retries = st.builds(RetrySettings, delays_ms=_few(u32), jitter_percent=u8, max_attempts=u16)
kinds = st.sampled_from(RouteKind)
slots = st.builds(Slots, u16, u16)
orders = st.sampled_from(OrderStrategy)
routes = st.builds(
    RouteOfSubject,
    subject=text.map(Pattern),
    version=u64,
    partitions=_few(
        st.builds(
            PartitionRoute,
            partition=text.map(PartitionName),
            broker_group=text,
            host=text,
            port=u16,
            sends=st.sampled_from([0, 1, ALONE]),
            slots=slots,
        )
    ),
    order=orders,
)
leaderships = st.builds(
    Leadership,
    broker_group=text,
    epoch=u32,
    version=u64,
    leader=text,
    token=text,
    in_sync=_few(text),
    min_in_sync=u16,
)
starts_of_epochs = _few(st.builds(EpochStart, epoch=u32, messages=u64, actions=u64))
REQUESTS: dict[type[Request], st.SearchStrategy[Request]] = {
    Hello: st.builds(
        Hello, min_version=u8, max_version=u8, client=text, mechanism=text, credentials=blob
    ),
    Route: st.builds(Route, subject=text, group=text, kind=kinds),
    Register: st.builds(
        Register,
        cluster=text,
        name=text,
        broker_group=text,
        role=st.sampled_from(Role),
        host=text,
        port=u16,
        directory=text,
        incarnation=u64,
        now_ms=i64,
        state=st.sampled_from(ServerState),
        partitions=u64,
        log_bytes=u64,
    ),
    Watch: st.builds(
        Watch,
        client=text,
        application=text,
        known=_few(st.builds(KnownRoute, kind=kinds, subject=text, group=text, version=u64)),
        wait_ms=u32,
    ),
    Adopt: st.builds(
        Adopt,
        group=text,
        consumer=text,
        reason=text,
        delay_ms=i64,
        attempt=u16,
        origin=st.builds(Origin, text, text.map(PartitionName), u64),
        batch=blob,
    ),
    Clients: st.builds(Clients, after=u64, max_clients=u32),
    Attend: st.builds(
        Attend,
        consumer=text,
        incarnation=u64,
        subject=text,
        group=text,
        is_online=st.booleans(),
        version=u64,
        wait_ms=u32,
    ),
    Lock: st.builds(
        Lock,
        partition=text,
        group=text,
        consumer=text,
        incarnation=u64,
        order=orders,
        token=u64,
        wait_ms=u32,
    ),
    Unlock: st.builds(
        Unlock, partition=text, group=text, consumer=text, incarnation=u64, token=u64
    ),
    Skip: st.builds(Skip, partition=text, group=text, sequence=u64, reason=text),
    Ordered: st.builds(Ordered, subject=text, group=text),
    Close: st.builds(Close, partition=text),
    Send: st.builds(
        Send, acks=st.sampled_from(Acks), timeout_ms=u32, batches=_few(st.tuples(text, blob))
    ),
    Pull: st.builds(
        Pull,
        group=text,
        consumer=text,
        incarnation=u64,
        max_messages=u32,
        max_bytes=u32,
        timeout_ms=u32,
        start_at=i64,
        wanted=_few(st.builds(Wanted, partition=text, expected=i64, token=u64)),
        covers=_few(text),
        routes_version=u32,
    ),
    Settle: st.builds(
        Settle,
        partition=text,
        group=text,
        consumer=text,
        incarnation=u64,
        tenure=tenures,
        first=u64,
        last=u64,
        nacked=_few(st.builds(Nacked, sequence=u64, delay_ms=i64, reason=text)),
        token=u64,
    ),
    Heartbeat: st.builds(
        Heartbeat, group=text, consumer=text, incarnation=u64, is_leaving=st.booleans()
    ),
    Read: st.builds(
        Read, partition=text, sequence=u64, max_messages=u32, max_bytes=u32, timeout_ms=u32
    ),
    Positions: st.builds(Positions, partition=text, at_ms=i64),
    Reset: st.builds(
        Reset,
        group=text,
        subject=text,
        partition=text,
        target=st.builds(Start, st.sampled_from(StartKind), i64),
        is_dry_run=st.booleans(),
    ),
    Groups: st.builds(Groups, subject=text, group=text),
    Subscribe: st.builds(
        Subscribe,
        group=text,
        consumer=text,
        incarnation=u64,
        subject=text,
        mode=st.sampled_from(Mode),
        filter=filters,
        start=st.builds(Start, kind=st.sampled_from(StartKind), value=i64),
        retry=retries,
    ),
    Status: st.builds(Status),
    Subscriptions: st.builds(
        Subscriptions, group=text, after_group=text, after_subject=text, most=u32
    ),
    ChangeGroup: st.builds(
        ChangeGroup,
        group=text,
        subject=text,
        has_mode=st.booleans(),
        mode=st.sampled_from(Mode),
        has_filter=st.booleans(),
        filter=filters,
        retry=retries,
    ),
    Seal: st.builds(Seal),
    Dead: st.builds(
        Dead,
        subject=text,
        group=text,
        first=u64,
        last=u64,
        max_letters=u32,
        is_purge=st.booleans(),
    ),
    Resend: st.builds(
        Resend,
        subject=text,
        group=text,
        sequences=_few(u64),
        replaces_body=st.booleans(),
        body=blob,
        replaces_headers=st.booleans(),
        headers=_few(st.tuples(text, text)),
    ),
    Cancel: st.builds(Cancel, tickets=_few(st.builds(Ticket, ids, i64))),
    Reschedule: st.builds(Reschedule, moves=_few(st.builds(Move, ids, i64, i64))),
    Scheduled: st.builds(
        Scheduled,
        listing=st.sampled_from(Listing),
        subject=text,
        from_ms=i64,
        until_ms=i64,
        max_rows=u32,
        after=blob,
        id=blob,
    ),
    StuckMessages: st.builds(StuckMessages, subject=text, max_rows=u32, after=blob),
    Find: st.builds(
        Find,
        subject=text,
        key=text,
        id=blob,
        since_ms=i64,
        until_ms=i64,
        max_messages=u32,
        max_bytes=u32,
        timeout_ms=u32,
        copies=st.booleans(),
        after=blob,
    ),
    Lead: st.builds(
        Lead,
        broker_group=text,
        name=text,
        directory=text,
        token=text,
        version=u64,
        message_end=u64,
        min_in_sync=u16,
        is_fit=st.booleans(),
        wait_ms=u32,
    ),
    ChangeInSync: st.builds(
        ChangeInSync, broker_group=text, token=text, epoch=u32, version=u64, in_sync=_few(text)
    ),
    Follow: st.builds(
        Follow,
        broker_group=text,
        name=text,
        directory=text,
        epoch=u32,
        message_end=u64,
        action_end=u64,
        epochs=starts_of_epochs,
    ),
    Replicate: st.builds(
        Replicate,
        directory=text,
        epoch=u32,
        message_offset=u64,
        action_offset=u64,
        message_synced=u64,
        action_synced=u64,
        ready=st.sampled_from([0, 1, 3]),
        max_bytes=u32,
        wait_ms=u32,
    ),
    CopyCheckpoint: st.builds(CopyCheckpoint, number=u64, offset=u64, max_bytes=u32),
    HandOver: st.builds(HandOver, to=text),
}
RESPONSES: dict[type[Response], st.SearchStrategy[Response]] = {
    Welcome: st.builds(
        Welcome,
        version=u8,
        broker=text,
        tenure=tenures,
        max_payload=u32,
        max_message=u32,
        lease_ms=u32,
        max_delay_ms=u64,
        role=st.sampled_from(Role),
        cluster=text,
    ),
    Routed: st.builds(Routed, routes),
    Sent: st.builds(
        Sent,
        _few(
            st.builds(
                Outcome,
                code=codes,
                is_duplicate=st.booleans(),
                first_sequence=u64,
                stored_at_ms=i64,
                text=text,
            )
        ),
    ),
    Pulled: st.builds(
        Pulled,
        states=_few(st.builds(State, code=codes, settled=u64, next_pull=u64)),
        deliveries=_few(
            st.builds(
                Delivered,
                index=u16,
                tenure=tenures,
                first_pull=u64,
                first_sequence=u64,
                count=u32,
                records=st.one_of(blob, _few(blob)),
            )
        ),
    ),
    Settled: st.builds(Settled, settled=u64),
    Beaten: st.builds(Beaten, lease_ms=u32),
    ReadBack: st.builds(
        ReadBack,
        first_sequence=u64,
        count=u32,
        start=u64,
        end=u64,
        records=st.one_of(blob, _few(blob)),
    ),
    Located: st.builds(Located, start=u64, end=u64, at=u64),
    ResetDone: st.builds(
        ResetDone, _few(st.builds(ResetRow, text.map(PartitionName), u64, u64, u64, u64, u32))
    ),
    GroupsReport: st.builds(
        GroupsReport,
        _few(
            st.builds(
                GroupPosition,
                text.map(PartitionName),
                text.map(Group),
                st.sampled_from(Mode),
                u64,
                u64,
                u64,
                u32,
                _few(st.builds(GroupConsumer, text.map(ConsumerId), u32, i64)),
            )
        ),
        st.booleans(),
    ),
    Subscribed: st.builds(
        Subscribed, group=text, mode=st.sampled_from(Mode), filter=filters, retry=retries
    ),
    SubscriptionsListed: st.builds(
        SubscriptionsListed,
        _few(
            st.builds(
                Subscription,
                text.map(Group),
                text.map(Pattern),
                st.builds(GroupSettings, st.sampled_from(Mode), filters, retries),
            )
        ),
    ),
    GroupChanged: st.builds(
        GroupChanged, mode=st.sampled_from(Mode), filter=filters, retry=retries
    ),
    StatusReport: st.builds(StatusReport, report=blob),
    Sealed: st.builds(Sealed, end=u64),
    DeadListed: st.builds(
        DeadListed, start=u64, end=u64, count=u64, ranges=_few(st.tuples(u64, u32))
    ),
    Registered: st.builds(
        Registered,
        cluster=text,
        heartbeat_ms=u32,
        is_read_only=st.booleans(),
        is_draining=st.booleans(),
        may_create=st.booleans(),
        marks_version=u64,
        read_only=_few(text),
        warning=text,
    ),
    Watched: st.builds(
        Watched, _few(st.builds(ChangedRoute, kind=kinds, group=text, route=routes))
    ),
    Adopted: st.builds(
        Adopted, partition=text.map(PartitionName), sequence=u64, is_duplicate=st.booleans()
    ),
    Attended: st.builds(
        Attended,
        strategy=st.sampled_from(ConsumeStrategy),
        order=orders,
        version=u64,
        authorised_ms=u32,
        heartbeat_ms=u32,
        partitions=_few(
            st.builds(
                Allotted,
                broker_group=text,
                partition=text.map(PartitionName),
                host=text,
                port=u16,
            )
        ),
    ),
    Locked: st.builds(Locked, token=u64, lock_ms=u32, holder=text),
    Unlocked: st.builds(Unlocked, was_held=st.booleans()),
    Skipped: st.builds(Skipped, next_sequence=u64),
    OrderedReport: st.builds(
        OrderedReport,
        _few(
            st.builds(
                OrderedRow,
                partition=text.map(PartitionName),
                group=text.map(Group),
                is_closed=st.booleans(),
                settled=u64,
                start=u64,
                end=u64,
                held=u32,
                token=u64,
                holder=text.map(ConsumerId),
                left_ms=u32,
                stuck_since_ms=i64,
            )
        ),
    ),
    Closed: st.builds(Closed, end=u64),
    ClientsListed: st.builds(
        ClientsListed,
        clients=_few(
            st.builds(
                ConnectedClient,
                number=u64,
                client=text,
                address=text,
                connected_at_ms=i64,
                silent_ms=u64,
                consumers=_few(
                    st.builds(
                        ConnectedConsumer,
                        consumer=text.map(ConsumerId),
                        group=text.map(Group),
                        subject=text.map(Pattern),
                        held=u32,
                    )
                ),
            )
        ),
        total=u32,
        has_more=st.booleans(),
    ),
    Resent: st.builds(Resent, resent=_few(u64), done=_few(u64), missing=_few(u64)),
    Cancelled: st.builds(Cancelled, fates=_few(st.sampled_from(Fate))),
    Rescheduled: st.builds(Rescheduled, fates=_few(st.sampled_from(Fate))),
    ScheduledListed: st.builds(
        ScheduledListed,
        counts=_few(st.builds(HourCount, i64, text, u64)),
        messages=_few(st.builds(ScheduledMessage, ids, i64, text.map(PartitionName), u32, blob)),
        next=blob,
    ),
    StuckListed: st.builds(
        StuckListed,
        messages=_few(st.builds(StuckMessage, ids, i64, text.map(PartitionName), u32, i64, text)),
        next=blob,
    ),
    FoundMessages: st.builds(
        FoundMessages,
        messages=_few(st.builds(FoundMessage, text.map(PartitionName), u64, i64, blob)),
        next=blob,
    ),
    Led: st.builds(Led, leadership=leaderships, name=text, host=text, port=u16, lease_ms=u32),
    InSyncChanged: st.builds(InSyncChanged, is_done=st.booleans(), leadership=leaderships),
    Followed: st.builds(
        Followed,
        epoch=u32,
        is_anew=st.booleans(),
        message_end=u64,
        action_end=u64,
        checkpoint=u64,
        epochs=starts_of_epochs,
    ),
    Replicated: st.builds(
        Replicated,
        epoch=u32,
        message_base=u64,
        message_offset=u64,
        action_base=u64,
        action_offset=u64,
        message_end=u64,
        confirmed=u64,
        message_oldest=u64,
        checkpoint=u64,
        action_end=u64,
        messages=blob,
        actions=blob,
    ),
    CheckpointPart: st.builds(CheckpointPart, number=u64, size=u64, data=blob),
    HandedOver: st.builds(HandedOver, leadership=leaderships),
}
requests: st.SearchStrategy[Request] = st.one_of(*REQUESTS.values())
responses: st.SearchStrategy[Response] = st.one_of(*RESPONSES.values())


def feed(reader: FrameReader, data: bytes) -> None:
    """Put bytes into a reader as a socket does: as many at a time as there is room for."""
    while data:
        room = reader.buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        reader.received(count)
        data = data[count:]


def frame_of(buffers: Iterable[bytes | memoryview]) -> Frame:
    """Return the one frame that these buffers are."""
    reader = FrameReader()
    feed(reader, b"".join(buffers))
    frame = reader.next_frame()
    assert frame is not None
    assert not reader.is_inside_frame
    return frame


def copied(response: Response) -> Response:
    """Return an answer with records in one piece, to compare what was sent with what came."""
    if isinstance(response, ReadBack):
        return replace(response, records=_joined(response.records))
    if isinstance(response, Pulled):
        deliveries = (replace(d, records=_joined(d.records)) for d in response.deliveries)
        return replace(response, deliveries=tuple(deliveries))
    return response


def _joined(records: bytes | memoryview | tuple[bytes | memoryview, ...]) -> bytes:
    return b"".join(records) if isinstance(records, tuple) else bytes(records)

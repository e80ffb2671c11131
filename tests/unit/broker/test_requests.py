"""Every opcode by example, and who may say what when."""

from typing import get_args

import pytest

from pulque.broker.requests import ELSEWHERE
from pulque.errors import (
    DisconnectedError,
    FencedError,
    InvalidNameError,
    InvalidRequestError,
    RemoteProtocolError,
    UnknownSubjectError,
    UnsupportedError,
)
from pulque.model.routes import ALL_SLOTS, Role, RouteKind
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect
from pulque.wire.frame import FRAME_MAGIC, pack_frame_header
from pulque.wire.registration import ServerState
from pulque.wire.requests import (
    Acks,
    Heartbeat,
    Hello,
    Positions,
    Read,
    Register,
    Request,
    Route,
    Seal,
    Send,
    Status,
    encode_request,
)
from pulque.wire.responses import (
    Beaten,
    Located,
    ReadBack,
    Registered,
    Routed,
    Sealed,
    Sent,
    Welcome,
)
from tests.unit.broker.running import Running, Start, numbered

# -- all of them --------------------------------------------------------------------------------


async def test_every_type_of_request_is_answered_or_belongs_elsewhere(running: Running) -> None:
    answered = running.broker._handler.answered  # noqa: SLF001

    assert answered | set(ELSEWHERE) == set(get_args(Request))
    assert not answered & set(ELSEWHERE)


# -- the handshake ------------------------------------------------------------------------------


async def test_the_welcome_tells_who_is_there_and_what_it_takes(start: Start) -> None:
    running = await start(
        limits={"max_message": "1MiB"}, consumption={"lease": "7s", "lease_check": "1s"}
    )
    raw = await running.connect(is_greeting=False)

    welcome = await raw.ask(Hello(0, 200, "me"), Welcome)

    assert (welcome.version, welcome.broker, welcome.tenure) == (1, "broker", (0, 1))
    assert (welcome.max_message, welcome.lease_ms) == (1024 * 1024, 7000)


@pytest.mark.parametrize(("oldest", "newest"), [(2, 9), (0, 0), (5, 3)])
async def test_a_client_of_no_common_version_is_refused(
    running: Running, oldest: int, newest: int
) -> None:
    raw = await running.connect(is_greeting=False)

    with pytest.raises(UnsupportedError):
        await raw.ask(Hello(oldest, newest, "me"), Welcome)


async def test_a_proof_of_identity_that_is_not_known_is_refused(running: Running) -> None:
    raw = await running.connect(is_greeting=False)

    with pytest.raises(UnsupportedError, match="secret-handshake"):
        await raw.ask(Hello(1, 1, "me", "secret-handshake", b"x"), Welcome)


@pytest.mark.parametrize("request_", [Status(), Route("orders"), Read("orders", 0, 1, 1, 0)])
async def test_nothing_may_be_asked_before_the_hello(running: Running, request_: Request) -> None:
    raw = await running.connect(is_greeting=False)
    answer = await raw.answer_to(await raw.put(request_))

    assert isinstance(answer, RemoteProtocolError)
    with pytest.raises(DisconnectedError):
        await raw.get()


async def test_a_second_hello_ends_the_connection(raw: RawConnection) -> None:
    with pytest.raises(RemoteProtocolError):
        await raw.ask(Hello(1, 1, "me"), Welcome)
    with pytest.raises(DisconnectedError):
        await raw.get()


# -- frames -------------------------------------------------------------------------------------


async def test_an_unknown_opcode_is_refused_and_the_connection_lives(raw: RawConnection) -> None:
    await raw.put_bytes(pack_frame_header(99, 1, 0, 77, 0))

    request_id, answer = await raw.get()

    assert request_id == 77
    assert isinstance(answer, UnsupportedError)
    assert await raw.status()


async def test_an_unknown_version_of_a_request_is_refused(raw: RawConnection) -> None:
    await raw.put_bytes(pack_frame_header(Status.opcode, 2, 0, 78, 0))

    assert isinstance((await raw.get())[1], UnsupportedError)
    assert await raw.status()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        pack_frame_header(Status.opcode, 1, 2**31, 1, 0),
        pack_frame_header(Read.opcode, 1, 3, 1, 0) + b"\xff\xff\xff",
        FRAME_MAGIC.to_bytes(2, "big") * 20,
    ],
    ids=["http", "tls", "huge", "lying payload", "wrong magic"],
)
async def test_nonsense_ends_the_connection_and_no_other(
    running: Running, raw: RawConnection, data: bytes
) -> None:
    bad = await running.connect()
    await bad.put_bytes(data)

    with pytest.raises((DisconnectedError, RemoteProtocolError)):
        await answers_until_the_end(bad)

    assert await raw.status()


async def answers_until_the_end(raw: RawConnection) -> None:
    """Read what is said before the connection is closed: nothing but what was wrong."""
    while True:
        _, answer = await raw.get()
        assert isinstance(answer, RemoteProtocolError)


async def test_requests_may_be_pipelined_and_answers_name_their_request(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(3))
    ids = [await raw.put(Read("orders", at, 1, 1000, 0)) for at in range(3)]

    answers = [expect(await raw.answer_to(each), ReadBack) for each in reversed(ids)]

    assert [answer.first_sequence for answer in answers] == [2, 1, 0]


async def test_a_frame_may_come_byte_by_byte(raw: RawConnection) -> None:
    for byte in b"".join(encode_request(Route("orders"), 5, 0)):
        await raw.put_bytes(bytes([byte]))

    assert (await raw.get())[0] == 5


async def test_a_frame_that_does_not_end_in_time_ends_its_connection(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    slow, other = await running.connect(), await running.connect()
    frame = pack_frame_header(Status.opcode, 1, 0, 1, 0)
    # The first frame is answered, so the broker has seen the beginning of the second.
    await slow.put_bytes(frame + frame[:7])
    await slow.get()
    clock.advance(10_001)

    with pytest.raises(DisconnectedError):
        await slow.get()

    assert await other.status()


# -- routes, positions, reads -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RouteKind.REALTIME, RouteKind.LOCAL])
async def test_a_lone_broker_serves_every_subject_itself(
    raw: RawConnection, kind: RouteKind
) -> None:
    route = (await raw.ask(Route("never.seen", kind=kind), Routed)).route

    (partition,) = route.partitions
    assert (partition.partition, partition.broker_group) == ("never.seen", "broker")
    assert (partition.host, partition.is_writable) == ("", True)
    assert partition.slots == ALL_SLOTS


async def test_a_lone_broker_takes_no_sends_that_are_due_later(raw: RawConnection) -> None:
    route = (await raw.ask(Route("orders", kind=RouteKind.DELAYED), Routed)).route

    assert route.partitions == ()


async def test_who_is_welcome_learns_what_the_server_is(running: Running) -> None:
    raw = await running.connect()

    assert raw.welcome is not None
    assert (raw.welcome.role, raw.welcome.cluster) == (Role.BROKER, "")


async def test_a_broker_takes_no_registrations(raw: RawConnection) -> None:
    request = Register(
        "", "a", "a", Role.BROKER, "127.0.0.1", 1, "", 1, 0, ServerState.READY, 0, 0
    )

    with pytest.raises(UnsupportedError, match="meta server"):
        await raw.ask(request, Registered)


async def test_a_route_lists_the_partitions_of_every_priority(raw: RawConnection) -> None:
    for partition in ("orders#p9", "orders.eu", "orders", "orders#p0"):
        await raw.send(partition, numbered(1))

    route = (await raw.ask(Route("orders"), Routed)).route

    assert [each.partition for each in route.partitions] == ["orders", "orders#p9", "orders#p0"]


async def test_a_route_of_a_pattern_lists_all_subjects_that_it_covers(raw: RawConnection) -> None:
    for partition in ("order.paid", "orders", "order.paid.eu#p9", "order"):
        await raw.send(partition, numbered(1))

    async def listed(pattern: str) -> list[str]:
        route = (await raw.ask(Route(pattern, "billing"), Routed)).route
        return [each.partition for each in route.partitions]

    assert await listed("order.*") == ["order.paid", "order.paid.eu#p9"]
    assert await listed("order.paid.*") == ["order.paid.eu#p9"]
    assert await listed("nothing.*") == []
    assert await listed("*") == ["order.paid", "orders", "order.paid.eu#p9", "order"]


async def test_a_route_lists_the_retries_of_the_group_that_asks(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    (run,) = (await raw.pull("orders")).runs
    await raw.settle(run, nacked={0: "no"})
    retries = await raw.pull("%retry%orders%g", timeout_ms=10_000)
    assert retries.bodies == numbered(1)

    async def listed(pattern: str, group: str) -> list[str]:
        route = (await raw.ask(Route(pattern, group), Routed)).route
        return [each.partition for each in route.partitions]

    assert await listed("orders", "g") == ["orders", "%retry%orders%g"]
    assert await listed("*", "g") == ["orders", "%retry%orders%g"]
    assert await listed("orders", "other") == ["orders"]
    assert await listed("orders", "") == ["orders"]


@pytest.mark.parametrize("name", ["order.*", "*"])
async def test_a_producer_gets_no_route_of_a_pattern(raw: RawConnection, name: str) -> None:
    with pytest.raises(InvalidNameError, match="a message goes to one subject"):
        await raw.ask(Route(name), Routed)


@pytest.mark.parametrize("name", ["", "../x", "%retry%a%b", "a b", "x" * 256])
async def test_a_route_of_what_is_no_subject_is_refused(raw: RawConnection, name: str) -> None:
    with pytest.raises(InvalidNameError):
        await raw.ask(Route(name), Routed)


async def test_positions_tell_where_a_partition_begins_and_ends(raw: RawConnection) -> None:
    await raw.send("orders", numbered(7))

    assert await raw.ask(Positions("orders"), Located) == Located(0, 7, 7)  # type: ignore[arg-type]


async def test_positions_find_the_first_message_at_an_instant(start: Start) -> None:
    clock = ManualClock(now_ms=1_000_000)
    raw = await (await start(clock=clock)).connect()
    for _ in range(3):
        await raw.send("orders", numbered(2))
        await raw.ask(Seal(), Sealed)
        clock.advance(100)

    found = {
        at_ms: (await raw.ask(Positions("orders", at_ms), Located)).at
        for at_ms in (0, 999_999, 1_000_000, 1_000_001, 1_000_100, 1_000_200, 1_000_201)
    }

    assert found == {
        0: 0,
        999_999: 0,
        1_000_000: 0,
        1_000_001: 2,
        1_000_100: 2,
        1_000_200: 4,
        1_000_201: 6,
    }


async def test_positions_of_what_was_never_sent_to_are_refused(raw: RawConnection) -> None:
    with pytest.raises(UnknownSubjectError):
        await raw.ask(Positions("orders"), Located)


async def test_a_read_shows_messages_without_effect(raw: RawConnection) -> None:
    for at in range(0, 10, 5):
        await raw.send("orders", numbered(5, at))

    answer, messages = await raw.read("orders", 3)
    again = await raw.read("orders", 3)

    assert [message.body for message in messages] == numbered(7, 3)
    assert (answer.first_sequence, answer.count, answer.start, answer.end) == (3, 7, 0, 10)
    assert again[0] == answer
    assert len((await raw.read("orders", 3, max_messages=4))[1]) <= 4
    assert (await raw.status())["groups"] == []
    assert (await raw.pull("orders")).bodies == numbered(10)


@pytest.mark.accepts("003-29")
@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Read("../x", 0, 1, 1, 0), InvalidNameError),
        (Read("orders", 0, 0, 1, 0), InvalidRequestError),
        (Read("orders", 0, 1, 0, 0), InvalidRequestError),
    ],
)
async def test_a_read_that_cannot_be_is_refused(
    raw: RawConnection, request_: Read, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await raw.ask(request_, ReadBack)


# -- heartbeats, seals, the report --------------------------------------------------------------


async def test_a_heartbeat_tells_the_lease(raw: RawConnection) -> None:
    assert (await raw.heartbeat()).lease_ms == 30_000


@pytest.mark.accepts("003-29")
@pytest.mark.parametrize(
    "request_", [Heartbeat("", "c", 1), Heartbeat("g", "", 1), Heartbeat("a%b", "c", 1)]
)
async def test_a_heartbeat_that_cannot_be_is_refused(
    raw: RawConnection, request_: Heartbeat
) -> None:
    with pytest.raises(InvalidNameError):
        await raw.ask(request_, Beaten)


async def test_a_leaving_older_incarnation_takes_nothing_from_its_successor(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(2))
    await raw.pull("orders", incarnation=1)
    held = await raw.pull("orders", incarnation=2)

    with pytest.raises(FencedError):
        await raw.heartbeat(incarnation=1, is_leaving=True)

    assert (await raw.settle(held.runs[0], incarnation=2)).settled == 2


async def test_a_seal_begins_a_new_segment_unless_the_open_one_is_empty(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(1))
    first = await raw.ask(Seal(), Sealed)
    again = await raw.ask(Seal(), Sealed)
    await raw.send("orders", numbered(1, 1))

    names = sorted(path.name for path in running.directory.glob("messages/*.log"))
    assert names == [f"{0:020d}.log", f"{first.end:020d}.log"]
    assert again == first
    assert (await raw.pull("orders")).bodies == numbered(2)


async def test_the_report_tells_what_was_done(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5), acks=Acks.DISK)
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", b""),)), Sent)
    got = await raw.pull("orders", max_messages=3)
    await raw.settle(got.runs[0], last=1, nacked={0: "no"})

    report = await raw.status()

    assert {
        name: report[name]
        for name in (
            "broker",
            "start",
            "connections",
            "messages_sent",
            "batches_sent",
            "sends_refused",
            "messages_delivered",
            "deliveries_settled",
            "deliveries_nacked",
            "pulls_waiting",
        )
    } == {
        "broker": "broker",
        "start": 1,
        "connections": 1,
        "messages_sent": 5,
        "batches_sent": 1,
        "sends_refused": 1,
        "messages_delivered": 3,
        "deliveries_settled": 2,
        "deliveries_nacked": 1,
        "pulls_waiting": 0,
    }
    assert report["groups"][0]["lag"] == 2

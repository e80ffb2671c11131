"""Messages that are due later: sent to the delay servers, cancelled, moved and looked at."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import pulque
from pulque import Fate, NoDelayServerError, Outgoing, UnavailableError, UsageError, aio
from pulque.wire import requests
from tests.unit.client.fake_broker import Drop, FakeBroker
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import TWO_YEARS, FakeDelay, delayed_routes

HOUR = timedelta(hours=1)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001  # what is to be refused


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as cluster:
        yield cluster


@pytest.fixture
def delays(cluster: FakeCluster) -> Iterator[list[FakeDelay]]:
    # One is called as a broker group is: they are different servers all the same.
    with FakeDelay("g0") as one, FakeDelay("d1") as other:
        cluster.meta.delayed_routes = delayed_routes([one, other])
        yield [one, other]


@pytest.fixture
def client(
    cluster: FakeCluster, delays: list[FakeDelay], tmp_path: Path
) -> Iterator[pulque.Client]:
    with pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        yield client


def stored(cluster: FakeCluster) -> int:
    return sum(cluster.bodies(number) for number in range(2))


def kept(delays: list[FakeDelay]) -> dict[bytes, int]:
    """Return what the delay servers have: bodies and due times."""
    return {message.body: due_ms for each in delays for due_ms, message in each.scheduled.values()}


def refuse_all(delays: list[FakeDelay]) -> None:
    """Have brokers refuse all that is scheduled."""
    for each in delays:
        each.refused = dict.fromkeys(each.scheduled, "no")


def test_a_delayed_message_goes_to_a_delay_server(
    cluster: FakeCluster, delays: list[FakeDelay], client: pulque.Client
) -> None:
    before_ms = time.time_ns() // 1_000_000
    receipt = client.send("orders", b"later", delay=HOUR, key="k", tags=["t"], headers={"a": "b"})
    assert stored(cluster) == 0
    (owner,) = [each for each in delays if each.scheduled]
    ((due_ms, message),) = owner.scheduled.values()
    assert (message.body, message.key, message.tags) == (b"later", "k", ("t",))
    assert message.headers == {"a": "b"}
    assert before_ms + 3_600_000 <= due_ms <= time.time_ns() // 1_000_000 + 3_600_000
    assert (receipt.due_at_ms, receipt.broker_group) == (due_ms, owner.name)
    assert receipt.id == message.id
    at_once = client.send("orders", b"now")
    assert at_once.due_at_ms == 0
    assert stored(cluster) == 1


def test_every_way_to_send_says_the_due_time(
    cluster: FakeCluster, delays: list[FakeDelay], client: pulque.Client
) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=700)
    receipts = [client.send("orders", b"send", at=at)]
    receipts += client.send_many("orders", [b"now", Outgoing(b"many", at=at), b"too"])[1:2]
    with client.producer() as producer:
        pending = [
            producer.send("orders", b"producer", at=at),
            *producer.send_many("orders", [Outgoing(b"producers", at=at), b"now"]),
        ]
        found = [each.result(10) for each in pending]
    assert found.pop().due_at_ms == 0
    receipts += found
    assert {each.due_at for each in receipts} == {at}
    assert set(kept(delays)) == {b"send", b"many", b"producer", b"producers"}
    assert stored(cluster) == 3


async def test_the_async_twin_does_the_same(
    cluster: FakeCluster, delays: list[FakeDelay], tmp_path: Path
) -> None:
    async with aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        receipt = await client.send("orders", b"send", level=18)
        assert receipt.due_at is not None
        many = await client.send_many("orders", [b"now", Outgoing(b"many", delay=60)])
        assert [bool(each.due_at_ms) for each in many] == [False, True]
        async with client.producer() as producer:
            pending = await producer.send("orders", b"producer", delay=60)
            await pending
        assert set(kept(delays)) == {b"send", b"many", b"producer"}
        assert stored(cluster) == 1
        assert await client.cancel(receipt) is Fate.CANCELLED
        moved = await client.reschedule(many[1], delay=7200)
        assert moved.fate is Fate.MOVED
        waiting = client.delayed("orders")
        assert sum(each.messages for each in await waiting.counts()) == 2
        assert [each.id for each in await waiting.next()][1] == many[1].id
        refuse_all(delays)
        assert [each.reason for each in await waiting.stuck(1)] == ["no"]
        shown = await waiting.show(many[1].id)
        assert shown is not None
        assert shown.due_at_ms == moved.due_at_ms


def test_past_times_go_at_once(
    cluster: FakeCluster, delays: list[FakeDelay], client: pulque.Client
) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    receipt = client.send("orders", b"x", at=yesterday)
    assert receipt.due_at is None
    client.send("orders", b"x", delay=0)
    with client.producer() as producer:
        assert producer.send("orders", b"x", at=yesterday).result(10).due_at_ms == 0
    assert stored(cluster) == 3
    assert not kept(delays)
    assert client.cancel(receipt) is Fate.TOO_LATE


def test_delayed_messages_spread_over_the_delay_servers(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipts = [client.send("orders", b"x", delay=60) for _ in range(6)]
    assert Counter(each.broker_group for each in receipts) == {"g0": 3, "d1": 3}
    delays[0].stop_listening()
    delays[0].drop_all()
    receipts = [client.send("orders", b"x", delay=60, timeout=8) for _ in range(4)]
    assert {each.broker_group for each in receipts} == {"d1"}
    with client.producer() as producer:
        found = [producer.send("orders", b"%d" % n, delay=60) for n in range(50)]
        assert {each.result(10).broker_group for each in found} == {"d1"}
    delays[0].listen_again()


def test_priorities_and_order_keys_are_kept(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"x", delay=60, priority=9, order_key="o")
    assert receipt.partition == "orders#p9"
    ((_, message),) = [found for each in delays for found in each.scheduled.values()]
    assert (message.priority, message.order_key, message.subject) == (9, "o", "orders")


def test_a_repeated_delayed_send_is_kept_once(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    client.send("orders", b"first", delay=60)
    lost = iter([True])

    def lose_the_answer(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and next(lost, False):
            raise Drop(handled=True)

    for each in delays:
        each.fault = lose_the_answer
    receipt = client.send("orders", b"second", delay=60)
    counts = Counter(message.body for each in delays for _, message in each.scheduled.values())
    assert counts[b"second"] == 1 or receipt.may_be_doubled


@pytest.mark.parametrize(
    "parts",
    [
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": True},
        {"at": NAIVE},
        {"level": 19},
        {"delay": 1, "level": 1},
        {"delay": timedelta(days=900)},
    ],
)
def test_nonsense_is_refused_before_it_is_sent(
    delays: list[FakeDelay], client: pulque.Client, parts: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        client.send("orders", b"x", **parts)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        client.send_many("orders", [b"ok", Outgoing(b"x", **parts)])  # type: ignore[arg-type]
    with client.producer() as producer:
        fine = producer.send("orders", b"fine", delay=60)
        with pytest.raises(UsageError):
            producer.send("orders", b"x", **parts)  # type: ignore[arg-type]
        assert fine.result(10).due_at_ms, "its neighbours go all the same"
    assert set(kept(delays)) == {b"fine"}


def test_the_limit_is_the_delay_servers(delays: list[FakeDelay], client: pulque.Client) -> None:
    ahead = timedelta(milliseconds=TWO_YEARS)
    client.send("orders", b"x", delay=ahead - HOUR)
    with pytest.raises(UsageError, match=r"due in 732\.0 days; at most 732\.0 days"):
        client.send("orders", b"x", delay=ahead + timedelta(minutes=1))


def test_without_a_delay_server_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with (
        FakeBroker() as broker,
        pulque.connect(broker.url, name="test", timeout=10, state_dir=tmp_path) as client,
    ):
        with pytest.raises(NoDelayServerError, match=r"pulque up.*pulque delay"):
            client.send("orders", b"x", delay=5)
        with pytest.raises(NoDelayServerError, match="pulque up"):
            client.cancel("00" * 16)
        with client.producer() as producer, pytest.raises(NoDelayServerError):
            producer.send("orders", b"x", delay=5)
        client.send("orders", b"now")


async def test_a_cluster_without_a_delay_server_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("blocking.brokers", "aio.brokers"):
        monkeypatch.setattr(f"pulque.client.{module}.DELAY_PATIENCE", 0.5)
    began = time.monotonic()
    with (
        FakeCluster(2) as cluster,
        pulque.connect(cluster.url, name="test", timeout=600, state_dir=tmp_path) as client,
    ):
        with pytest.raises(NoDelayServerError, match="orders is due later"):
            client.send("orders", b"x", delay=5)
        async with aio.connect(cluster.url, name="test", timeout=600, state_dir=tmp_path) as twin:
            with pytest.raises(NoDelayServerError, match="orders is due later"):
                await twin.send("orders", b"x", delay=5)
    assert time.monotonic() - began < 300  # against the 600 s that it may take


def test_producers_follow_delay_servers_that_come(
    cluster: FakeCluster, delays: list[FakeDelay], client: pulque.Client
) -> None:
    cluster.meta.delayed_routes = delayed_routes(delays[:1])
    with client.producer() as producer:
        assert producer.send("orders", b"x", delay=60).result(10).broker_group == "g0"
        cluster.meta.delayed_routes = delayed_routes(delays, 2)
        cluster.serve([0, 1])
        deadline = time.monotonic() + 10
        while producer.send("orders", b"x", delay=60).result(10).broker_group != "d1":
            assert time.monotonic() < deadline


# ── cancelling and moving ──────────────────────────────────────────────────────────────────


def test_cancel_tells_whether_it_was_in_time(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipts = [client.send("orders", b"%d" % n, delay=60) for n in range(6)]
    assert client.cancel(receipts[0]) is Fate.CANCELLED
    assert client.cancel(receipts[0]) is Fate.ALREADY_CANCELLED
    assert client.cancel(receipts[1].id) is Fate.CANCELLED
    for each in delays:
        each.gone.add(bytes.fromhex(receipts[2].id))
    assert client.cancel(receipts[2]) is Fate.TOO_LATE
    assert client.cancel("00" * 16) is Fate.UNKNOWN
    fates = client.cancel_many([receipts[3], receipts[4].id, "00" * 16, receipts[0]])
    assert fates == [
        Fate.CANCELLED,
        Fate.CANCELLED,
        Fate.UNKNOWN,
        Fate.ALREADY_CANCELLED,
    ]
    assert set(kept(delays)) == {b"2", b"5"}
    assert client.cancel_many([]) == []


def test_a_receipt_leads_to_its_own_server_only(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"x", delay=60)
    client.cancel(receipt)
    asked = {
        each.name: [r for r in each.requests if type(r).__name__ == "Cancel"] for each in delays
    }
    assert [name for name, some in asked.items() if some] == [receipt.broker_group]


def test_an_old_receipt_finds_a_message_that_was_moved(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"x", delay=60)
    moved = client.reschedule(receipt, delay=HOUR)
    assert moved.fate is Fate.MOVED
    assert kept(delays) == {b"x": moved.due_at_ms}
    assert client.reschedule(receipt, delay=HOUR).fate is Fate.MOVED
    assert client.cancel(receipt) is Fate.CANCELLED
    assert client.reschedule(receipt.id, level=1).fate is Fate.ALREADY_CANCELLED


def test_moving_to_the_past_means_now(delays: list[FakeDelay], client: pulque.Client) -> None:
    receipt = client.send("orders", b"x", delay=60)
    before = time.time_ns() // 1_000_000
    moved = client.reschedule(receipt, at=datetime.now(UTC) - HOUR)
    assert before <= moved.due_at_ms <= time.time_ns() // 1_000_000
    assert kept(delays) == {b"x": moved.due_at_ms}


def test_what_may_be_doubled_is_cancelled_everywhere(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"x", delay=60)._replace(may_be_doubled=True)
    message_id = bytes.fromhex(receipt.id)
    (owner,) = [each for each in delays if each.scheduled]
    (other,) = [each for each in delays if each is not owner]
    other.scheduled[message_id] = owner.scheduled[message_id]
    assert client.cancel(receipt) is Fate.CANCELLED
    assert not kept(delays)


def test_a_server_that_is_away_is_no_unknown_message(
    cluster: FakeCluster, delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"x", delay=60)
    others = [each for each in delays if each.name != receipt.broker_group]
    cluster.meta.delayed_routes = delayed_routes(others, 2)
    with pytest.raises(UnavailableError, match=f"delay server {receipt.broker_group} .*away"):
        client.cancel(receipt)


@pytest.mark.parametrize("message", ["", "xyz", "00" * 15, 17, None, b"\0" * 16])
def test_what_is_no_message_is_refused_by_name(client: pulque.Client, message: object) -> None:
    asks: list[Callable[..., object]] = [client.cancel, client.delayed().show]
    asks.append(lambda found: client.reschedule(found, delay=1))
    for ask in asks:
        with pytest.raises(UsageError, match="is no message; a receipt, or an id of 32") as caught:
            ask(message)
        assert repr(message) in str(caught.value)


def test_moving_wants_a_time(client: pulque.Client) -> None:
    with pytest.raises(UsageError, match="one of delay, at and level is wanted"):
        client.reschedule("00" * 16)
    with pytest.raises(UsageError, match="delay is -1"):
        client.reschedule("00" * 16, delay=-1)


# ── looking ────────────────────────────────────────────────────────────────────────────────


def test_counts_and_lists_are_those_of_all_servers(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + 2 * HOUR
    sent = [
        client.send(subject, b"x", at=start + hour * HOUR + timedelta(seconds=n))
        for subject in ("a", "b")
        for hour in range(3)
        for n in range(4)
    ]
    counts = client.delayed().counts()
    assert [(each.hour, each.subject, each.messages) for each in counts] == [
        (start + hour * HOUR, subject, 4) for hour in range(3) for subject in ("a", "b")
    ]
    assert [each.messages for each in client.delayed("b").counts(start + HOUR)] == [4, 4]
    assert client.delayed("c").counts() == []
    listed = client.delayed().next(7)
    expected = sorted(sent, key=lambda each: (each.due_at_ms, each.id))[:7]
    assert [(each.id, each.due_at_ms) for each in listed] == [
        (each.id, each.due_at_ms) for each in expected
    ]
    assert {each.delay_server for each in listed} == {"g0", "d1"}
    some = client.delayed("a").next(100, start=start + HOUR, end=start + 2 * HOUR)
    assert [each.subject for each in some] == ["a"] * 4


def test_what_is_stuck_is_listed_over_all_delay_servers(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    sent = [client.send("orders", b"x", delay=60 + i) for i in range(12)]
    assert client.delayed().stuck() == []
    refuse_all(delays)
    found = client.delayed("orders").stuck(7)
    assert [(each.id, each.reason) for each in found] == [(each.id, "no") for each in sent[:7]]
    assert {each.delay_server for each in found} == {"g0", "d1"}
    assert client.cancel(found[0].id) is Fate.CANCELLED
    with pytest.raises(UsageError, match="0 delayed messages at once; 1 to"):
        client.delayed().stuck(0)


def test_one_message_is_shown_with_its_content(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    receipt = client.send("orders", b"look", delay=60, key="k")
    for wanted in (receipt, receipt.id):
        shown = client.delayed().show(wanted)
        assert shown is not None
        assert shown.message is not None
        assert (shown.message.body, shown.message.key) == (b"look", "k")
        assert (shown.due_at_ms, shown.subject, shown.group) == (
            receipt.due_at_ms,
            "orders",
            None,
        )
    client.cancel(receipt)
    assert client.delayed().show(receipt) is None


def test_questions_are_checked(client: pulque.Client) -> None:
    with pytest.raises(UsageError, match="time zone"):
        client.delayed().counts(NAIVE)
    with pytest.raises(UsageError, match="the end must come after the start"):
        client.delayed().next(
            start=datetime(2027, 1, 2, tzinfo=UTC), end=datetime(2027, 1, 1, tzinfo=UTC)
        )
    with pytest.raises(UsageError, match="0 delayed messages at once; 1 to"):
        client.delayed().next(0)
    with pytest.raises(pulque.InvalidNameError):
        client.delayed("no%subject").counts()

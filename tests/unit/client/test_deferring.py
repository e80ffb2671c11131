"""Messages that a group wants again at a certain time: they wait at a delay server."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import pulque
from pulque import UsageError, aio
from pulque.errors import ErrorCode
from pulque.model.message import Message
from pulque.model.names import PartitionName
from pulque.model.returning import REASON_HEADER, RETURN_HEADER, Returning, parse_return
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import FakeDelay, delayed_routes

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001  # what is to be refused
RETRY = "%retry%orders%kitchen"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1) as cluster:
        yield cluster


@pytest.fixture
def delay(cluster: FakeCluster) -> Iterator[FakeDelay]:
    with FakeDelay("d") as delay:
        cluster.meta.delayed_routes = delayed_routes([delay])
        yield delay


@pytest.fixture
def client(cluster: FakeCluster, delay: FakeDelay, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        yield client


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def only(delay: FakeDelay) -> tuple[int, Message]:
    ((due_ms, message),) = delay.scheduled.values()
    return due_ms, message


def test_the_whole_message_waits_and_its_broker_hears_that_it_is_done(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    sent = client.send("orders", b"body", key="k", tags=["t"], headers={"a": "b"})
    when = datetime.now(UTC) + timedelta(days=30)
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack("shop is closed", at=when)
        assert message.is_finished
        wait_until(lambda: cluster.brokers[0].acked)
        due_ms, kept = only(delay)
    assert cluster.brokers[0].nacked == []
    assert abs(due_ms - when.timestamp() * 1000) <= 1
    assert (kept.id, kept.partition, kept.attempt) == (sent.id, RETRY, 1)
    assert (kept.body, kept.key, kept.tags) == (b"body", "k", ("t",))
    headers = kept.headers
    assert headers.pop(REASON_HEADER) == "shop is closed"
    assert parse_return(headers)[:3] == ("g0", "orders", 0)
    del headers[RETURN_HEADER]
    assert headers == {"a": "b"}


def test_its_broker_hears_of_it_only_after_the_delay_server_has_it(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    broker = cluster.brokers[0]
    client.send_many("orders", [b"a", b"b", b"c"])
    delay.stop_listening()
    delay.drop_all()
    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull(3)
        messages[0].ack()
        messages[1].nack(delay=timedelta(days=30))
        messages[2].ack()
        wait_until(lambda: broker.acked == [("orders", 0)])
        asked = len(broker.seen(requests.Pull))
        while len(broker.seen(requests.Pull)) < asked + 3:  # what may be settled goes with each
            assert consumer.pull(timeout=0.05) == []
        assert broker.acked == [("orders", 0)], "it, and what comes after it, is held"
        delay.listen_again()
        wait_until(lambda: broker.acked == [("orders", n) for n in range(3)])
    assert only(delay)[1].body == b"b"


def test_a_lost_answer_does_not_double_it(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    lost = iter([True])

    def lose_the_answer(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and next(lost, False):
            raise Drop(handled=True)

    delay.fault = lose_the_answer
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack(at=datetime.now(UTC) + timedelta(hours=5))
        wait_until(lambda: cluster.brokers[0].acked)
    assert delay.partition(RETRY).end == 1


def test_another_delay_server_takes_it_if_one_is_away(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    with FakeDelay("other") as other:
        cluster.meta.delayed_routes = delayed_routes([delay, other], 2)
        delay.stop_listening()
        with client.consumer("orders", "kitchen") as consumer:
            (message,) = consumer.pull(1)
            message.nack(at=datetime.now(UTC) + timedelta(hours=5))
            wait_until(lambda: cluster.brokers[0].acked)
        assert only(other)[1].body == b"x"
        delay.listen_again()


def test_short_delays_stay_with_the_broker(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send_many("orders", [b"a", b"b", b"c"])
    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull(3)
        messages[0].nack("short", delay=3600)
        messages[1].nack("long", delay=3601)
        messages[2].nack("past", at=datetime.now(UTC) - timedelta(days=1))
        wait_until(lambda: len(cluster.brokers[0].nacked) == 2)
    assert [each[1:] for each in cluster.brokers[0].nacked] == [
        (0, "short", 3_600_000),
        (2, "past", 0),
    ]
    assert only(delay)[1].body == b"b"


def test_at_the_end_it_is_taken_there_before_the_consumer_leaves(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack(at=datetime.now(UTC) + timedelta(hours=5))
    assert only(delay)[1].body == b"x"
    assert cluster.brokers[0].acked == [("orders", 0)]


async def test_the_async_twin_does_the_same(
    cluster: FakeCluster, delay: FakeDelay, tmp_path: Path
) -> None:
    async with aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        await client.send_many("orders", [b"a", b"b"])
        async with client.consumer("orders", group="kitchen") as consumer:
            one, other = await consumer.pull(2)
            one.nack("later", at=datetime.now(UTC) + timedelta(days=1))
            deadline = time.monotonic() + LIMIT
            while not cluster.brokers[0].acked:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            other.nack(delay=timedelta(days=2))
    assert {message.body for _, message in delay.scheduled.values()} == {b"a", b"b"}
    assert cluster.brokers[0].acked == [("orders", 0), ("orders", 1)]


def test_without_a_delay_server_it_waits_at_its_broker_for_as_long_as_that_lets_it(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    cluster.meta.delayed_routes = None
    client.send("orders", b"x")
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack("later", at=datetime.now(UTC) + timedelta(days=1))
        wait_until(lambda: cluster.brokers[0].nacked)
    assert cluster.brokers[0].nacked == [("orders", 0, "later", 3_600_000)]


def test_a_refusal_for_good_does_not_hold_it_for_ever(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")

    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise pulque.InvalidRequestError("too far ahead")

    delay.fault = refuse
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack("later", delay=timedelta(days=1))
        wait_until(lambda: cluster.brokers[0].nacked)
    assert cluster.brokers[0].nacked == [("orders", 0, "later", 3_600_000)]


def defer(
    consumer: pulque.Consumer, cluster: FakeCluster, delay: FakeDelay, tries: int
) -> list[tuple[str, int]]:
    """Defer the second of three messages; return what its broker knows after some refusals."""
    messages = consumer.pull(3)
    messages[0].ack()
    messages[1].nack("later", at=datetime.now(UTC) + timedelta(hours=5))
    messages[2].ack()
    wait_until(lambda: delay.refusals >= tries)
    return list(cluster.brokers[0].acked)


def test_its_broker_does_not_hear_of_it_while_the_delay_server_has_no_room(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send_many("orders", [b"a", b"second", b"c"])
    delay.refuses[b"second"] = ErrorCode.STORAGE_FULL
    with client.consumer("orders", "kitchen") as consumer:
        # That it is tried again and again shows that it is not done here.
        assert defer(consumer, cluster, delay, 3) in ([], [("orders", 0)])
        delay.refuses.clear()
        wait_until(lambda: cluster.brokers[0].acked == [("orders", n) for n in range(3)])
    assert only(delay)[1].body == b"second"
    assert cluster.brokers[0].nacked == []


def test_what_a_delay_server_had_no_room_for_to_the_end_comes_again(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send_many("orders", [b"a", b"second", b"c"])
    delay.refuses[b"second"] = ErrorCode.STORAGE_FULL
    with client.consumer("orders", "kitchen") as consumer:
        defer(consumer, cluster, delay, 1)
    assert ("orders", 1) not in cluster.brokers[0].acked
    assert not delay.scheduled


def test_what_a_delay_server_refuses_for_good_is_a_nack_at_its_broker(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send_many("orders", [b"a", b"second", b"c"])
    delay.refuses[b"second"] = ErrorCode.INVALID_REQUEST
    with client.consumer("orders", "kitchen") as consumer:
        defer(consumer, cluster, delay, 1)
        wait_until(lambda: cluster.brokers[0].nacked)
        wait_until(lambda: cluster.brokers[0].acked == [("orders", 0), ("orders", 2)])
    assert cluster.brokers[0].nacked == [("orders", 1, "later", 3_600_000)]


def test_a_deferral_is_on_the_delay_servers_disk_before_it_counts(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack(at=datetime.now(UTC) + timedelta(hours=5))
    asked = [each.acks for each in delay.requests if isinstance(each, requests.Send)]
    assert asked == [requests.Acks.DISK]


async def test_the_async_twin_keeps_what_is_refused(
    cluster: FakeCluster, delay: FakeDelay, tmp_path: Path
) -> None:
    broker = cluster.brokers[0]

    async def until(condition: Callable[[], object]) -> None:
        await asyncio.to_thread(wait_until, condition)

    async with aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        await client.send_many("orders", [b"full", b"bad"])
        delay.refuses |= {b"full": ErrorCode.STORAGE_FULL, b"bad": ErrorCode.INVALID_REQUEST}
        async with client.consumer("orders", group="kitchen") as consumer:
            for message in await consumer.pull(2):
                message.nack("later", at=datetime.now(UTC) + timedelta(days=1))
            await until(lambda: delay.refusals >= 4)
            assert not broker.acked
            delay.refuses.clear()
            await until(lambda: broker.acked == [("orders", 0)] and broker.nacked)
    assert [message.body for _, message in delay.scheduled.values()] == [b"full"]
    assert broker.nacked == [("orders", 1, "later", 3_600_000)]
    asked = {each.acks for each in delay.requests if isinstance(each, requests.Send)}
    assert asked == {requests.Acks.DISK}


def test_who_thinks_better_of_it_acks(
    cluster: FakeCluster, delay: FakeDelay, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    delay.stop_listening()
    delay.drop_all()
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack(at=datetime.now(UTC) + timedelta(days=1))
        time.sleep(0.2)
        message.ack()
        wait_until(lambda: cluster.brokers[0].acked)
    delay.listen_again()
    assert not delay.scheduled


@pytest.mark.parametrize("at", [NAIVE, "tomorrow", 5, True])
def test_what_is_no_instant_is_refused_and_the_message_is_still_open(
    cluster: FakeCluster, client: pulque.Client, at: object
) -> None:
    client.send("orders", b"x")
    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        with pytest.raises(UsageError, match=r"at is .*time zone"):
            message.nack(at=at)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"only one of them"):
            message.nack(delay=1, at=datetime.now(UTC))
        with pytest.raises(UsageError, match=r"63,244,800 s are allowed"):
            message.nack(at=datetime.now(UTC) + timedelta(days=733))
        assert not message.is_finished
        message.ack()
    assert cluster.brokers[0].acked == [("orders", 0)]


def test_a_lone_broker_has_no_delay_server(tmp_path: Path) -> None:
    with (
        FakeBroker() as broker,
        pulque.connect(broker.url, name="test", timeout=10, state_dir=tmp_path) as client,
    ):
        client.send_many("orders", [b"a"])
        with client.consumer("orders", "kitchen") as consumer:
            (message,) = consumer.pull(1)
            with pytest.raises(UsageError, match=r"3,600 s are allowed, as there is no delay"):
                message.nack(at=datetime.now(UTC) + timedelta(days=1))
            message.nack("soon", at=datetime.now(UTC) + timedelta(seconds=1800))
        ((_, _, reason, delay_ms),) = broker.nacked
        assert reason == "soon"
        assert 0 < delay_ms <= 1_800_001


@pytest.mark.parametrize("when", [NAIVE, "tomorrow", None])
def test_retry_at_wants_an_instant(when: object) -> None:
    with pytest.raises(UsageError, match=r"when is .*time zone"):
        pulque.RetryAt(when)  # type: ignore[arg-type]


def test_a_return_is_read_back() -> None:
    told = Returning("g", PartitionName("%retry%a%b"), 7, "host/app")  # type: ignore[arg-type]
    assert parse_return({RETURN_HEADER: told.header()}) == told
    for text in ("", "g orders x c", "g orders 1", "g orders 1 c d", "g %no% 1 c", "g orders ² c"):
        with pytest.raises(pulque.RejectedError):
            parse_return({RETURN_HEADER: text})


async def take_turns() -> None:
    """Let other tasks go on as far as they can; fail if they leave no thread free."""
    async with asyncio.timeout(LIMIT):
        for _ in range(20):
            await asyncio.to_thread(lambda: None)


async def test_what_is_on_its_way_is_waited_for_although_a_close_was_cancelled(
    cluster: FakeCluster, delay: FakeDelay, tmp_path: Path
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def hold(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            is_asked.set()
            assert may_answer.wait(LIMIT)

    delay.fault = hold
    # One thread more than what is on its way takes: a second such thread would leave none free.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        await client.send("orders", b"x")
        consumer = client.consumer("orders", "kitchen")
        (message,) = await consumer.pull(1)
        message.nack(at=datetime.now(UTC) + timedelta(hours=5))
        assert await asyncio.to_thread(is_asked.wait, LIMIT)
        closing = asyncio.create_task(consumer.close())
        await take_turns()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        closing = asyncio.create_task(consumer.close())
        await take_turns()
        may_answer.set()
        await closing
    assert len(delay.seen(requests.Send)) == 1
    assert cluster.brokers[0].acked == [("orders", 0)]

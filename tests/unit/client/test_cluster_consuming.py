"""One consumer pulls from many brokers, and each hears of what it delivered itself."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.wire.requests import Pull
from tests.unit.client.fake_cluster import FakeCluster

LIMIT = 20.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(3) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        yield client


def take(consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    """Return so many messages, acked."""
    messages: list[pulque.ReceivedMessage] = []
    deadline = time.monotonic() + LIMIT
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
        some = consumer.pull(timeout=0.5)
        consumer.ack_all(some)
        messages += some
    return messages


@pytest.mark.accepts("001-20", "001-21", "004-35", "004-39")
def test_one_consumer_gets_what_all_brokers_have(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    receipts = client.send_many("orders", [b"%d" % number for number in range(3000)])
    with client.consumer("orders", "kitchen") as consumer:
        messages = take(consumer, 3000)
        assert consumer.is_connected
        consumer.settle(timeout=LIMIT)
        assert consumer.held == 0
    positions = {(each.broker_group, each.sequence) for each in messages}
    assert positions == {(each.broker_group, each.sequence) for each in receipts}


@pytest.mark.accepts("000-31")
def test_each_broker_hears_of_what_it_delivered_and_of_nothing_else(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    # Not alike: what was said to another one would be wrong there.
    for number, broker in enumerate(cluster.brokers):
        broker.store_bodies("orders", [b"%d" % number] * (10 + 20 * number))
    with client.consumer("orders", "kitchen") as consumer:
        messages: list[pulque.ReceivedMessage] = []
        while len(messages) < 90:
            messages += consumer.pull(timeout=LIMIT)
        # One is away, and gets what is its own when it is back; the others get none of it.
        cluster.kill(1)
        for message in messages:
            if message.sequence % 3 or message.body == b"1":
                message.ack()
            else:
                message.nack("no milk")
        first, second, third = cluster.brokers
        first.wait_until(lambda: len(first.settled) == 10)
        third.wait_until(lambda: len(third.settled) == 50)
        assert not second.settled
        cluster.revive(1)
        second.wait_until(lambda: len(second.settled) == 30)
    for number, broker in enumerate(cluster.brokers):
        own = range(10 + 20 * number)
        nacked = [] if number == 1 else [each for each in own if not each % 3]
        assert broker.acked == [("orders", each) for each in own if each not in nacked]
        assert [each[1] for each in broker.nacked] == nacked


@pytest.mark.parametrize(
    ("horizon", "wishes", "most"),
    [
        pytest.param(1e9, {}, 20, id="fast"),
        pytest.param(0.0, {}, 10, id="slow"),
        pytest.param(1e9, {"max_held": 45}, 15, id="told to hold few"),
        pytest.param(1e9, {"mode": "once"}, 10, id="lost with the consumer"),
    ],
)
def test_who_is_fast_asks_each_broker_for_more(
    cluster: FakeCluster,
    client: pulque.Client,
    monkeypatch: pytest.MonkeyPatch,
    horizon: float,
    wishes: dict[str, Any],
    most: int,
) -> None:
    monkeypatch.setattr("pulque.client.receiving.prefetch.HORIZON", horizon)
    for _ in range(9):
        client.send_many("orders", [b"x"] * 100)
    with client.consumer("orders", "kitchen", max_messages=10, **wishes) as consumer:
        take(consumer, 900)
    pulls = [
        request
        for broker in cluster.brokers
        for request in broker.requests
        if isinstance(request, Pull)
    ]
    assert max(each.max_messages for each in pulls) == most


def test_one_broker_is_asked_for_no_more_than_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pulque.client.receiving.prefetch.HORIZON", 1e9)
    with (
        FakeCluster(1) as cluster,
        pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client,
        client.consumer("orders", "kitchen", max_messages=10) as consumer,
    ):
        client.send_many("orders", [b"x"] * 100)
        take(consumer, 50)
        assert len(consumer.pull(10, timeout=LIMIT)) == 10
        consumer.settle(timeout=LIMIT)
        assert consumer.held == 10


def test_iterating_hands_out_what_all_brokers_have(client: pulque.Client) -> None:
    for _ in range(9):
        client.send_many("orders", [b"x"] * 100)
    handed = []
    with client.consumer("orders", "kitchen", max_messages=10) as consumer:
        for message in consumer:
            handed.append(message.broker_group)
            message.ack()
            if len(handed) == 900:
                break
    assert Counter(handed) == {"g0": 300, "g1": 300, "g2": 300}
    # How they take turns is tested without a clock: tests/property/test_client_shares.py.


def test_a_broker_that_comes_is_pulled_from(cluster: FakeCluster, client: pulque.Client) -> None:
    cluster.serve([0])
    client.send("orders", b"old")
    with client.consumer("orders", "kitchen", start="earliest") as consumer:
        assert [each.body for each in take(consumer, 1)] == [b"old"]
        cluster.serve([0, 1])
        sent: list[pulque.Receipt] = []
        deadline = time.monotonic() + LIMIT
        while not sent or sent[-1].broker_group != "g1":
            assert time.monotonic() < deadline
            sent.append(client.send("orders", b"new"))
            time.sleep(0.02)
        assert "g1" in {each.broker_group for each in take(consumer, len(sent))}


def test_others_go_on_while_a_broker_is_away_and_it_is_found_again(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 3000)
    with client.consumer("orders", "kitchen") as consumer:
        take(consumer, 3000)
        cluster.kill(1)
        receipts = [client.send("orders", b"y") for _ in range(8)]
        assert {each.broker_group for each in receipts} == {"g0", "g2"}
        take(consumer, 8)
        assert consumer.is_connected
        cluster.revive(1)
        deadline = time.monotonic() + LIMIT
        count = 1
        while client.send("orders", b"z").broker_group != "g1":
            count += 1
            assert time.monotonic() < deadline
        take(consumer, count)


def test_a_broker_that_left_the_route_is_pulled_until_it_is_gone(tmp_path: Path) -> None:
    with (
        FakeCluster(2, lease_ms=600) as cluster,
        pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client,
        client.consumer("orders", "kitchen") as consumer,
    ):
        client.send_many("orders", [b"x"] * 2000)
        take(consumer, 2000)
        consumer.settle(timeout=LIMIT)
        cluster.serve([0])
        # It is connected still, so that its last messages come.
        cluster.brokers[1].store_bodies("orders", [b"last"])
        assert [each.body for each in take(consumer, 1)] == [b"last"]
        consumer.settle(timeout=LIMIT)
        cluster.kill(1)
        deadline = time.monotonic() + LIMIT
        while len(consumer._inlets._inlets) > 1:  # noqa: SLF001
            assert time.monotonic() < deadline
            assert consumer.pull(timeout=0.05) == []
        assert consumer.is_connected


@pytest.mark.accepts("000-32")
def test_a_nack_whose_broker_is_away_goes_to_another_with_the_message(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    client.send_many("orders", [b"%d" % number for number in range(3000)])
    with client.consumer("orders", "kitchen") as consumer:
        messages: list[pulque.ReceivedMessage] = []
        while len(messages) < 3000:
            messages += consumer.pull(timeout=1)
        mine = [each for each in messages if each.broker_group == "g1"]
        cluster.kill(1)
        consumer.ack_all(messages)
        mine[5].nack("no stock", delay=7)
        others = (cluster.brokers[0], cluster.brokers[2])
        deadline = time.monotonic() + LIMIT
        while not any(each.adopted for each in others):
            assert time.monotonic() < deadline
            consumer.pull(timeout=0.1)
        ((adopt,),) = [each.adopted for each in others if each.adopted]
        assert (adopt.reason, adopt.delay_ms, adopt.attempt) == ("no stock", 7000, 1)
        assert adopt.origin == ("g1", "orders", mine[5].sequence)
        assert bytes(adopt.batch).endswith(mine[5].body)

        cluster.revive(1)
        consumer.settle(timeout=LIMIT)
        # Its own broker, back again, hears that it is done: nobody retries it twice.
        assert cluster.brokers[1].nacked == []
        assert ("orders", mine[5].sequence) in cluster.brokers[1].acked


async def test_the_twin_does_the_same(cluster: FakeCluster, tmp_path: Path) -> None:
    async with (
        aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client,
        client.consumer("orders", "kitchen") as consumer,
    ):
        await client.send_many("orders", [b"%d" % number for number in range(3000)])
        messages: list[pulque.ReceivedMessage] = []
        while len(messages) < 3000:
            messages += await consumer.pull(timeout=1)
        mine = [each for each in messages if each.broker_group == "g1"]
        assert {each.broker_group for each in messages} == {"g0", "g1", "g2"}
        cluster.kill(1)
        consumer.ack_all(messages)
        mine[5].nack("no stock")
        others = (cluster.brokers[0], cluster.brokers[2])
        deadline = time.monotonic() + LIMIT
        while not any(each.adopted for each in others):
            assert time.monotonic() < deadline
            await consumer.pull(timeout=0.1)
        cluster.revive(1)
        await consumer.settle(timeout=LIMIT)
        assert cluster.brokers[1].nacked == []
        assert sum(len(each.acked) for each in cluster.brokers) == 3000
        await client.send("orders", b"one more")
        async for message in consumer:
            assert message.body == b"one more"
            break

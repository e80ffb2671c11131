"""Sending to many brokers: spread, round what is away or refuses, with what was heard last."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import pytest

import pulque
from pulque import aio
from pulque.client.routing.watch_requests import ASK_EVERY
from pulque.errors import (
    DisconnectedError,
    NotAllowedError,
    ReadOnlyError,
    UnavailableError,
    UnsupportedError,
)
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.faults import Times


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(3) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        yield client


@pytest.mark.accepts("001-13", "001-17", "004-34", "004-38", "004-73")
def test_single_messages_go_round(cluster: FakeCluster, client: pulque.Client) -> None:
    receipts = [client.send("orders", b"x") for _ in range(9)]
    assert Counter(each.broker_group for each in receipts) == {"g0": 3, "g1": 3, "g2": 3}
    assert [cluster.bodies(number) for number in range(3)] == [3, 3, 3]


@pytest.mark.accepts("004-21")
def test_many_calls_go_over_the_same_connections(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    for number in range(9):
        receipts = [client.send(f"orders.{number}", b"x") for _ in cluster.brokers]
        assert {each.broker_group for each in receipts} == {"g0", "g1", "g2"}
    assert len(cluster.meta.seen(requests.Route)) == 9
    assert [len(each.seen(requests.Hello)) for each in cluster.brokers] == [1, 1, 1]
    # One for calls, and one on which a watch waits.
    assert len(cluster.meta.seen(requests.Hello)) <= 2


@pytest.mark.accepts("004-37")
def test_a_route_is_asked_for_once_and_then_watched(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    for subject in ("orders", "refunds", "orders", "refunds"):
        for _ in range(5):
            client.send(subject, b"x")
    asked = [e.subject for e in cluster.meta.requests if isinstance(e, requests.Route)]
    assert asked == ["orders", "refunds"], "each is asked for once, and then known"

    def is_watched() -> bool:
        watches = [each for each in cluster.meta.requests if isinstance(each, requests.Watch)]
        return any({str(known.subject) for known in each.known} >= set(asked) for each in watches)

    cluster.meta.wait_until(is_watched)
    watches = [each for each in cluster.meta.requests if isinstance(each, requests.Watch)]
    assert {each.wait_ms for each in watches} == {30_000}
    assert ASK_EVERY == 30, "where a server cannot be watched"


@pytest.mark.accepts("004-37")
def test_routes_are_asked_for_now_and_then_where_they_cannot_be_watched(
    cluster: FakeCluster, client: pulque.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulque.client.blocking.route_watcher.ASK_EVERY", 0.02)

    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Watch):
            raise UnsupportedError("no watches here")

    cluster.meta.fault = refuse
    cluster.serve([0])
    assert client.send("orders", b"x").broker_group == "g0"
    cluster.serve([1, 2])
    _until_sent_to(client, {"g1", "g2"})


@pytest.mark.accepts("002-08", "002-19")
def test_an_order_key_always_goes_to_the_same_broker(client: pulque.Client) -> None:
    found = {
        key: {client.send("orders", b"x", order_key=key).broker_group for _ in range(4)}
        for key in "abcdefgh"
    }
    assert all(len(groups) == 1 for groups in found.values())
    assert len(set.union(*found.values())) > 1


@pytest.mark.accepts("002-20")
def test_many_messages_are_dealt_to_brokers(client: pulque.Client) -> None:
    receipts = client.send_many("orders", [b"x"] * 3000)
    assert Counter(each.broker_group for each in receipts) == {"g0": 1000, "g1": 1000, "g2": 1000}
    mixed = [pulque.Outgoing(b"x", order_key=f"k{number % 7}") for number in range(100)]
    receipts = client.send_many("orders", mixed)
    by_key = {(number % 7, each.broker_group) for number, each in enumerate(receipts)}
    assert len(by_key) == 7


@pytest.mark.accepts("004-30")
def test_no_send_fails_when_a_broker_is_away(cluster: FakeCluster, client: pulque.Client) -> None:
    for _ in range(3):
        client.send("orders", b"before")
    cluster.kill(1)
    receipts = [client.send("orders", b"after", timeout=5) for _ in range(12)]
    assert {each.broker_group for each in receipts} == {"g0", "g2"}
    ordered = [client.send("orders", b"x", order_key=f"k{n}", timeout=5) for n in range(12)]
    assert {each.broker_group for each in ordered} == {"g0", "g2"}
    cluster.revive(1)
    deadline = time.monotonic() + 20
    while client.send("orders", b"back").broker_group != "g1":
        assert time.monotonic() < deadline


def test_a_lost_answer_is_told_apart_from_a_lost_message(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    for _ in range(3):
        client.send("orders", b"before")

    # It stores the message, does not answer, and is away from then on.
    def vanish(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            cluster.brokers[0].stop_listening()
            raise Drop(handled=True)

    cluster.brokers[0].fault = vanish
    receipts = [client.send("orders", b"x", timeout=5) for _ in range(6)]
    assert [each.may_be_doubled for each in receipts].count(True) == 1
    stored = sum(cluster.bodies(number) for number in range(3))
    assert stored == 3 + 6 + 1


def test_a_lost_answer_of_a_broker_that_is_back_at_once_doubles_nothing(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    for _ in range(3):
        client.send("orders", b"before")
    drops = iter([True])

    def hiccup(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and next(drops, False):
            raise Drop(handled=True)

    cluster.brokers[0].fault = hiccup
    receipts = [client.send("orders", b"x") for _ in range(6)]
    assert not any(each.may_be_doubled for each in receipts)
    assert sum(cluster.bodies(number) for number in range(3)) == 9


def test_a_broker_that_takes_no_messages_is_passed_over(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise ReadOnlyError("no sends now")

    cluster.brokers[2].fault = refuse
    receipts = [client.send("orders", b"x") for _ in range(6)]
    assert {each.broker_group for each in receipts} == {"g0", "g1"}
    assert len(cluster.brokers[2].seen(requests.Send)) == 1, "it is left alone then"


@pytest.mark.accepts("004-37")
def test_the_client_hears_of_a_broker_that_comes_and_of_one_that_is_read_only(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    cluster.serve([0])
    assert client.send("orders", b"x").broker_group == "g0"
    cluster.serve([0, 1])
    _until_sent_to(client, {"g0", "g1"})
    cluster.serve([0, 1, 2], writable=[2])
    _until_sent_to(client, {"g2"})


def _until_sent_to(client: pulque.Client, groups: set[str]) -> None:
    deadline = time.monotonic() + 20
    while {client.send("orders", b"x").broker_group for _ in range(6)} != groups:
        assert time.monotonic() < deadline, "the route was not heard of"
        time.sleep(0.02)


def test_with_no_meta_server_messages_go_where_they_went(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    client.send("orders", b"x")
    cluster.meta.stop_listening()
    cluster.meta.drop_all()
    receipts = [client.send("orders", b"x") for _ in range(6)]
    assert {each.broker_group for each in receipts} == {"g0", "g1", "g2"}
    with pytest.raises(UnavailableError, match=r"who serves unheard\.of could not be asked"):
        client.send("unheard.of", b"x", timeout=0.3)
    cluster.meta.listen_again()
    assert client.send("unheard.of", b"x").broker_group in {"g0", "g1", "g2"}


@pytest.mark.accepts("004-20")
def test_any_of_the_servers_in_the_url_will_do_and_which_is_left_to_chance(
    tmp_path: Path,
) -> None:
    with FakeBroker() as first, FakeBroker() as second:
        url = f"{first.url},127.0.0.1:{second.port}"
        for _ in range(40):
            with pulque.connect(url, state_dir=tmp_path):
                pass
        assert first.seen(requests.Hello)
        assert second.seen(requests.Hello)
        first.stop_listening()
        for _ in range(4):
            with pulque.connect(url, state_dir=tmp_path) as client:
                client.send("orders", b"x")


# ── the producer ───────────────────────────────────────────────────────────────────────────


@pytest.mark.accepts("002-21", "004-30")
def test_a_producer_loses_nothing_when_a_broker_goes_away(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    with client.producer(max_batch=10, linger=0.001) as producer:
        pendings = [producer.send("orders", b"%d" % number) for number in range(300)]
        cluster.kill(1)
        pendings += [producer.send("orders", b"%d" % number) for number in range(300, 900)]
        receipts = [pending.result(20) for pending in pendings]
    later = Counter(each.broker_group for each in receipts[600:])
    assert set(later) <= {"g0", "g2"} or later["g1"] < 300
    _check_stored(cluster, receipts)


def _check_stored(cluster: FakeCluster, receipts: list[pulque.Receipt]) -> None:
    """Every receipt names a place of its own, and nothing is stored twice without a word."""
    assert len({each.position for each in receipts}) == len(receipts)
    stored = sum(cluster.bodies(number) for number in range(3))
    doubled = sum(each.may_be_doubled for each in receipts)
    assert len(receipts) <= stored <= len(receipts) + doubled


def test_a_producer_follows_routes_and_refusals(
    cluster: FakeCluster, client: pulque.Client
) -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise ReadOnlyError("no sends now")

    cluster.brokers[0].fault = refuse
    with client.producer(max_batch=5, linger=0) as producer:
        receipts = producer.send_many("orders", [b"x"] * 200).result(20)
        assert {each.broker_group for each in receipts} == {"g1", "g2"}
        assert not any(each.may_be_doubled for each in receipts)
        cluster.brokers[0].fault = None
        cluster.serve([0])
        deadline = time.monotonic() + 20
        while receipts[-1].broker_group != "g0":
            assert time.monotonic() < deadline
            receipts.append(producer.send("orders", b"x").result(5))
            time.sleep(0.02)
    _check_stored(cluster, receipts)


def test_a_broker_that_stands_still_keeps_nothing_for_long(
    cluster: FakeCluster, client: pulque.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulque.client.blocking.producer_connections.ANSWER_LIMIT", 0.3)
    release = threading.Event()

    def stand_still(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            release.wait(20)

    cluster.brokers[0].fault = stand_still
    try:
        with client.producer(max_batch=5, linger=0) as producer:
            receipts = producer.send_many("orders", [b"x"] * 100).result(8)
        assert {each.broker_group for each in receipts} == {"g1", "g2"}
    finally:
        release.set()


@dataclass
class Moving:
    """A broker that stands still while order keys go over to another."""

    cluster: FakeCluster
    release: threading.Event = field(default_factory=threading.Event)
    heard: threading.Event = field(default_factory=threading.Event)

    def stand_still(self) -> None:
        def stand_still(request: requests.Request) -> None:
            if isinstance(request, requests.Send):
                self.release.wait(LIMIT)

        self.cluster.brokers[0].fault = stand_still

    def move(self) -> None:
        """Have each broker take the other's keys; ``heard`` is set when the client knows."""

        def listen(request: requests.Request) -> None:
            if isinstance(request, requests.Watch):
                versions = {known.version for known in request.known}
                if self.cluster.version in versions:
                    self.heard.set()

        self.cluster.meta.fault = listen
        self.cluster.serve([1, 0])


@pytest.fixture
def moving(cluster: FakeCluster) -> Iterator[Moving]:
    cluster.serve([0, 1])
    moving = Moving(cluster)
    yield moving
    moving.release.set()


def key_at(half: int) -> str:
    """Return an order key that belongs to the first, or the second, of two partitions."""
    keys = (f"key-{number}" for number in range(1000))
    return next(key for key in keys if google_crc32c.value(key.encode()) % 1024 // 512 == half)


def test_what_was_dealt_out_anew_goes_though_nothing_else_is_sent(
    moving: Moving, client: pulque.Client
) -> None:
    with client.producer(max_batch=1, linger=0, max_in_flight=1) as producer:
        producer.send("orders", b"other", order_key=key_at(1)).result(LIMIT)
        moving.stand_still()
        pendings = [producer.send("orders", b"%d" % n, order_key=key_at(0)) for n in range(3)]
        moving.move()
        assert moving.heard.wait(LIMIT)
        moving.release.set()
        producer.flush(LIMIT)
    assert {each.result().broker_group for each in pendings[1:]} == {"g1"}


async def test_the_twin_sends_what_was_dealt_out_anew(moving: Moving, tmp_path: Path) -> None:
    async with (
        aio.connect(moving.cluster.url, name="test", timeout=10, state_dir=tmp_path) as client,
        client.producer(max_batch=1, linger=0, max_in_flight=1) as producer,
    ):
        first = await producer.send("orders", b"other", order_key=key_at(1))
        await first.result(LIMIT)
        moving.stand_still()
        pendings = [
            await producer.send("orders", b"%d" % n, order_key=key_at(0)) for n in range(3)
        ]
        moving.move()
        assert await asyncio.to_thread(moving.heard.wait, LIMIT)
        moving.release.set()
        await producer.flush(LIMIT)
        found = [await each.result() for each in pendings]
    assert {each.broker_group for each in found[1:]} == {"g1"}


# ── the twin ───────────────────────────────────────────────────────────────────────────────


async def test_the_twin_spreads_and_goes_round_what_is_away(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    async with aio.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path) as client:
        receipts = [await client.send("orders", b"x") for _ in range(9)]
        assert {each.broker_group for each in receipts} == {"g0", "g1", "g2"}
        cluster.kill(2)
        async with client.producer(max_batch=10) as producer:
            pending = await producer.send_many("orders", [b"x"] * 500)
            found = await pending.result(20)
        assert {each.broker_group for each in found} <= {"g0", "g1"}
        cluster.serve([0])
        async with client.producer(max_batch=10) as producer:
            for _ in range(1000):
                receipt = await (await producer.send("orders", b"x")).result(5)
                receipts.append(receipt)
                if {each.broker_group for each in receipts[-20:]} == {"g0"}:
                    break
            assert {each.broker_group for each in receipts[-20:]} == {"g0"}
        _check_stored(cluster, [*receipts, *found])


def test_a_server_that_cannot_ask_further_is_not_asked_all_the_time(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    away = DisconnectedError("the meta server at nowhere is away")
    cluster.meta.fault = Times(requests.Route, away, times=10**9)
    with (
        pulque.connect(cluster.url, name="test", timeout=5, state_dir=tmp_path) as client,
        pytest.raises(UnavailableError, match="who serves new could not be asked"),
    ):
        client.send("new", b"x")
    # Without a pause there would be thousands.
    assert 1 <= len(cluster.meta.seen(requests.Route)) < 100


# -- acks="replica" where only some broker groups have followers --------------------------------

SHELLS = ["send", "send_many", "producer", "aio send", "aio producer"]


def send_by(shell: str, url: str, order_key: str | None = None, timeout: float = 10) -> set[str]:
    """Send six messages that must be on several disks; return which broker groups have them."""
    messages = [pulque.Outgoing(b"x", order_key=order_key)] * 6
    if shell.startswith("aio"):
        return asyncio.run(_send_by_aio(shell, url, messages, timeout))
    with pulque.connect(url, timeout=timeout, acks="replica") as client:
        match shell:
            case "send":
                found = [client.send("orders", b"x", order_key=order_key) for _ in range(6)]
            case "send_many":
                found = client.send_many("orders", messages)
            case _:
                with client.producer(max_batch=1) as producer:
                    sent = [producer.send("orders", b"x", order_key=order_key) for _ in range(6)]
                    found = [each.result(timeout) for each in sent]
    return {each.broker_group for each in found}


async def _send_by_aio(
    shell: str, url: str, messages: list[pulque.Outgoing], timeout: float
) -> set[str]:
    key = messages[0].order_key
    async with await aio.connect(url, timeout=timeout, acks="replica") as client:
        if shell == "aio send":
            found = [await client.send("orders", b"x", order_key=key) for _ in messages]
        else:
            async with client.producer(max_batch=1) as producer:
                sent = [await producer.send("orders", b"x", order_key=key) for _ in messages]
                found = [await each.result(timeout) for each in sent]
    return {each.broker_group for each in found}


def refuse_replica(cluster: FakeCluster, *numbers: int) -> None:
    """Have brokers refuse as those do that have no followers."""

    def refuse(request: requests.Request) -> None:
        if getattr(request, "acks", None) == requests.Acks.REPLICA:
            raise NotAllowedError('acks is "replica", and this server has no followers')

    for number in numbers:
        cluster.brokers[number].fault = refuse


@pytest.mark.parametrize("order_key", [None, "a", "b", "c", "d"])
@pytest.mark.parametrize("shell", SHELLS)
def test_what_must_be_on_several_disks_goes_where_followers_are(
    cluster: FakeCluster, shell: str, order_key: str | None
) -> None:
    cluster.serve([0, 1, 2], alone=[0, 2])
    refuse_replica(cluster, 0, 2)

    assert send_by(shell, cluster.url, order_key) == {"g1"}


@pytest.mark.parametrize("shell", SHELLS)
def test_where_nobody_has_followers_that_is_said_at_once(cluster: FakeCluster, shell: str) -> None:
    refuse_replica(cluster, 0, 1, 2)

    with pytest.raises(NotAllowedError, match="has no followers") as raised:
        send_by(shell, cluster.url)

    assert raised.value.outcome_known


@pytest.mark.parametrize("shell", SHELLS)
def test_while_those_with_followers_are_away_nothing_goes_elsewhere(
    cluster: FakeCluster, shell: str
) -> None:
    cluster.serve([0, 2], alone=[0, 2])
    refuse_replica(cluster, 0, 2)

    with pytest.raises(UnavailableError, match='can keep acks "replica"'):
        send_by(shell, cluster.url, timeout=0.5)

    assert [cluster.bodies(number) for number in (0, 2)] == [0, 0]
    back = threading.Timer(0.3, cluster.serve, [[0, 1, 2]], {"alone": [0, 2]})
    back.start()
    assert send_by(shell, cluster.url) == {"g1"}
    back.join()

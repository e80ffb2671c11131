"""Clients of a cluster of real processes: spread, failover, routes that change, nacks adopted."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque.testing.cluster import ClusterProcesses

LIMIT = 30.0


def take(
    consumer: pulque.Consumer, wanted: set[str], *, is_rejecting: bool = False
) -> list[pulque.ReceivedMessage]:
    """Handle messages until all of these bodies came."""
    found: list[pulque.ReceivedMessage] = []
    deadline = time.monotonic() + LIMIT
    while not wanted <= {each.body.decode() for each in found}:
        assert time.monotonic() < deadline, f"{len(found)} of {len(wanted)} came"
        some = consumer.pull(timeout=0.5)
        for message in some:
            if is_rejecting:
                message.reject("of no use")
            else:
                message.ack()
        found += some
    return found


@pytest.mark.accepts("001-13", "001-17", "001-20", "001-21", "004-21", "004-34", "004-35")
def test_messages_are_spread_over_brokers_and_one_consumer_gets_them(tmp_path: Path) -> None:
    with (
        ClusterProcesses.start(tmp_path, brokers=2) as cluster,
        pulque.connect(cluster.url, state_dir=tmp_path / "state") as client,
    ):
        singles = [client.send("orders", b"s%d" % number) for number in range(20)]
        with client.producer(max_batch=10) as producer:
            many = producer.send_many("orders", [b"m%d" % number for number in range(200)])
            receipts = singles + many.result(LIMIT)
        assert Counter(each.broker_group for each in singles) == {"broker-1": 10, "broker-2": 10}
        assert {each.broker_group for each in receipts} == {"broker-1", "broker-2"}
        assert not any(each.may_be_doubled for each in receipts)
        wanted = {f"s{n}" for n in range(20)} | {f"m{n}" for n in range(200)}
        with client.consumer("orders", "kitchen") as consumer:
            messages = take(consumer, wanted)
            assert len(messages) == 220
            consumer.settle(timeout=LIMIT)
        positions = {each.position for each in receipts}
        assert positions == {(m.broker_group, m.partition, m.sequence) for m in messages}
        found = client.positions("orders")
        assert sorted(each.broker_group for each in found) == ["broker-1", "broker-2"]
        assert sum(each.end - each.start for each in found) == 220
        assert len(client.read("orders")) == 220
        rows = client.reset("orders", "kitchen", "earliest", dry_run=True)
        assert sum(row.reread for row in rows) == 220
        assert {row.broker_group for row in rows} == {"broker-1", "broker-2"}


def test_groups_and_dead_letters_of_all_brokers_are_shown_together(tmp_path: Path) -> None:
    with (
        ClusterProcesses.start(tmp_path, brokers=2) as cluster,
        pulque.connect(cluster.url, state_dir=tmp_path / "state") as client,
        client.consumer("orders", "kitchen") as consumer,
    ):
        for number in range(10):
            client.send("orders", b"%d" % number)
        for message in take(consumer, {f"{number}" for number in range(10)}, is_rejecting=True):
            assert message.broker_group in {"broker-1", "broker-2"}
        consumer.settle(timeout=LIMIT)
        dead = client.dead("orders", "kitchen")
        deadline = time.monotonic() + LIMIT
        while dead.count() < 10:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        letters = dead.list()
        assert sorted(int(each.body) for each in letters) == list(range(10))
        first = letters[0]
        with pytest.raises(pulque.UsageError, match="which broker"):
            dead.show(first.sequence)
        found = dead.show(first.sequence, broker=first.broker_group)
        assert found is not None
        assert found.body == first.body
        assert dead.resend(first.sequence, broker=first.broker_group).resent == (first.sequence,)
        take(consumer, {first.body.decode()})
        assert dead.purge() == 9
        states = client.groups("orders", group="kitchen")
        assert {each.broker_group for each in states} == {"broker-1", "broker-2"}


@pytest.mark.accepts("004-30", "004-73")
def test_a_killed_broker_fails_no_send_and_all_that_is_confirmed_is_handled(
    tmp_path: Path,
) -> None:
    load = Load()
    with (
        ClusterProcesses.start(tmp_path, brokers=2) as cluster,
        pulque.connect(cluster.url, state_dir=tmp_path / "state") as client,
        client.consumer("orders", "kitchen") as consumer,
    ):
        client.send("orders", b"first")
        take(consumer, {"first"})
        with load.running(client):
            load.handle(consumer, 1.0)
            cluster["broker-2"].kill()
            load.handle(consumer, 3.0)
            meanwhile = len(load.confirmed)
            load.handle(consumer, 1.0)
            assert len(load.confirmed) > meanwhile, "messages go on"
            cluster["broker-2"].restart()
            load.handle(consumer, 1.0)
        assert load.errors == []
        deadline = time.monotonic() + LIMIT
        while missing := set(load.confirmed) - load.handled:
            assert time.monotonic() < deadline, f"{len(missing)} are missing"
            load.handle(consumer, 0.2)


class Load:
    """Two threads that send, and what became of their messages."""

    def __init__(self) -> None:
        self.confirmed: list[str] = []
        self.handled: set[str] = set()
        self.errors: list[pulque.PulqueError] = []
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self, client: pulque.Client) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=(client, name)) for name in "ab"]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(LIMIT)

    def handle(self, consumer: pulque.Consumer, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            some = consumer.pull(timeout=0.2)
            self.handled.update(each.body.decode() for each in some)
            consumer.ack_all(some)

    def _send(self, client: pulque.Client, name: str) -> None:
        number = 0
        while not self._stop.is_set():
            body = f"{name}-{number}"
            try:
                client.send("orders", body.encode(), timeout=30)
                self.confirmed.append(body)
            except pulque.PulqueError as error:
                self.errors.append(error)
                return
            number += 1


@pytest.mark.accepts("000-32")
def test_a_nack_whose_broker_is_down_is_retried_by_another(tmp_path: Path) -> None:
    with (
        ClusterProcesses.start(tmp_path, brokers=2) as cluster,
        pulque.connect(cluster.url, state_dir=tmp_path / "state") as client,
        client.consumer("orders", "kitchen", retry=pulque.RetryPolicy([0.2])) as consumer,
    ):
        sent = {client.send("orders", b"%d" % number).broker_group for number in range(20)}
        assert sent == {"broker-1", "broker-2"}
        messages: list[pulque.ReceivedMessage] = []
        deadline = time.monotonic() + LIMIT
        while len(messages) < 20:
            assert time.monotonic() < deadline
            messages += consumer.pull(timeout=0.5)
        lost = next(each for each in messages if each.broker_group == "broker-2")
        consumer.ack_all(each for each in messages if each.broker_group == "broker-1")
        cluster["broker-2"].kill()
        consumer.ack_all(each for each in messages if each is not lost)
        lost.nack("no stock")
        again: list[pulque.ReceivedMessage] = []
        while not again:
            assert time.monotonic() < deadline, "nobody retried it"
            again = consumer.pull(timeout=0.5)
        (found,) = again
        assert (found.id, found.body, found.attempt) == (lost.id, lost.body, 2)
        assert found.broker_group == "broker-1"
        consumer.ack_all(again)
        cluster["broker-2"].restart()
        consumer.settle(timeout=LIMIT)
        # Its own broker has it as done: it does not come a third time.
        assert consumer.pull(timeout=2) == []
        assert consumer.held == 0


def test_with_the_meta_server_away_messages_go_on(tmp_path: Path) -> None:
    with (
        ClusterProcesses.start(tmp_path, brokers=2) as cluster,
        pulque.connect(cluster.url, state_dir=tmp_path / "state") as client,
        client.consumer("orders", "kitchen") as consumer,
    ):
        client.send("orders", b"before")
        take(consumer, {"before"})
        cluster["meta-1"].kill()
        receipts = [client.send("orders", b"during %d" % number) for number in range(10)]
        assert {each.broker_group for each in receipts} == {"broker-1", "broker-2"}
        take(consumer, {f"during {number}" for number in range(10)})
        with pytest.raises(pulque.UnavailableError, match=r"who serves never\.seen"):
            client.send("never.seen", b"x", timeout=1)
        cluster["meta-1"].restart()
        assert client.send("never.seen", b"x", timeout=30).broker_group in {"broker-1", "broker-2"}


def test_a_client_of_one_broker_knows_nothing_of_the_cluster(tmp_path: Path) -> None:
    """As an old client does: it connects to a broker, and sends and pulls there."""
    with ClusterProcesses.start(tmp_path, brokers=1) as cluster:
        url = cluster["broker-1"].url
        with pulque.connect(url, state_dir=tmp_path / "state") as client:
            client.send("orders", b"x")
            with client.consumer("orders", "kitchen") as consumer:
                assert [each.body for each in take(consumer, {"x"})] == [b"x"]

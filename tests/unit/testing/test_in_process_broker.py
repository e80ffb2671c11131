"""A broker in the test's own process: its time, its faults, its end."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import pulque
from pulque.errors import (
    MessageTooLargeError,
    PulqueError,
    RequestTimeoutError,
    StorageFullError,
    UsageError,
)
from pulque.testing.broker import InProcessBroker
from tests.nothing import check_nothing_comes

DAY = 86_400


@pytest.fixture
def impatient(pulque_broker: InProcessBroker) -> Iterator[pulque.Client]:
    """A client that gives up soon."""
    with pulque.connect(pulque_broker.url, timeout=0.5) as client:
        yield client


def eventually(check: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


class TestTime:
    def test_the_lease_of_a_consumer_without_connection_runs_out(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        silent = pulque_client.consumer("orders", group="kitchen", consumer_id="silent")
        (held,) = silent.pull(timeout=10)

        pulque_broker.advance_time(timedelta(minutes=1), heartbeats=False)

        other = pulque_client.consumer("orders", group="kitchen", consumer_id="other")
        (again,) = other.pull(timeout=10)
        assert again.id == held.id
        assert again.attempt == 2

    def test_a_consumer_that_is_connected_keeps_what_it_holds(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        consumer = pulque_client.consumer("orders", group="kitchen")
        (held,) = consumer.pull(timeout=10)

        pulque_broker.advance_time(DAY)

        held.ack()
        consumer.settle()
        assert not consumer.abandoned
        assert consumer.held == 0

    def test_a_pull_that_waits_gets_what_time_brings(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        silent = pulque_client.consumer("orders", group="kitchen", consumer_id="silent")
        silent.pull(timeout=10)
        other = pulque_client.consumer("orders", group="kitchen", consumer_id="other")
        found: list[pulque.ReceivedMessage] = []
        waiting = threading.Thread(target=lambda: found.extend(other.pull(timeout=60)))
        waiting.start()
        eventually(lambda: pulque_client.status()["pulls_waiting"] == 1)

        pulque_broker.advance_time(60, heartbeats=False)
        # Who is lost is answered with nothing; it asks again, and gets what was lost.
        waiting.join(30)

        assert not waiting.is_alive()
        assert [message.attempt for message in found] == [2]

    @pytest.mark.parametrize("delay", [1, 60, 7200])
    def test_a_delay_has_passed_when_the_test_says_so(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client, delay: int
    ) -> None:
        pulque_client.send("orders", b"tea")
        consumer = pulque_client.consumer("orders", group="kitchen")
        (message,) = consumer.pull(timeout=10)
        message.nack("no milk", delay=delay)
        consumer.settle()

        pulque_broker.advance_time(delay - 0.1)
        check_nothing_comes(pulque_client, consumer)
        pulque_broker.advance_time(0.1)

        (again,) = consumer.pull(timeout=10)
        assert again.attempt == 2

    def test_a_lost_consumer_and_the_wait_after_it_fit_into_one_step(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        silent = pulque_client.consumer("orders", group="kitchen", consumer_id="silent")
        silent.pull(timeout=10)

        pulque_broker.advance_time(timedelta(hours=1), heartbeats=False)

        other = pulque_client.consumer("orders", group="kitchen", consumer_id="other")
        (again,) = other.pull(timeout=10)
        assert again.attempt == 2

    def test_messages_grow_old(self, pulque_broker: InProcessBroker) -> None:
        with pulque.connect(pulque_broker.url) as client:
            client.send("orders", b"old")
            pulque_broker.advance_time(2 * 3600)
            client.send("orders", b"rolls to a new segment")
            pulque_broker.advance_time(timedelta(days=4))

            assert [m.body for m in client.read("orders")] == [b"rolls to a new segment"]

    def test_store_times_follow_the_clock(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        first = pulque_client.send("orders", b"1")
        pulque_broker.advance_time(1.5)
        second = pulque_client.send("orders", b"2")

        assert second.stored_at_ms - first.stored_at_ms == 1500

    @pytest.mark.parametrize("by", [-1, float("nan"), float("inf"), timedelta(days=-1), 1e18])
    def test_time_that_makes_no_sense_is_refused(
        self, pulque_broker: InProcessBroker, by: float | timedelta
    ) -> None:
        with pytest.raises(UsageError, match="time cannot advance by"):
            pulque_broker.advance_time(by)


class TestFaults:
    def test_failing_sends_are_repeated_by_the_client(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_broker.fail_sends(times=2)

        pulque_client.send("orders", b"tea")

        assert [m.body for m in pulque_client.read("orders")] == [b"tea"]

    def test_sends_fail_with_the_error_that_was_given(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_broker.fail_sends(error=MessageTooLargeError("too much tea"))

        with pytest.raises(MessageTooLargeError, match="too much tea"):
            pulque_client.send("orders", b"tea")
        pulque_client.send("orders", b"coffee")

        assert [m.body for m in pulque_client.read("orders")] == [b"coffee"]

    def test_a_lost_answer_stores_once(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_broker.lose_answers()

        receipt = pulque_client.send("orders", b"tea")

        assert receipt.is_duplicate
        assert [m.body for m in pulque_client.read("orders")] == [b"tea"]

    def test_all_connections_are_cut_and_come_back(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        consumer = pulque_client.consumer("orders", group="kitchen")
        check_nothing_comes(pulque_client, consumer)

        pulque_broker.disconnect_all()
        pulque_client.send("orders", b"tea")

        assert [m.body for m in consumer.pull(timeout=10)] == [b"tea"]

    def test_a_paused_broker_answers_nothing_until_it_goes_on(
        self, pulque_broker: InProcessBroker, impatient: pulque.Client
    ) -> None:
        impatient.send("orders", b"before")
        pulque_broker.pause()

        with pytest.raises(RequestTimeoutError):
            impatient.send("orders", b"meanwhile")
        with pytest.raises(UsageError, match="paused"):
            pulque_broker.advance_time(1)

        pulque_broker.resume()
        impatient.send("orders", b"after")
        bodies = [m.body for m in impatient.read("orders")]
        # Nobody knows whether the one in between was read from the socket.
        assert [body for body in bodies if body != b"meanwhile"] == [b"before", b"after"]
        impatient.close()

    def test_a_full_disk_refuses_sends_and_lets_consumers_go_on(
        self, pulque_broker: InProcessBroker, impatient: pulque.Client
    ) -> None:
        impatient.send("orders", b"tea")
        pulque_broker.fill_disk()

        with pytest.raises(StorageFullError):
            impatient.send("orders", b"coffee")
        consumer = impatient.consumer("orders", group="kitchen")
        (message,) = consumer.pull(timeout=10)
        message.ack()
        consumer.settle()

        pulque_broker.free_disk()
        impatient.send("orders", b"coffee")
        impatient.close()


class TestItsEnd:
    @pytest.mark.parametrize("in_memory", [True, False])
    def test_what_was_confirmed_is_there_after_a_kill(
        self, tmp_path: Path, *, in_memory: bool
    ) -> None:
        with InProcessBroker(None if in_memory else tmp_path / "data") as broker:
            url = broker.url
            client = pulque.connect(url, state_dir=tmp_path / "state")
            for number in range(20):
                client.send("orders", str(number).encode())
            consumer = client.consumer("orders", group="kitchen")
            taken = consumer.pull(5, timeout=10)
            consumer.ack_all(taken)
            consumer.settle()

            broker.kill()
            assert not broker.is_running
            with pytest.raises(PulqueError):
                client.send("orders", b"nobody there", timeout=0.2)
            broker.restart()

            assert broker.url == url
            assert [int(m.body) for m in client.read("orders")] == list(range(20))
            assert [int(m.body) for m in consumer.pull(timeout=10)] == list(range(5, 20))
            client.close()

    def test_kills_under_load_lose_nothing_that_was_confirmed(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        confirmed: list[bytes] = []
        is_over = threading.Event()

        def produce(name: str) -> None:
            with pulque.connect(pulque_broker.url) as client:
                while not is_over.is_set():
                    body = f"{name}{len(confirmed)}".encode()
                    client.send("orders", body)
                    confirmed.append(body)

        producers = [threading.Thread(target=produce, args=(name,)) for name in "ab"]
        for producer in producers:
            producer.start()
        for _ in range(10):
            time.sleep(0.02)
            pulque_broker.kill()
            pulque_broker.restart()
        is_over.set()
        for producer in producers:
            producer.join()

        stored = [m.body for m in pulque_client.read("orders", max_messages=10_000)]
        assert sorted(stored) == sorted(confirmed)

    def test_a_paused_broker_can_be_killed_and_stores_nothing_of_what_it_did_not_answer(
        self, pulque_broker: InProcessBroker, impatient: pulque.Client
    ) -> None:
        impatient.send("orders", b"tea")
        pulque_broker.pause()
        with pytest.raises(RequestTimeoutError):
            impatient.send("orders", b"coffee")

        pulque_broker.kill()
        pulque_broker.restart()

        assert [m.body for m in impatient.read("orders")] == [b"tea"]
        impatient.close()

    def test_it_does_not_start_twice(self, pulque_broker: InProcessBroker) -> None:
        with pytest.raises(UsageError, match="runs already"):
            pulque_broker.start()

    def test_what_has_ended_can_be_told_nothing(self) -> None:
        broker = InProcessBroker()
        broker.start()
        broker.stop()

        with pytest.raises(UsageError, match="does not run"):
            broker.advance_time(1)

    def test_a_start_that_fails_leaves_the_directory_free(self, tmp_path: Path) -> None:
        (tmp_path / "foreign").touch()
        broker = InProcessBroker(tmp_path)
        with pytest.raises(PulqueError, match="not a data directory"):
            broker.start()
        (tmp_path / "foreign").unlink()

        broker.start()
        broker.stop()

    def test_settings_are_those_of_a_broker(self, tmp_path: Path) -> None:
        with InProcessBroker(consumption={"lease": "7s", "lease_check": "1s"}) as broker:
            client = pulque.connect(broker.url, state_dir=tmp_path)
            consumer = client.consumer("orders", group="kitchen", consumer_id="one")
            client.send("orders", b"tea")
            consumer.pull(timeout=10)
            broker.advance_time(8, heartbeats=False)

            assert client.status()["deliveries_lost"] == 1
            client.close()

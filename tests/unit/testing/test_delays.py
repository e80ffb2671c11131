"""Messages for later in the test process: due when the test's clock says so, never before."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.clock import wall_ms
from pulque.errors import NoDelayServerError, ReadOnlyError, StorageFullError
from pulque.testing.broker import InProcessBroker

HOUR = 3600
PATIENCE = 10


def blocking_send(url: str, **when: Any) -> None:
    with pulque.connect(url) as client:
        client.send("orders", b"late", **when)


def blocking_send_many(url: str, **when: Any) -> None:
    with pulque.connect(url) as client:
        client.send_many("orders", [pulque.Outgoing(b"late", **when)])


def producer_send(url: str, **when: Any) -> None:
    with pulque.connect(url) as client, client.producer() as producer:
        producer.send("orders", b"late", **when).result()


def in_asyncio(work: Callable[[aio.Client], Awaitable[Any]], url: str) -> None:
    async def main() -> None:
        async with aio.connect(url) as client:
            await work(client)

    asyncio.run(main())


def asyncio_send(url: str, **when: Any) -> None:
    in_asyncio(lambda client: client.send("orders", b"late", **when), url)


def asyncio_send_many(url: str, **when: Any) -> None:
    late = pulque.Outgoing(b"late", **when)
    in_asyncio(lambda client: client.send_many("orders", [late]), url)


def asyncio_producer(url: str, **when: Any) -> None:
    async def send(client: aio.Client) -> None:
        async with client.producer() as producer:
            await (await producer.send("orders", b"late", **when))

    in_asyncio(send, url)


def app_send(url: str, **when: Any) -> None:
    app = pulque.App(url)

    @app.subscribe("other", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None: ...

    async def main() -> None:
        async with app:
            await app.send("orders", b"late", **when)

    asyncio.run(main())


SHELLS = [
    blocking_send,
    blocking_send_many,
    producer_send,
    asyncio_send,
    asyncio_send_many,
    asyncio_producer,
    app_send,
]


def stored(client: pulque.Client, mark: bytes) -> list[bytes]:
    """Return all that the broker has, up to a message that is sent now: what comes is there."""
    client.send("orders", mark)
    return [message.body for message in client.read("orders")]


@pytest.mark.parametrize("when", ["delay", "timedelta", "at", "level"])
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_message_comes_when_its_time_has_passed_and_not_before(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, shell: Any, when: str
) -> None:
    pulque_broker.advance_time(timedelta(days=2))  # a delay counts from the broker's time
    ways: dict[str, dict[str, Any]] = {
        "delay": {"delay": HOUR},
        "timedelta": {"delay": timedelta(hours=1)},
        "at": {"at": pulque_broker.now + timedelta(hours=1)},
        "level": {"level": 17},
    }
    shell(pulque_broker.url, **ways[when])

    pulque_broker.advance_time(HOUR - 0.1)
    assert stored(pulque_client, b"before") == [b"before"]
    assert [each.subject for each in pulque_client.delayed().next()] == ["orders"]
    pulque_broker.advance_time(0.1)

    assert stored(pulque_client, b"after") == [b"before", b"late", b"after"]
    assert pulque_client.delayed().next() == []


def test_messages_come_in_the_order_of_their_times(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    for days in (3, 1, 2, 300):
        pulque_client.send("orders", str(days), delay=timedelta(days=days))

    pulque_broker.advance_time(timedelta(days=3))
    assert stored(pulque_client, b"mark") == [b"1", b"2", b"3", b"mark"]
    pulque_broker.advance_time(timedelta(days=297))

    assert stored(pulque_client, b"mark")[-2:] == [b"300", b"mark"]


class TestRetries:
    def test_a_nack_until_an_instant_comes_then(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        with pulque_client.consumer("orders", group="kitchen") as consumer:
            (first,) = consumer.pull(timeout=PATIENCE)
            first.nack("closed", at=pulque_broker.now + timedelta(hours=1))
            consumer.settle()

            pulque_broker.advance_time(HOUR - 0.1)
            pulque_client.send("orders", b"mark")
            (mark,) = consumer.pull(timeout=PATIENCE)
            assert mark.body == b"mark"
            pulque_broker.advance_time(0.1)

            (again,) = consumer.pull(timeout=PATIENCE)
            assert (again.id, again.attempt) == (first.id, 2)

    def test_a_nack_for_longer_than_the_broker_keeps_messages_comes_then(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"tea")
        with pulque_client.consumer("orders", group="kitchen") as consumer:
            (first,) = consumer.pull(timeout=PATIENCE)
            first.nack("closed", delay=timedelta(days=40))
            consumer.settle()
            assert [each.id for each in pulque_client.delayed().next()] == [first.id]

            pulque_broker.advance_time(timedelta(days=40) - timedelta(seconds=0.1))
            pulque_client.send("orders", b"mark")
            (mark,) = consumer.pull(timeout=PATIENCE)
            assert mark.body == b"mark"
            pulque_broker.advance_time(0.1)

            (again,) = consumer.pull(timeout=PATIENCE)
            assert (again.id, again.attempt) == (first.id, 2)

    async def test_settle_returns_when_the_delay_server_has_it(
        self, pulque_broker: InProcessBroker, pulque_aio_client: aio.Client
    ) -> None:
        await pulque_aio_client.send("orders", b"tea")
        async with pulque_aio_client.consumer("orders", group="kitchen") as consumer:
            (message,) = await consumer.pull(timeout=PATIENCE)
            message.nack("closed", delay=timedelta(days=40))
            await consumer.settle()

            (found,) = await pulque_aio_client.delayed().next()
            assert found.id == message.id

    async def test_a_handler_may_ask_for_a_time(
        self, pulque_broker: InProcessBroker, pulque_aio_client: aio.Client
    ) -> None:
        app = pulque.App(pulque_broker.url)
        calls: list[tuple[bytes, int]] = []
        called = asyncio.Event()

        @app.subscribe("orders", group="kitchen")
        async def handle(message: pulque.ReceivedMessage) -> None:
            calls.append((message.body, message.attempt))
            called.set()
            if message.attempt == 1 and message.body == b"tea":
                raise pulque.RetryAt(pulque_broker.now + timedelta(hours=1), "closed")

        async with app:
            await pulque_aio_client.send("orders", b"tea")
            async with asyncio.timeout(PATIENCE):
                while not await pulque_aio_client.delayed().next():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(pulque_broker.advance_time, HOUR - 0.1)
            called.clear()
            await pulque_aio_client.send("orders", b"mark")
            async with asyncio.timeout(PATIENCE):
                await called.wait()
            assert calls == [(b"tea", 1), (b"mark", 1)]
            called.clear()
            await asyncio.to_thread(pulque_broker.advance_time, 0.1)
            async with asyncio.timeout(PATIENCE):
                await called.wait()

        assert calls[2:] == [(b"tea", 2)]


class TestChanges:
    def test_a_message_that_is_cancelled_never_comes(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        receipt = pulque_client.send("orders", b"late", delay=HOUR)
        assert pulque_client.cancel(receipt) is pulque.Fate.CANCELLED

        pulque_broker.advance_time(2 * HOUR)

        assert stored(pulque_client, b"mark") == [b"mark"]
        assert pulque_client.cancel(receipt) is pulque.Fate.ALREADY_CANCELLED

    def test_a_message_that_is_moved_comes_at_its_new_time(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_broker.advance_time(timedelta(days=2))
        receipt = pulque_client.send("orders", b"late", delay=HOUR)
        pulque_client.reschedule(receipt, delay=3 * HOUR)

        pulque_broker.advance_time(3 * HOUR - 0.1)
        assert stored(pulque_client, b"before") == [b"before"]
        pulque_broker.advance_time(0.1)

        assert stored(pulque_client, b"after") == [b"before", b"late", b"after"]

    def test_what_waits_can_be_looked_at(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        receipt = pulque_client.send("orders", {"n": 1}, delay=HOUR)
        delayed = pulque_client.delayed("orders")

        (found,) = delayed.next()
        assert found.due_at_ms == pulque_broker.clock.now_ms() + HOUR * 1000
        shown = delayed.show(receipt)
        assert shown is not None
        assert shown.id == receipt.id
        assert [each.messages for each in delayed.counts()] == [1]


class TestFaults:
    def test_what_waits_survives_a_broker_that_is_killed(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"late", delay=HOUR)
        pulque_broker.kill()
        pulque_broker.restart()

        pulque_broker.advance_time(HOUR - 0.1)
        assert stored(pulque_client, b"before") == [b"before"]
        pulque_broker.advance_time(0.1)

        assert stored(pulque_client, b"after") == [b"before", b"late", b"after"]

    def test_a_directory_keeps_what_waits(self, tmp_path: Path) -> None:
        with InProcessBroker(tmp_path) as broker, pulque.connect(broker.url) as client:
            client.send("orders", b"late", delay=HOUR)
        broker = InProcessBroker(tmp_path)
        with broker, pulque.connect(broker.url) as client:
            broker.advance_time(HOUR + 1)
            broker.advance_time(60)
            assert stored(client, b"mark") == [b"late", b"mark"]

    def test_a_full_disk_refuses_what_is_for_later_and_holds_back_what_is_due(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"late", delay=HOUR)
        pulque_broker.fill_disk()
        with pulque.connect(timeout=0.3) as client, pytest.raises(StorageFullError):
            client.send("orders", b"refused", delay=HOUR)

        pulque_broker.advance_time(HOUR)
        pulque_broker.free_disk()
        pulque_broker.advance_time(0)

        assert stored(pulque_client, b"mark") == [b"late", b"mark"]

    def test_failing_sends_fail_for_later_too(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_broker.fail_sends(error=ReadOnlyError("no"), times=10**6)
        with pulque.connect(timeout=0.3) as client, pytest.raises(ReadOnlyError):
            client.send("orders", b"refused", delay=HOUR)
        pulque_broker.fail_sends(0)

        pulque_broker.lose_answers()
        pulque_client.send("orders", b"late", delay=HOUR)
        pulque_broker.advance_time(HOUR)
        assert stored(pulque_client, b"mark") == [b"late", b"mark"]

    def test_a_broker_that_refuses_does_not_stop_time(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"late", delay=HOUR)
        pulque_broker.fail_sends(times=10**6)
        pulque_broker.advance_time(HOUR)
        pulque_broker.fail_sends(0)
        pulque_broker.advance_time(1)
        assert stored(pulque_client, b"mark") == [b"late", b"mark"]

    def test_connections_that_are_cut_are_made_again(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        pulque_client.send("orders", b"one", delay=HOUR)
        pulque_broker.disconnect_all()
        pulque_client.send("orders", b"two", delay=2 * HOUR)
        pulque_broker.disconnect_all()
        pulque_broker.advance_time(2 * HOUR)
        pulque_broker.advance_time(0)

        assert stored(pulque_client, b"mark") == [b"one", b"two", b"mark"]

    def test_there_may_be_no_delay_server(self) -> None:
        with (
            InProcessBroker(delays=False) as broker,
            pulque.connect(broker.url) as client,
            pytest.raises(NoDelayServerError),
        ):
            client.send("orders", b"late", delay=HOUR)


class TestClientTime:
    def test_messages_expire_by_the_test_clock(
        self, pulque_broker: InProcessBroker, pulque_client: pulque.Client
    ) -> None:
        expires_at = pulque_broker.now + timedelta(hours=1)
        pulque_client.send("orders", b"old", expires_at=expires_at)
        pulque_client.send("orders", b"new")

        pulque_broker.advance_time(HOUR)

        with pulque_client.consumer("orders", group="kitchen") as consumer:
            (found,) = consumer.pull(timeout=PATIENCE)
            assert found.body == b"new"
            consumer.settle()
        pulque_broker.advance_time(0)  # the broker writes dead letters after it has answered
        (letter,) = pulque_client.dead("orders", group="kitchen").list()
        assert (letter.body, letter.headers["pulque.dead"]) == (b"old", "expired")

    def test_the_latest_broker_gives_the_time_until_it_stops(self) -> None:
        def is_wall() -> bool:
            return abs(wall_ms() - time.time() * 1000) < 3_600_000

        with InProcessBroker(delays=False) as first:
            first.advance_time(timedelta(days=1))
            with InProcessBroker(delays=False) as second:
                assert is_wall()
                second.advance_time(timedelta(days=2))
                assert wall_ms() == second.clock.now_ms()
            assert wall_ms() == first.clock.now_ms()
            first.kill()
            assert wall_ms() == first.clock.now_ms()
        assert is_wall()

    def test_a_broker_that_nobody_holds_gives_no_time(self) -> None:
        broker = InProcessBroker(delays=False)
        broker.start()
        broker.advance_time(timedelta(days=1))
        broker.kill()
        del broker
        gc.collect()

        assert abs(wall_ms() - datetime.now(UTC).timestamp() * 1000) < 3_600_000


def test_what_the_broker_would_refuse_later_is_refused_at_once() -> None:
    limits = {"open_records": True, "max_message": "1KiB"}
    with InProcessBroker(limits=limits) as broker, pulque.connect(broker.url) as client:
        client.send("orders", b"x", delay=timedelta(hours=1))
        with pytest.raises(pulque.MessageTooLargeError):
            client.send("orders", bytes(2000), delay=timedelta(hours=1))

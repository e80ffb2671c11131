"""The asyncio twin keeps the same promises as the blocking client, with the same names."""

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    FencedError,
    InvalidNameError,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    RemoteProtocolError,
    RequestTimeoutError,
    StorageFullError,
    UsageError,
)
from pulque.wire import requests, responses
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker, Silence
from tests.unit.client.faults import Times


@pytest.fixture
async def client(broker: FakeBroker, tmp_path: Path) -> AsyncIterator[aio.Client]:
    async with aio.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds; fail after the limit."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  # another thread makes it true
            await asyncio.sleep(0.001)


async def take(consumer: aio.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    async for message in consumer:
        message.ack()
        found.append(message)
        if len(found) == count:
            break
    return found


def sequences(messages: list[pulque.ReceivedMessage]) -> list[int]:
    return [message.sequence for message in messages]


@pytest.mark.parametrize("name", ["Client", "Consumer", "Producer", "PendingSend", "PendingSends"])
def test_both_twins_have_the_same_names_and_arguments(name: str) -> None:
    def public(kind: type) -> dict[str, set[str]]:
        found = {}
        for each, value in inspect.getmembers(kind):
            if not each.startswith("_"):
                names = set(inspect.signature(value).parameters) if callable(value) else set()
                # The one writes them down, the other gathers them: to a caller it is the same.
                written = (
                    "key order_key tags headers expires_at priority reliable parts delay at level"
                )
                found[each] = names - set(written.split())
        return found

    assert public(getattr(aio, name)) == public(getattr(pulque, name))


async def test_a_sent_message_is_stored_and_its_receipt_says_where(
    broker: FakeBroker, client: aio.Client
) -> None:
    first = await client.send("orders", b"one")
    second = await client.send("orders", b"two", key="k", tags=["hot"])

    assert broker.messages("orders") == [b"one", b"two"]
    assert (first.sequence, second.sequence) == (0, 1)
    assert [(m.body, m.key) for m in await client.read("orders")] == [
        (b"one", None),
        (b"two", "k"),
    ]


async def test_tasks_send_at_the_same_time_and_travel_together(
    broker: FakeBroker, client: aio.Client
) -> None:
    receipts = await asyncio.gather(
        *(client.send("orders", b"%d" % number) for number in range(500))
    )

    assert [receipt.sequence for receipt in receipts] == list(range(500))
    assert len(broker.seen(requests.Send)) < 300


async def test_many_messages_come_back_as_receipts_in_order(
    broker: FakeBroker, client: aio.Client
) -> None:
    bodies = [b"%d" % number for number in range(2500)]

    receipts = await client.send_many("orders", bodies)

    assert broker.messages("orders") == bodies
    assert [receipt.sequence for receipt in receipts] == list(range(2500))


@pytest.mark.parametrize("handled", [False, True])
async def test_a_send_whose_connection_is_lost_is_repeated_and_stored_once(
    broker: FakeBroker, client: aio.Client, *, handled: bool
) -> None:
    broker.fault = Times(requests.Send, Drop(handled=handled), times=3)

    await asyncio.gather(*(client.send("orders", b"%d" % number) for number in range(50)))

    assert sorted(broker.messages("orders")) == sorted(b"%d" % n for n in range(50))


async def test_what_is_no_message_is_refused_before_it_travels(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send("orders", b"one")
    with pytest.raises(UsageError, match="cannot be sent"):
        await client.send("orders", object())
    with pytest.raises(MessageTooLargeError):
        await client.send("orders", bytes(broker.max_message + 1))
    with pytest.raises(InvalidNameError):
        await client.send("../orders", b"tea")

    assert broker.messages("orders") == [b"one"]


async def test_a_no_is_raised(broker: FakeBroker, client: aio.Client) -> None:
    broker.fault = Times(requests.Send, NotAllowedError("not you"))

    with pytest.raises(NotAllowedError, match="not you"):
        await client.send("orders", b"one")


async def test_a_send_without_an_answer_ends_in_time(
    broker: FakeBroker, client: aio.Client
) -> None:
    broker.fault = Times(requests.Send, Silence(), times=1000)

    with pytest.raises(RequestTimeoutError):
        await client.send("orders", b"one", timeout=0.05)
    async with client.producer(timeout=0.2) as producer:
        pending = await producer.send("orders", b"two")
        with pytest.raises(RequestTimeoutError, match="unknown"):
            await pending
    broker.fault = None
    broker.drop_all()


async def test_nobody_there_is_known_at_once(broker: FakeBroker) -> None:
    broker.close()

    with pytest.raises(DisconnectedError, match=f"127.0.0.1:{broker.port}"):
        _ = await aio.connect(broker.url)


async def test_a_client_can_be_awaited(broker: FakeBroker) -> None:
    client = await aio.connect(broker.url)

    assert await client.status() == {"broker": "fake"}
    assert await client.seal() == {"": 17}
    await client.close()
    with pytest.raises(UsageError, match="closed"):
        await client.status()


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    silent = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]

    with pytest.raises(DisconnectedError):
        _ = await aio.connect(f"pulque://127.0.0.1:{port}", timeout=0.3)
    silent.close()
    await silent.wait_closed()


async def test_a_producer_batches_and_finds_every_outcome(
    broker: FakeBroker, client: aio.Client
) -> None:
    async with client.producer() as producer:
        promises = [await producer.send("orders", b"%d" % n) for n in range(3000)]
        many = await producer.send_many("orders", [b"x", pulque.Outgoing(b"y", key="k")])
        called: list[aio.PendingSend] = []
        promises[0].add_done_callback(called.append)
        await producer.flush(LIMIT)

        assert called == [promises[0]]
        assert [(await pending).sequence for pending in promises] == list(range(3000))
        assert [receipt.sequence for receipt in await many] == [3000, 3001]
        assert await promises[0].exception() is None
    assert len(broker.seen(requests.Send)) < 50
    with pytest.raises(UsageError, match="closed"):
        _ = await producer.send("orders", b"late")


async def test_a_full_broker_is_tried_again_until_there_is_room(
    broker: FakeBroker, client: aio.Client
) -> None:
    broker.fault = Times(requests.Send, StorageFullError("no room"), times=3)

    assert (await client.send("orders", b"one")).sequence == 0
    assert len(broker.seen(requests.Send)) == 4


async def test_a_broker_that_comes_back_gets_everything(
    broker: FakeBroker, client: aio.Client
) -> None:
    async with client.producer() as producer:
        await (await producer.send("orders", b"0"))
        broker.stop_listening()
        broker.drop_all()
        for number in range(1, 1500):
            _ = await producer.send("orders", b"%d" % number)
        broker.listen_again()
        await producer.flush(LIMIT)

    assert broker.messages("orders") == [b"%d" % number for number in range(1500)]


async def test_closing_a_producer_gives_what_is_left_an_outcome(
    broker: FakeBroker, client: aio.Client
) -> None:
    broker.fault = Times(requests.Send, Silence(), times=1000)
    producer = client.producer()
    pending = await producer.send("orders", b"x")

    await producer.close(0.05)

    with pytest.raises(DisconnectedError):
        await pending


async def test_a_producer_that_may_buffer_little_waits_for_the_broker(
    broker: FakeBroker, client: aio.Client
) -> None:
    broker.fault = Times(requests.Send, Silence(), times=1000)
    sent = 0

    async with client.producer(max_buffered_bytes=50_000, max_batch=10) as producer:

        async def send_all() -> None:
            nonlocal sent
            for _ in range(1000):
                _ = await producer.send("orders", bytes(1000))
                sent += 1

        task = asyncio.create_task(send_all())
        await until(lambda: sent >= 40)
        await asyncio.wait([task], timeout=0.1)
        before = sent
        broker.fault = None
        broker.drop_all()
        await task

    assert before < 60
    assert len(broker.messages("orders")) == 1000


async def test_every_message_comes_in_order_and_is_settled(
    broker: FakeBroker, client: aio.Client
) -> None:
    bodies = [b"%d" % number for number in range(3000)]
    await client.send_many("orders", bodies)

    async with client.consumer("orders", "kitchen") as consumer:
        messages = await take(consumer, 3000)

    assert [message.body for message in messages] == bodies
    assert broker.acked == [("orders", number) for number in range(3000)]
    assert broker.left == [consumer.consumer_id]


async def test_pull_returns_what_is_there_and_waits_for_what_is_not(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send_many("orders", [b"x"] * 10)

    async with client.consumer("orders", "kitchen") as consumer:
        first = await consumer.pull(4)
        first[0].ack()
        first[1].nack("no milk", delay=2)
        second = await consumer.pull(20)
        nothing = await consumer.pull(1, timeout=0.05)
        waiting = asyncio.create_task(consumer.pull(1, timeout=LIMIT))
        await client.send("orders", b"late")

        assert [message.body for message in await waiting] == [b"late"]
    assert (sequences(first), sequences(second), nothing) == (
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
        [],
    )
    assert broker.acked == [("orders", 0)]
    assert broker.nacked == [("orders", 1, "no milk", 2000)]


@pytest.mark.accepts("000-28")
async def test_acks_reach_the_broker_while_the_caller_is_busy(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send_many("orders", [b"x"] * 3)

    async with client.consumer("orders", "kitchen") as consumer:
        count = 0
        async for message in consumer:
            message.ack()
            count += 1
            await until(lambda: len(broker.acked) == count)  # noqa: B023  # used at once
            if count == 3:
                break


@pytest.mark.parametrize("kind", [requests.Pull, requests.Settle])
@pytest.mark.parametrize("handled", [False, True])
async def test_a_lost_connection_loses_and_doubles_nothing(
    broker: FakeBroker, client: aio.Client, kind: type[requests.Request], *, handled: bool
) -> None:
    await client.send_many("orders", [b"x"] * 100)
    broker.fault = Times(kind, Drop(handled=handled), times=3)

    async with client.consumer("orders", "kitchen", max_messages=20) as consumer:
        messages = await take(consumer, 100)

    assert sequences(messages) == list(range(100))
    assert broker.acked == [("orders", number) for number in range(100)]


async def test_an_overloaded_broker_is_asked_again(broker: FakeBroker, client: aio.Client) -> None:
    await client.send("orders", b"x")
    broker.fault = Times(requests.Pull, OverloadedError("busy"), times=2)

    async with client.consumer("orders", "kitchen") as consumer:
        assert sequences(await take(consumer, 1)) == [0]


async def test_a_broker_that_stays_away_is_reported_and_can_come_back(
    broker: FakeBroker, tmp_path: Path
) -> None:
    async with aio.connect(broker.url, timeout=0.5, state_dir=tmp_path) as client:
        await client.send("orders", b"x")
        consumer = client.consumer("orders", "kitchen")
        broker.stop_listening()
        broker.drop_all()

        with pytest.raises(DisconnectedError, match=rf"127.0.0.1:{broker.port}"):
            await take(consumer, 1)
        broker.listen_again()

        assert sequences(await take(consumer, 1)) == [0]


async def test_a_pull_without_an_answer_is_asked_again(broker: FakeBroker, tmp_path: Path) -> None:
    broker.fault = Times(requests.Pull, Silence())
    async with aio.connect(broker.url, timeout=1, state_dir=tmp_path) as client:
        await client.send("orders", b"x")
        async with client.consumer("orders", "kitchen") as consumer:
            assert (
                await consumer.pull(timeout=0.3) == []
            )  # long enough to ask, on a busy machine too
            assert sequences(await consumer.pull(timeout=LIMIT)) == [0]


def test_a_consumer_may_be_made_before_its_loop_runs(broker: FakeBroker, tmp_path: Path) -> None:
    client = aio.connect(broker.url, timeout=LIMIT, state_dir=tmp_path)
    consumer = client.consumer("orders", "kitchen")

    async def run() -> list[int]:
        async with client:
            await client.send("orders", b"x")
            return sequences(await consumer.pull(timeout=LIMIT))

    assert asyncio.run(run()) == [0]


async def test_an_answer_that_makes_no_sense_ends_the_connection(
    broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = broker._handle  # noqa: SLF001  # it answers sensibly
    wrong = iter([True])

    def confused(request: requests.Request, peer: socket.socket) -> responses.Response:
        if isinstance(request, requests.Pull) and next(wrong, False):
            return responses.Beaten(1)
        return handle(request, peer)

    monkeypatch.setattr(broker, "_handle", confused)
    async with aio.connect(broker.url, timeout=LIMIT, state_dir=tmp_path) as client:
        await client.send("orders", b"x")
        async with client.consumer("orders", "kitchen") as consumer:
            with pytest.raises(RemoteProtocolError):
                await consumer.pull(timeout=LIMIT)

            assert not consumer.is_connected
            assert sequences(await consumer.pull(timeout=LIMIT)) == [0]


async def test_deliveries_that_others_have_now_are_abandoned(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send_many("orders", [b"x"] * 3)

    async with client.consumer("orders", "kitchen") as consumer:
        messages = await consumer.pull()
        broker.lose_consumers()
        await client.send("orders", b"y")
        more = await consumer.pull()
        consumer.ack_all([*messages, *more])

        assert all(message.is_abandoned for message in messages)
        assert consumer.abandoned == 3
        assert consumer.held == 1
    assert broker.acked == [("orders", 3)]


@pytest.mark.parametrize("kind", [requests.Pull, requests.Settle, requests.Heartbeat])
async def test_a_fenced_consumer_stops_with_an_error(
    broker: FakeBroker, tmp_path: Path, kind: type[requests.Request]
) -> None:
    broker.lease_ms = 300
    async with aio.connect(broker.url, timeout=5, state_dir=tmp_path) as client:
        await client.send_many("orders", [b"x"] * 3)
        consumer = client.consumer("orders", "kitchen", max_messages=1)
        broker.fault = Times(kind, FencedError("a newer one is here"), times=1000)

        with pytest.raises(FencedError, match="a newer one"):
            await take(consumer, 100)


async def test_damage_on_the_way_is_asked_for_again_and_at_the_broker_is_raised(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send("orders", b"tea")
    damages = iter([True])
    broker.corrupt = lambda data: data[:-1] + b"?" if next(damages, False) else data
    async with client.consumer("orders", "kitchen") as consumer:
        assert (await take(consumer, 1))[0].body == b"tea"

    broker.corrupt = lambda data: data[:-1] + b"?"
    async with client.consumer("orders", "bar") as consumer:
        with pytest.raises(CorruptionError):
            await take(consumer, 1)


async def test_another_task_may_close_a_waiting_consumer(
    broker: FakeBroker, client: aio.Client
) -> None:
    consumer = client.consumer("orders", "kitchen")
    task = asyncio.create_task(take(consumer, 1))
    await until(lambda: bool(broker.seen(requests.Pull)))

    await consumer.close()

    assert await task == []
    await consumer.close()


async def test_tail_and_positions_look_without_a_group(
    broker: FakeBroker, client: aio.Client
) -> None:
    await client.send("orders", b"before")
    (found,) = await client.positions("orders")
    assert (found.start, found.end) == (0, 1)

    tail = client.tail("orders")
    waiting = asyncio.ensure_future(anext(tail))
    await until(lambda: bool(broker.seen(requests.Read)))
    await client.send("orders", b"after")

    assert (await waiting).body == b"after"
    assert (await anext(client.tail("orders", start="earliest"))).body == b"before"


async def test_closing_a_client_closes_what_came_from_it(
    broker: FakeBroker, tmp_path: Path
) -> None:
    client = await aio.connect(broker.url, state_dir=tmp_path)
    consumer = client.consumer("orders", "kitchen")
    assert await consumer.pull(timeout=0.01) == []
    pending = await client.producer().send("orders", b"x")

    await client.close()

    assert (await pending).sequence == 0
    assert [message async for message in consumer] == []
    await until(lambda: not broker.connections)


@pytest.mark.accepts("000-39")
async def test_what_was_lost_meanwhile_is_not_handed_out(tmp_path: Path) -> None:
    lost = asyncio.Event()
    with FakeBroker(lease_ms=1500) as broker:
        async with (
            aio.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client,
            client.consumer("orders", group="g") as consumer,
        ):
            await client.send_many("orders", [b"%d" % number for number in range(5)])
            consumer.on_abandoned(lost.set)
            messages = aiter(consumer)
            first = await anext(messages)
            broker.stop_listening()
            broker.drop_all()
            async with asyncio.timeout(LIMIT):
                await lost.wait()
            broker.lose_consumers()
            broker.listen_again()
            await client.send("orders", b"next")
            second = await anext(messages)

            assert (first.body, first.is_abandoned) == (b"0", True)
            assert (second.body, second.is_abandoned) == (b"next", False)


def test_another_event_loop_is_refused_at_once(broker: FakeBroker) -> None:
    async def make() -> tuple[aio.Client, aio.Producer, aio.Consumer]:
        client = await aio.connect(broker.url)
        return client, client.producer(), client.consumer("orders", group="kitchen")

    async def produce(client: aio.Client) -> None:
        client.producer()

    with asyncio.Runner() as one, asyncio.Runner() as other:
        client, producer, consumer = one.run(make())
        for attempt in (
            lambda: client.send("orders", b"tea"),
            lambda: client.send_many("orders", [b"tea"]),
            client.status,
            client.close,
            lambda: produce(client),
            lambda: producer.send("orders", b"tea"),
            producer.flush,
            producer.close,
            lambda: consumer.pull(1),
        ):
            with pytest.raises(UsageError, match="another event loop"):
                other.run(attempt())
        one.run(client.close())
    assert broker.seen(requests.Send) == []


def test_a_promise_that_is_awaited_in_another_event_loop_is_refused_at_once(
    broker: FakeBroker,
) -> None:
    async def send() -> tuple[aio.Client, aio.PendingSend, aio.PendingSends]:
        client = await aio.connect(broker.url)
        producer = client.producer(linger=60)
        return (
            client,
            await producer.send("orders", b"tea"),
            await producer.send_many("orders", [b"coffee"]),
        )

    async def wait(pending: Awaitable[object]) -> object:
        async with asyncio.timeout(LIMIT):
            return await pending

    with asyncio.Runner() as one, asyncio.Runner() as other:
        client, single, many = one.run(send())
        for attempt in (single.result, single.exception, many.result):
            with pytest.raises(UsageError, match="another event loop"):
                other.run(wait(attempt()))
        one.run(client.close())
        assert other.run(wait(single)) == one.run(wait(single))  # nobody has to be waited for

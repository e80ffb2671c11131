"""A message that has expired is not handed out, not even the first time."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import pulque
from pulque import aio
from pulque.testing.broker import InProcessBroker

PAST = datetime.now(UTC) - timedelta(hours=1)
FUTURE = datetime.now(UTC) + timedelta(hours=1)
PATIENCE = 10


def send_all(client: pulque.Client) -> None:
    """Send messages of all kinds, together and alone."""
    client.send_many(
        "orders",
        [
            pulque.Outgoing(b"late 1", order_key="k", expires_at=PAST),
            pulque.Outgoing(b"one", order_key="k", expires_at=FUTURE),
            pulque.Outgoing(b"late 2", order_key="k", expires_at=PAST),
            pulque.Outgoing(b"two", order_key="k"),
            pulque.Outgoing(b"late 3", order_key="k", expires_at=PAST),
        ],
    )
    client.send("orders", b"late 4", order_key="k", expires_at=PAST)
    client.send("orders", b"three", order_key="k", expires_at=FUTURE)


def pull_three(consumer: pulque.Consumer, how: str | int) -> list[bytes]:
    found: list[bytes] = []
    if how == "iterate":
        for message in consumer:
            found.append(message.body)
            message.ack()
            if len(found) == 3:
                return found
    while len(found) < 3:
        messages = consumer.pull(int(how), timeout=PATIENCE)
        assert messages
        found += [message.body for message in messages]
        for message in messages:
            message.ack()
    return found


def dead_letters(
    broker: InProcessBroker, client: pulque.Client, group: str
) -> list[tuple[bytes, str]]:
    broker.advance_time(0)  # the broker writes dead letters after it has answered
    letters = client.dead("orders", group=group).list()
    return [(each.body, each.headers["pulque.dead"]) for each in letters]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("how", ["iterate", 2, 10])
def test_expired_messages_become_dead_letters(
    pulque_broker: InProcessBroker,
    pulque_client: pulque.Client,
    how: str | int,
    *,
    is_ordered: bool,
) -> None:
    send_all(pulque_client)
    with pulque_client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer:
        found = pull_three(consumer, how)
        consumer.settle()

    assert found == [b"one", b"two", b"three"]
    assert dead_letters(pulque_broker, pulque_client, "kitchen") == [
        (f"late {number}".encode(), "expired") for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("mode", ["once", "broadcast"])
def test_expired_messages_are_passed_over_where_there_are_no_dead_letters(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, mode: str
) -> None:
    send_all(pulque_client)
    group = "kitchen" if mode == "once" else None
    with pulque_client.consumer("orders", group=group, mode=mode) as consumer:  # type: ignore[arg-type]
        assert pull_three(consumer, 10) == [b"one", b"two", b"three"]
        consumer.settle()
    pulque_broker.advance_time(0)
    assert [each["name"] for each in pulque_client.status()["partitions"]] == ["orders"]


async def test_a_consumer_for_asyncio_does_the_same(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    send_all(pulque_client)
    found = []
    async with (
        aio.connect(pulque_broker.url, name="test", timeout=5) as client,
        client.consumer("orders", group="kitchen") as consumer,
    ):
        async for message in consumer:
            found.append(message.body)
            message.ack()
            if len(found) == 3:
                break
        await consumer.settle()

    assert found == [b"one", b"two", b"three"]
    assert len(dead_letters(pulque_broker, pulque_client, "kitchen")) == 4


def test_a_message_that_expires_while_others_are_handled_is_not_handed_out(
    pulque_client: pulque.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulque_client.send_many(
        "orders",
        [pulque.Outgoing(body, expires_at=FUTURE) for body in (b"one", b"two")]
        + [pulque.Outgoing(b"three")],
    )
    found = []
    long_after = int(FUTURE.timestamp() * 1000) + 1
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        for message in consumer:
            found.append(message.body)
            message.ack()
            monkeypatch.setattr(
                "pulque.client.receiving.received_message.wall_ms", lambda: long_after
            )
            if message.body == b"three":
                break
        consumer.settle()

    assert found == [b"one", b"three"]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("mode", ["shared", "ordered", "once", "broadcast"])
async def test_an_application_is_not_called_with_expired_messages(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, mode: str, *, is_batch: bool
) -> None:
    send_all(pulque_client)
    app = pulque.App(pulque_broker.url)
    group = None if mode == "broadcast" else "kitchen"
    called: list[bytes] = []
    done = asyncio.Event()

    def handle(bodies: list[bytes]) -> None:
        called.extend(bodies)
        if len(called) == 3:
            done.set()

    if is_batch:

        @app.subscribe_batch("orders", group=group, mode=mode, max_wait=0.01)  # type: ignore[arg-type]
        async def handle_all(messages: list[pulque.ReceivedMessage]) -> None:
            handle([each.body for each in messages])

    else:

        @app.subscribe("orders", group=group, mode=mode)  # type: ignore[arg-type]
        async def handle_one(message: pulque.ReceivedMessage) -> None:
            handle([message.body])

    async with app, asyncio.timeout(PATIENCE):
        await done.wait()

    assert called == [b"one", b"two", b"three"]
    if mode in {"shared", "ordered"}:
        assert dead_letters(pulque_broker, pulque_client, "kitchen") == [
            (f"late {number}".encode(), "expired") for number in (1, 2, 3, 4)
        ]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_what_expires_while_it_is_prefetched_is_not_handed_out(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, *, is_ordered: bool
) -> None:
    soon = pulque_broker.now + timedelta(minutes=1)
    pulque_client.send_many(
        "orders",
        [
            pulque.Outgoing(b"one", order_key="a"),
            pulque.Outgoing(b"late", order_key="b", expires_at=soon),
            pulque.Outgoing(b"two", order_key="c"),
        ],
    )
    with pulque_client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer:
        (first,) = consumer.pull(1, timeout=PATIENCE)
        first.ack()
        pulque_broker.advance_time(60)
        (second,) = consumer.pull(1, timeout=PATIENCE)
        second.ack()
        consumer.settle()

    assert (first.body, second.body) == (b"one", b"two")
    assert dead_letters(pulque_broker, pulque_client, "kitchen") == [(b"late", "expired")]


async def test_what_expires_while_its_batch_waits_for_more_is_not_handled(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    soon = pulque_broker.now + timedelta(minutes=1)
    app = pulque.App(pulque_broker.url)
    called: list[bytes] = []
    done = asyncio.Event()

    @app.subscribe_batch("orders", group="kitchen", max_messages=2, max_wait=3600)
    async def handle(messages: list[pulque.ReceivedMessage]) -> None:
        called.extend(each.body for each in messages)
        done.set()

    def deliveries() -> object:
        return pulque_client.status()["messages_delivered"]

    async with app, asyncio.timeout(PATIENCE):
        await app.send("orders", b"late", expires_at=soon)
        while await asyncio.to_thread(deliveries) != 1:  # noqa: ASYNC110  # the broker's
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pulque_broker.advance_time, 60)
        await app.client.send_many("orders", [b"one", b"two"])
        await done.wait()

    assert called == [b"one", b"two"]
    assert dead_letters(pulque_broker, pulque_client, "kitchen") == [(b"late", "expired")]


@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_what_expires_behind_a_slow_call_is_not_handled(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, mode: str
) -> None:
    soon = pulque_broker.now + timedelta(minutes=1)
    quick = [pulque.Outgoing(b"quick", order_key="k") for _ in range(2000)]
    slow = pulque.Outgoing(b"slow", order_key="k")
    late = [pulque.Outgoing(b"late", order_key="k", expires_at=soon) for _ in range(50)]
    pulque_client.send_many("orders", [*quick, slow, *late, slow])
    app = pulque.App(pulque_broker.url)
    called: list[bytes] = []
    done = asyncio.Event()

    @app.subscribe("orders", group="kitchen", mode=mode)  # type: ignore[arg-type]
    async def handle(message: pulque.ReceivedMessage) -> None:
        called.append(message.body)
        if message.body == b"slow" and called.count(b"slow") == 1:
            await asyncio.to_thread(pulque_broker.advance_time, 60)
        elif message.body == b"slow":
            done.set()

    async with app, asyncio.timeout(PATIENCE):
        await done.wait()

    assert b"late" not in called
    assert len(dead_letters(pulque_broker, pulque_client, "kitchen")) == len(late)

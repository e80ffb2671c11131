"""Looking at the partitions of a subject one by one, without a group."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import pulque
from pulque import aio
from pulque.testing.broker import InProcessBroker
from pulque.wire.requests import Read
from tests.malformed import torn
from tests.unit.client.fake_broker import FakeBroker

PATIENCE = 20.0

BY_PARTITION = {"orders": [b"0", b"3"], "orders#p5": [b"1", b"4"], "orders#p6": [b"2", b"5"]}


def send_all(client: pulque.Client) -> None:
    """Send messages of three priorities, which are in a partition each."""
    for number in range(6):
        client.send("orders", b"%d" % number, priority=4 + number % 3)


def test_a_partition_that_is_named_is_read_once_whatever_else_its_broker_has(
    pulque_client: pulque.Client,
) -> None:
    send_all(pulque_client)
    found = pulque_client.positions("orders")

    assert {
        each.partition: [m.body for m in pulque_client.read("orders", partition=each.partition)]
        for each in found
    } == BY_PARTITION
    tail = pulque_client.tail("orders", start="earliest")
    assert sorted(next(tail).body for _ in range(6)) == [b"%d" % number for number in range(6)]


async def test_a_partition_that_is_named_is_read_once_with_asyncio(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    send_all(pulque_client)
    async with aio.connect(pulque_broker.url) as client:
        found = await client.positions("orders")
        bodies = {
            each.partition: [m.body for m in await client.read("orders", partition=each.partition)]
            for each in found
        }

    assert bodies == BY_PARTITION


def store_torn(broker: FakeBroker) -> None:
    broker.store("orders", torn("orders"))


def lose_messages(broker: FakeBroker) -> None:
    """Have a broker announce messages and send none, as it does of a damaged range."""
    broker.partition("orders").end += 3


unreadable = pytest.mark.parametrize("spoil", [store_torn, lose_messages])


def waits_behind(broker: FakeBroker, sequence: int) -> None:
    """Wait until somebody waits for the next message, from a sequence on."""
    broker.wait_until(
        lambda: any(
            isinstance(each, Read) and each.sequence == sequence and each.timeout_ms
            for each in broker.requests
        )
    )


@unreadable
def test_a_tail_waits_behind_the_newest_messages_that_cannot_be_read(
    broker: FakeBroker, client: pulque.Client, spoil: Callable[[FakeBroker], None]
) -> None:
    client.send("orders", b"before")
    spoil(broker)
    tail = client.tail("orders", start="earliest")
    assert next(tail).body == b"before"
    with ThreadPoolExecutor(1) as thread:
        after = thread.submit(lambda: next(tail).body)
        try:
            waits_behind(broker, 4)
        finally:
            client.send("orders", b"after")
        assert after.result(PATIENCE) == b"after"


@unreadable
def test_a_read_waits_behind_messages_that_cannot_be_read(
    broker: FakeBroker, client: pulque.Client, spoil: Callable[[FakeBroker], None]
) -> None:
    spoil(broker)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: client.read("orders", timeout=PATIENCE))
        try:
            waits_behind(broker, 3)
        finally:
            client.send("orders", b"after")
        assert [each.body for each in found.result(PATIENCE)] == [b"after"]
    assert client.read("orders", 4) == []


@unreadable
async def test_a_tail_with_asyncio_waits_behind_the_newest_messages_that_cannot_be_read(
    broker: FakeBroker, client: pulque.Client, spoil: Callable[[FakeBroker], None]
) -> None:
    client.send("orders", b"before")
    spoil(broker)
    async with aio.connect(broker.url) as other, asyncio.timeout(PATIENCE):
        tail = other.tail("orders", start="earliest")
        assert (await anext(tail)).body == b"before"
        after = asyncio.ensure_future(anext(tail))
        await asyncio.to_thread(waits_behind, broker, 4)
        await asyncio.to_thread(client.send, "orders", b"after")
        assert (await after).body == b"after"


@unreadable
async def test_a_read_with_asyncio_waits_behind_messages_that_cannot_be_read(
    broker: FakeBroker, client: pulque.Client, spoil: Callable[[FakeBroker], None]
) -> None:
    spoil(broker)
    async with aio.connect(broker.url) as other, asyncio.timeout(PATIENCE):
        found = asyncio.create_task(other.read("orders", timeout=PATIENCE))
        await asyncio.to_thread(waits_behind, broker, 3)
        await asyncio.to_thread(client.send, "orders", b"after")
        assert [each.body for each in await found] == [b"after"]

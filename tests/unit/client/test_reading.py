"""Looking at the partitions of a subject one by one, without a group."""

import pulque
from pulque import aio
from pulque.testing.broker import InProcessBroker

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

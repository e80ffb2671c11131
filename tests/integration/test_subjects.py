"""Priorities and patterns, from the client that sends to the client that receives."""

import contextlib
from collections.abc import Iterable

import pytest

import pulque
from pulque import aio
from pulque.errors import InvalidNameError, UnknownSubjectError, UsageError
from pulque.testing.broker import InProcessBroker
from pulque.testing.process import UpProcess
from tests.nothing import check_nothing_comes

pytestmark = pytest.mark.server


def take(consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    """Return so many messages, acked; it must not take long."""
    found: list[pulque.ReceivedMessage] = []
    while len(found) < count:
        messages = consumer.pull(count - len(found), timeout=20)
        assert messages, f"{len(found)} of {count} came"
        consumer.ack_all(messages)
        found += messages
    return found


async def take_async(consumer: aio.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    while len(found) < count:
        messages = await consumer.pull(count - len(found), timeout=20)
        assert messages, f"{len(found)} of {count} came"
        consumer.ack_all(messages)
        found += messages
    return found


def bodies(messages: Iterable[pulque.Message]) -> list[bytes]:
    return [message.body for message in messages]


# -- priorities ---------------------------------------------------------------------------------


@pytest.mark.accepts("000-56", "004-02", "004-66")
def test_higher_priorities_come_first(pulque_client: pulque.Client) -> None:
    for priority in (4, 0, 9, 7, 1):
        receipt = pulque_client.send("orders", b"%d" % priority, priority=priority)
        assert receipt.partition == ("orders" if priority == 4 else f"orders#p{priority}")

    with pulque_client.consumer("orders", "billing") as consumer:
        got = take(consumer, 5)

    assert bodies(got) == [b"9", b"7", b"4", b"1", b"0"]
    assert [message.priority for message in got] == [9, 7, 4, 1, 0]
    assert {message.subject for message in got} == {"orders"}


@pytest.mark.accepts("000-56")
def test_all_ways_to_send_know_priorities(pulque_client: pulque.Client) -> None:
    mixed: list[bytes | pulque.Outgoing] = [
        pulque.Outgoing(b"low", priority=1),
        b"plain",
        pulque.Outgoing(b"high", priority=8),
    ]
    receipts = pulque_client.send_many("orders", mixed)
    with pulque_client.producer() as producer:
        producer.send("orders", b"higher", priority=9, key="k")
        producer.send("orders", b"lower", priority=0, order_key="o").result()
        producer.send_many("orders", mixed).result()

    with pulque_client.consumer("orders", "billing") as consumer:
        got = take(consumer, 8)

    assert [r.partition for r in receipts] == ["orders#p1", "orders", "orders#p8"]
    assert bodies(got) == [
        b"higher",
        b"high",
        b"high",
        b"plain",
        b"plain",
        b"low",
        b"low",
        b"lower",
    ]


async def test_the_asynchronous_twin_knows_priorities(pulque_aio_client: aio.Client) -> None:
    client = pulque_aio_client
    for priority in (4, 9, 0):
        await client.send("orders", b"%d" % priority, priority=priority)
    async with client.consumer("orders", "billing") as consumer:
        got = await take_async(consumer, 3)

    assert bodies(got) == [b"9", b"4", b"0"]


@pytest.mark.accepts("000-56")
def test_a_consumer_that_waits_gets_a_priority_that_was_never_used(
    pulque_client: pulque.Client,
) -> None:
    with pulque_client.consumer("orders", "billing") as consumer:
        check_nothing_comes(pulque_client, consumer)
        for priority in (9, 4, 0):
            pulque_client.send("orders", b"%d" % priority, priority=priority)
            assert bodies(take(consumer, 1)) == [b"%d" % priority]


def test_messages_of_new_priorities_are_not_passed_over_by_a_group_that_began_at_the_end(
    pulque_client: pulque.Client,
) -> None:
    pulque_client.send("orders", b"old")
    with pulque_client.consumer("orders", "billing", start="latest") as consumer:
        check_nothing_comes(pulque_client, consumer)
    pulque_client.send("orders", b"urgent", priority=9)

    with pulque_client.consumer("orders", "billing", start="latest") as consumer:
        assert bodies(take(consumer, 1)) == [b"urgent"]


@pytest.mark.accepts("000-40", "000-56")
def test_a_retry_keeps_its_priority(pulque_client: pulque.Client) -> None:
    pulque_client.send("orders", b"urgent", priority=9)
    pulque_client.send("orders", b"usual")
    with pulque_client.consumer(
        "orders", "billing", retry=pulque.RetryPolicy(delays=[0])
    ) as consumer:
        first = consumer.pull(1, timeout=20)[0]
        first.nack("not now", delay=0)
        consumer.settle()
        again = [message for message in take(consumer, 2) if message.body == b"urgent"]

    assert [(m.priority, m.attempt, m.subject) for m in again] == [(9, 2, "orders")]


@pytest.mark.parametrize("priority", [-1, 10, 7.0, "9", None, True])
def test_a_priority_that_there_is_not_is_refused(
    pulque_client: pulque.Client, priority: object
) -> None:
    with pytest.raises(UsageError, match="0 to 9"):
        pulque_client.send("orders", b"x", priority=priority)  # type: ignore[arg-type]
    with (
        pulque_client.producer() as producer,
        pytest.raises(UsageError, match="0 to 9"),
    ):
        producer.send("orders", b"x", priority=priority)  # type: ignore[arg-type]


def test_positions_and_tail_know_all_priorities(pulque_client: pulque.Client) -> None:
    pulque_client.send("orders", b"urgent", priority=9)
    tail = pulque_client.tail("orders", start="earliest")

    assert next(tail).body == b"urgent"
    pulque_client.send("orders", b"usual")
    assert next(tail).body == b"usual"
    found = {each.partition: each.end for each in pulque_client.positions("orders")}
    assert found == {"orders": 1, "orders#p9": 1}
    with pytest.raises(UnknownSubjectError):
        pulque_client.positions("nothing")


# -- patterns -----------------------------------------------------------------------------------


@pytest.mark.accepts("000-20")
def test_a_pattern_covers_subjects_that_are_there_and_those_that_come_later(
    pulque_client: pulque.Client,
) -> None:
    pulque_client.send("order.paid", b"1")
    pulque_client.send("order", b"not covered")
    pulque_client.send("orders.paid", b"not covered")
    with pulque_client.consumer("order.*", "billing") as consumer:
        assert bodies(take(consumer, 1)) == [b"1"]
        for number, subject in enumerate(["order.sent", "order.sent.late", "order.paid"], start=2):
            pulque_client.send(subject, b"%d" % number)
            (message,) = take(consumer, 1)
            assert (message.subject, message.body) == (subject, b"%d" % number)
        check_nothing_comes(pulque_client, consumer)


@pytest.mark.accepts("000-20")
async def test_the_asynchronous_twin_covers_subjects_that_come_later(
    pulque_aio_client: aio.Client,
) -> None:
    client = pulque_aio_client
    async with client.consumer("order.*", "billing", start="latest") as consumer:
        while not consumer.is_connected:  # the group begins when its first consumer is there
            assert await consumer.pull(timeout=0.05) == []
        for number, subject in enumerate(["order.sent", "order.paid", "order.sent"]):
            await client.send(subject, b"%d" % number)
            assert bodies(await take_async(consumer, 1)) == [b"%d" % number]


@pytest.mark.accepts("000-19", "000-20")
def test_each_subject_of_a_pattern_has_a_position_of_its_own(
    pulque_client: pulque.Client, pulque_broker: InProcessBroker
) -> None:
    for subject, count in (("order.a", 3), ("order.b", 5)):
        for number in range(count):
            pulque_client.send(subject, b"%d" % number)
    with pulque_client.consumer("order.*", "billing") as consumer:
        take(consumer, 8)
        consumer.settle()
    pulque_broker.restart()
    pulque_client.send("order.a", b"3")

    with pulque_client.consumer("order.*", "billing") as consumer:
        assert bodies(take(consumer, 1)) == [b"3"]
        consumer.settle()
        check_nothing_comes(pulque_client, consumer)
    positions = {
        each["partition"]: each["next_sequence"] for each in pulque_client.status()["groups"]
    }
    assert positions == {"order.a": 4, "order.b": 5}


def test_a_star_covers_all_subjects_and_no_retries_of_others(pulque_client: pulque.Client) -> None:
    pulque_client.send("order", b"1")
    with pulque_client.consumer(
        "order", "other", retry=pulque.RetryPolicy(delays=[0])
    ) as consumer:
        consumer.pull(1, timeout=20)[0].nack("no", delay=0)
        consumer.settle()
        take(consumer, 1)
    pulque_client.send("refund.eu", b"2", priority=9)

    with pulque_client.consumer("*", "billing") as consumer:
        assert sorted(bodies(take(consumer, 2))) == [b"1", b"2"]
        check_nothing_comes(pulque_client, consumer)


def test_a_pattern_gets_its_retries(pulque_client: pulque.Client) -> None:
    pulque_client.send("order.paid", b"1")
    with pulque_client.consumer(
        "order.*", "billing", retry=pulque.RetryPolicy(delays=[0])
    ) as consumer:
        consumer.pull(1, timeout=20)[0].nack("not now", delay=0)
        consumer.settle()
        (again,) = take(consumer, 1)

    assert (again.subject, again.attempt) == ("order.paid", 2)


@pytest.mark.parametrize("pattern", ["order.*", "*"])
def test_nothing_is_sent_to_a_pattern(pulque_client: pulque.Client, pattern: str) -> None:
    with pytest.raises(InvalidNameError, match="a message goes to one subject"):
        pulque_client.send(pattern, b"x")


@pytest.mark.parametrize("pattern", ["order*", "*.paid", "a.*.b", ""])
def test_a_pattern_that_makes_no_sense_is_refused(
    pulque_client: pulque.Client, pattern: str
) -> None:
    with pytest.raises(InvalidNameError, match="is not allowed"):
        pulque_client.consumer(pattern, "billing")


# -- walking through what is stored -------------------------------------------------------------


@pytest.mark.accepts("004-97")
def test_a_program_can_walk_all_partitions_and_keep_its_own_positions(
    pulque_client: pulque.Client,
) -> None:
    sent = set()
    for number in range(100):
        body = b"%d" % number
        pulque_client.send("orders", body, priority=number % 3 * 4)
        sent.add(body)
    nexts: dict[str, int] = {
        each.partition: each.start for each in pulque_client.positions("orders")
    }
    seen: list[bytes] = []

    for partition in list(nexts):
        while messages := pulque_client.read(
            "orders", nexts[partition], partition=partition, max_messages=7
        ):
            assert len(messages) <= 7
            seen += bodies(messages)
            nexts[partition] = messages[-1].sequence + 1

    assert len(nexts) == 3
    assert sorted(seen) == sorted(sent)
    pulque_client.send("orders", b"later")
    later = pulque_client.read("orders", nexts["orders"], partition="orders")
    assert bodies(later) == [b"later"]


async def test_a_consumer_of_a_subject_that_nobody_has_yet_lacks_no_connection(
    up_process: UpProcess,
) -> None:
    with (
        pulque.connect() as client,
        client.consumer("later", "g") as consumer,
        client.consumer("later", "ordered", mode="ordered") as ordered,
    ):
        for each in (consumer, ordered):
            assert not each.is_connected
            assert each.pull(1, timeout=2) == []
            assert each.is_connected
    async with aio.connect() as client_, client_.consumer("later", "g") as waiting:
        assert await waiting.pull(1, timeout=2) == []
        assert waiting.is_connected
        await client_.send("later", b"one")
        assert bodies(await take_async(waiting, 1)) == [b"one"]
        up_process.kill()
        with contextlib.suppress(pulque.UnavailableError):
            await waiting.pull(1, timeout=2)
        assert not waiting.is_connected

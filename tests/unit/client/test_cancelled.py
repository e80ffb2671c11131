"""A task that is cancelled wherever it waits leaves a client that works and can be closed.

What was confirmed is stored, what was taken in has an outcome, no message is lost or stored twice,
and after ``close`` no task and no connection is left.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

import pulque
from pulque import aio
from pulque.errors import RequestTimeoutError
from pulque.testing.broker import InProcessBroker
from tests.unit.client.cancelling import Canceller
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_cluster import FakeCluster

PATIENCE = 20.0
BODIES = {b"one", b"two", b"three"}


class Servers:
    """A lone broker, or two of a cluster."""

    def __init__(self, url: str, brokers: list[FakeBroker]) -> None:
        self.url = url
        self.brokers = brokers

    def stored(self, subject: str) -> list[bytes]:
        return [
            body
            for broker in self.brokers
            if subject in broker.partitions
            for body in broker.messages(subject)
        ]

    async def are_free(self) -> bool:
        """Wait until no connection is left."""
        for broker in self.brokers:
            await asyncio.to_thread(broker.wait_until, lambda: not broker.connections)  # noqa: B023
        return True


@pytest.fixture(params=["lone", "cluster"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    if request.param == "lone":
        with FakeBroker() as broker:
            yield Servers(broker.url, [broker])
    else:
        with FakeCluster(2) as cluster:
            yield Servers(cluster.url, cluster.brokers)


Connect = Callable[[], aio.Client]


@pytest.fixture
def connect(servers: Servers, tmp_path: Path) -> Connect:
    return lambda: aio.connect(servers.url, name="test", timeout=PATIENCE / 2, state_dir=tmp_path)


async def in_time(act: Awaitable[Any], where: str) -> Any:
    try:
        async with asyncio.timeout(PATIENCE):
            return await act
    except TimeoutError:
        pytest.fail(f"hangs after a cancellation at {where}")


async def everywhere(
    servers: Servers | None, attempt: Callable[[int, Canceller], Awaitable[None]]
) -> None:
    """Make attempts that are cancelled at the first point, the second, until there is none."""
    number = 0
    while True:
        canceller = Canceller(number)
        await attempt(number, canceller)
        left = asyncio.all_tasks() - {cast(asyncio.Task[Any], asyncio.current_task())}
        assert not left, f"point {number}"
        assert servers is None or await servers.are_free(), f"point {number}"
        if not canceller.has_cancelled:
            assert number > 0, "nothing was cancelled"
            return
        number += 1


async def test_connecting_can_be_cancelled(servers: Servers, connect: Connect) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client = connect()
        await canceller.run(client.warm_up())
        await in_time(client.close(), f"point {number}")

    await everywhere(servers, attempt)


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_send_can_be_cancelled(
    servers: Servers, connect: Connect, *, is_warm: bool
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client, subject, where = connect(), f"orders.{number}", f"point {number}"
        if is_warm:
            await client.send("warm", b"up")
        await canceller.run(client.send(subject, b"one", key="k"))
        await in_time(client.send(subject, b"two"), where)
        await in_time(client.close(), where)
        found = Counter(servers.stored(subject))
        assert found[b"two"] == 1, where
        assert found[b"one"] <= 1, where

    await everywhere(servers, attempt)


@pytest.mark.parametrize("has_spool", [False, True])
async def test_a_producer_can_be_cancelled(
    servers: Servers, connect: Connect, tmp_path: Path, *, has_spool: bool
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client, subject, where = connect(), f"orders.{number}", f"point {number}"
        spool = tmp_path / f"spool-{number}" if has_spool else None
        producer = client.producer(linger=0.001, spool=spool, spool_sync=False)
        before = await producer.send(subject, b"before")

        async def act() -> None:
            _ = await producer.send(subject, b"body")
            _ = await producer.send_many(subject, [b"many", b"more"])
            _ = await producer.send(subject, b"with a key", key="k")
            _ = await producer.send(f"{subject}.more", b"elsewhere")
            await producer.flush()
            await (await producer.send(subject, b"waited for"))

        await canceller.run(act())
        await in_time(before.result(), where)
        after = await in_time(producer.send(subject, b"after"), where)
        await in_time(after.result(), where)
        await in_time(producer.flush(), where)
        await in_time(producer.close(), where)
        await in_time(client.close(), where)
        found = Counter(servers.stored(subject))
        assert found[b"before"] == found[b"after"] == max(found.values()) == 1, where

    await everywhere(servers, attempt)


@pytest.mark.parametrize("has_spool", [False, True])
@pytest.mark.parametrize("whose", ["producer", "client"])
async def test_the_close_of_a_producer_can_be_cancelled(
    servers: Servers, connect: Connect, tmp_path: Path, whose: str, *, has_spool: bool
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client, subject, where = connect(), f"orders.{number}", f"point {number}"
        spool = tmp_path / f"spool-{number}" if has_spool else None
        producer = client.producer(linger=0.001, spool=spool)
        pending = await producer.send(subject, b"one")
        await canceller.run((producer if whose == "producer" else client).close())
        await in_time(producer.close(), where)
        error = await in_time(pending.exception(), where)
        assert not isinstance(error, RequestTimeoutError), where
        if error is None:
            assert servers.stored(subject) == [b"one"], where
        await in_time(client.close(), where)

    await everywhere(servers, attempt)


async def pull_all(consumer: aio.Consumer, got: set[bytes]) -> None:
    while got != BODIES:
        for message in await consumer.pull(2):
            message.ack()
            got.add(message.body)
        await consumer.settle()


async def iterate_all(consumer: aio.Consumer, got: set[bytes]) -> None:
    async with aclosing(cast(Any, aiter(consumer))) as messages:
        async for message in messages:
            message.ack()
            got.add(message.body)
            if got == BODIES:
                return


@pytest.mark.parametrize("consume", [pull_all, iterate_all])
async def test_a_consumer_can_be_cancelled(
    servers: Servers,
    connect: Connect,
    consume: Callable[[aio.Consumer, set[bytes]], Any],
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client, subject, where = connect(), f"orders.{number}", f"point {number}"
        await client.send_many(subject, sorted(BODIES))
        consumer = client.consumer(subject, group="kitchen")
        got: set[bytes] = set()
        await canceller.run(consume(consumer, got))
        tries = 0
        while got != BODIES:
            assert tries < 20, f"only {got} after a cancellation at {where}"
            tries += 1
            got |= {each.body for each in await in_time(consumer.pull(3), where)}
        await in_time(consumer.close(), where)
        await in_time(client.close(), where)

    await everywhere(servers, attempt)


@pytest.mark.parametrize("whose", ["consumer", "client"])
async def test_the_close_of_a_consumer_can_be_cancelled(
    servers: Servers, connect: Connect, whose: str
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        client, subject, where = connect(), f"orders.{number}", f"point {number}"
        await client.send_many(subject, [b"one", b"two"])
        consumer = client.consumer(subject, group="kitchen")
        (message,) = await consumer.pull(1)
        message.ack()
        await canceller.run((consumer if whose == "consumer" else client).close())
        await in_time(consumer.close(), where)
        await in_time(client.close(), where)
        async with connect() as again, again.consumer(subject, group="kitchen") as other:
            (left,) = await in_time(other.pull(2), where)
            assert left.body == b"two", where

    await everywhere(servers, attempt)


@pytest.mark.parametrize("what", ["pull", "consumer", "client"])
async def test_a_consumer_in_order_can_be_cancelled(
    pulque_broker: InProcessBroker, tmp_path: Path, what: str
) -> None:
    async def attempt(number: int, canceller: Canceller) -> None:
        subject, where = f"orders.{number}", f"point {number}"
        client = aio.connect(pulque_broker.url, timeout=PATIENCE / 2, state_dir=tmp_path)
        await client.send_many(
            subject, [pulque.Outgoing(body, order_key="k") for body in (b"one", b"two")]
        )
        consumer = client.consumer(subject, group="kitchen", ordered=True)

        async def act() -> None:
            for message in await consumer.pull(1, timeout=PATIENCE):
                message.ack()
                got.append(message.body)
            if what != "pull":
                await (consumer if what == "consumer" else client).close()

        got: list[bytes] = []
        await canceller.run(act())
        await in_time(consumer.close(), where)
        await in_time(client.close(), where)
        async with (
            aio.connect(pulque_broker.url, timeout=PATIENCE / 2, state_dir=tmp_path) as again,
            again.consumer(subject, group="kitchen", ordered=True) as other,
        ):
            while got != [b"one", b"two"]:
                (message,) = await in_time(other.pull(1, timeout=PATIENCE), where)
                got.append(message.body)
                message.ack()

    await everywhere(None, attempt)

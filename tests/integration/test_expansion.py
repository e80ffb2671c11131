"""Partitions of an ordered subject are split and merged while messages flow: order holds.

A real meta server and real brokers in one event loop; consumers and producers are written out
here by the wire protocol alone, so that nothing of the client can hide a fault of the servers.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from google_crc32c import value as crc32c

import pulque
import pulque.aio
from pulque.errors import ErrorCode
from pulque.model.groups import Mode, Start, StartKind, tag_filter
from pulque.model.names import owner_of
from pulque.model.ordered import Allotted, OrderStrategy
from pulque.model.routes import SLOTS, PartitionRoute
from pulque.testing.raw import RawConnection
from pulque.wire.groups import Subscribe, Subscribed
from pulque.wire.ordered import (
    Attend,
    Attended,
    Lock,
    Locked,
    Ordered,
    OrderedReport,
    Unlock,
    Unlocked,
)
from pulque.wire.requests import Route
from pulque.wire.responses import Routed
from tests.unit.broker.running import Running
from tests.unit.meta.running import RunningMeta, eventually

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("expansion")]

META = {
    "cluster": {"heartbeat": "500ms"},
    "ordered": {"timeout": "2s", "drain_check": "20ms"},
}


class Cluster:
    """A meta server and two brokers."""

    def __init__(self, meta: RunningMeta, brokers: list[Running]) -> None:
        self.meta = meta
        self.brokers = brokers

    async def at(self, host: str, port: int) -> RawConnection:
        return await RawConnection.open(f"pulque://{host}:{port}", patience_s=30)


@asynccontextmanager
async def running_cluster(folder: Path) -> AsyncIterator[Cluster]:
    meta = RunningMeta(folder / "meta", META)
    url = await meta.server.start()
    brokers = []
    try:
        for name in ("b1", "b2"):
            sections = {
                "cluster": {"meta": [url.removeprefix("pulque://")]},
                "consumption": {"lock": "20s"},
            }
            broker = Running(folder / name, {**sections, "name": name}, None, None)  # type: ignore[dict-item]
            await broker.start()
            brokers.append(broker)
        yield Cluster(meta, brokers)
    finally:
        for broker in brokers:
            await broker.close()
        await meta.close()


class Producer:
    """Sends the messages of some keys, each after the one before it is stored."""

    def __init__(self, cluster: Cluster, keys: list[str]) -> None:
        self.cluster = cluster
        self.keys = keys
        self.sent: dict[str, int] = defaultdict(int)
        self.refused = 0
        self.lines: dict[tuple[str, int], RawConnection] = {}
        self.places: list[PartitionRoute] = []

    async def route(self) -> None:
        home = await self.cluster.meta.connect()
        found = (await home.ask(Route("orders", ""), Routed)).route
        self.places = [each for each in found.partitions if each.is_writable]

    async def send(self, key: str) -> None:
        body = f"{key}:{self.sent[key]}".encode()
        while True:
            slot = crc32c(key.encode()) % SLOTS
            place = next(each for each in self.places if each.slots[0] <= slot < each.slots[1])
            address = (place.host, place.port)
            if address not in self.lines:
                self.lines[address] = await self.cluster.at(*address)
            outcome = await self.lines[address].send(place.partition, [body])
            if outcome.code is ErrorCode.NONE:
                self.sent[key] += 1
                return
            assert outcome.code is ErrorCode.STALE_ROUTE, outcome
            self.refused += 1
            await self.route()

    async def run(self, stop: asyncio.Event) -> None:
        await self.route()
        while not stop.is_set():
            for key in self.keys:
                await self.send(key)
            await asyncio.sleep(0)
        for line in self.lines.values():
            line.close()


def sent_by(producers: list[Producer]) -> dict[str, int]:
    """Return how many messages of each key were sent."""
    return {key: producer.sent[key] for producer in producers for key in producer.keys}


async def send_on(producers: list[Producer]) -> None:
    """Wait until some more of each key were sent."""
    before = sent_by(producers)

    async def is_sent_on() -> bool:
        return all(now > before[key] + 5 for key, now in sent_by(producers).items())

    await eventually(is_sent_on, 60)


class Consumer:
    """Pulls from what is allotted to it, in order, with locks; writes down what it gets."""

    def __init__(
        self, cluster: Cluster, name: str, got: dict[str, list[int]], may_pull: asyncio.Event
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.got = got
        self.may_pull = may_pull
        self.tasks: dict[Allotted, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        home = await self.cluster.meta.connect()
        version, wait_ms = 0, 0
        while not stop.is_set():
            request = Attend(self.name, 1, "orders", "g", True, version, wait_ms)
            found = await home.ask(request, Attended)
            version, wait_ms = found.version, 200
            # Of retries there are none here; they would be pulled without a lock.
            await self.follow({p for p in found.partitions if owner_of(p.partition) is None})
        await self.follow(set())
        await home.ask(Attend(self.name, 1, "orders", "g", is_online=False), Attended)

    async def follow(self, wanted: set[Allotted]) -> None:
        gone = [self.tasks.pop(each) for each in set(self.tasks) - wanted]
        for _, stop in gone:
            stop.set()
        await asyncio.gather(*(task for task, _ in gone))
        for each in wanted - set(self.tasks):
            stop = asyncio.Event()
            self.tasks[each] = (asyncio.create_task(self.consume(each, stop)), stop)

    async def consume(self, place: Allotted, stop: asyncio.Event) -> None:
        raw = await self.cluster.at(place.host, place.port)
        name = place.partition
        with suppress(asyncio.CancelledError):
            await raw.ask(Subscribe("g", self.name, 1, "orders", Mode.ORDERED), Subscribed)
            token = 0
            while not token and not stop.is_set():
                asked = Lock(name, "g", self.name, 1, OrderStrategy.STRICT, 0, 200)
                token = (await raw.ask(asked, Locked)).token
            while token and not stop.is_set():
                await self.may_pull.wait()
                handed = await raw.pull(
                    name, consumer=self.name, token=token, max_messages=50, timeout_ms=50
                )
                assert handed.states[0].code is ErrorCode.NONE
                for run in handed.runs:
                    for body in run.bodies:
                        key, number = body.decode().split(":")
                        self.got[key].append(int(number))
                    await raw.settle(run, consumer=self.name, token=token)
            if token:
                await raw.ask(Unlock(name, "g", self.name, 1, token), Unlocked)
        raw.close()


@pytest.mark.accepts("002-01", "002-34")
async def test_order_holds_while_partitions_are_split_and_merged(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(12)]
    got: dict[str, list[int]] = defaultdict(list)
    async with running_cluster(tmp_path) as cluster:
        commands = cluster.meta.server.administration
        no_more, stop, may_pull = asyncio.Event(), asyncio.Event(), asyncio.Event()
        may_pull.set()
        producers = [Producer(cluster, keys[at::2]) for at in range(2)]
        sending = [asyncio.create_task(each.run(no_more)) for each in producers]
        consumers = [Consumer(cluster, f"c{number}", got, may_pull) for number in range(3)]
        consuming = [asyncio.create_task(each.run(stop)) for each in consumers]

        async def has_gone_on() -> bool:
            return all(len(got[key]) > reached[key] + 5 for key in keys)

        for change, count in (
            (commands.extend_subject, 4),
            (commands.extend_subject, 7),
            (commands.merge_subject, 2),
        ):
            reached = {key: len(got[key]) for key in keys}
            await eventually(has_gone_on, 60)
            # The old partitions have something left when the new ones get something.
            may_pull.clear()
            await send_on(producers)
            await change("orders", count)
            await send_on(producers)
            may_pull.set()
        reached = sent_by(producers)
        await eventually(has_gone_on, 60)
        no_more.set()
        await asyncio.gather(*sending)
        sent = sent_by(producers)

        async def has_all() -> bool:
            return all(len(set(got[key])) == sent[key] for key in keys)

        await eventually(has_all, 60)
        stop.set()
        await asyncio.gather(*consuming)

    assert any(producer.refused for producer in producers), "some sends met a closed partition"
    in_order = {key: list(dict.fromkeys(numbers)) for key, numbers in got.items()}
    assert in_order == {key: list(range(sent[key])) for key in keys}


async def attend(cluster: Cluster, group: str) -> list[str]:
    home = await cluster.meta.connect()
    found = await home.ask(Attend("c", 1, "orders", group), Attended)
    return sorted(f"{each.partition}@{each.broker_group}" for each in found.partitions)


async def test_children_wait_until_their_parents_are_drained_for_each_group(
    tmp_path: Path,
) -> None:
    async with running_cluster(tmp_path) as cluster:
        home = await cluster.meta.connect()
        places = (await home.ask(Route("orders", ""), Routed)).route.partitions
        parent = places[0]
        raw = await cluster.at(parent.host, parent.port)
        await raw.send("orders", [b"first"])
        for group in ("quick", "slow"):
            assert await attend(cluster, group) == ["orders@b1", "orders@b2"]

        await cluster.meta.server.administration.extend_subject("orders", 4)

        async def empty_one_is_done() -> bool:
            # Nothing was ever sent to the other one: its children are served at once.
            return len(await attend(cluster, "slow")) == 3

        await eventually(empty_one_is_done)
        found = await attend(cluster, "slow")
        assert f"orders@{parent.broker_group}" in found
        outcome = await raw.send("orders", [b"too late"])
        assert outcome.code is ErrorCode.STALE_ROUTE

        await raw.ask(Subscribe("quick", "c", 1, "orders", Mode.ORDERED), Subscribed)
        asked = Lock("orders", "quick", "c", 1, OrderStrategy.STRICT)
        token = (await raw.ask(asked, Locked)).token
        handed = await raw.pull("orders", group="quick", token=token)
        await raw.settle(handed.runs[0], group="quick", token=token)

        async def quick_has_the_children() -> bool:
            return all(name.startswith("orders#") for name in await attend(cluster, "quick"))

        await eventually(quick_has_the_children)
        assert len(await attend(cluster, "quick")) == 4
        assert await attend(cluster, "slow") == found
        raw.close()


async def test_a_group_that_began_at_the_latest_misses_nothing_of_what_follows(
    tmp_path: Path,
) -> None:
    async with running_cluster(tmp_path) as cluster:
        commands = cluster.meta.server.administration
        await commands.create_subject("orders", ["b1"])
        first, second = [await each.connect() for each in cluster.brokers]
        latest = Start(StartKind.LATEST)
        wish = Subscribe("g", "c", 1, "orders", Mode.ORDERED, tag_filter(["vip"]), latest)
        assert await attend(cluster, "g") == ["orders@b1"]
        await first.ask(wish, Subscribed)
        token = (await first.ask(Lock("orders", "g", "c", 1, OrderStrategy.STRICT), Locked)).token

        await commands.extend_subject("orders", 2, ["b2"])
        outcome = await second.send("orders#2", [b"sent before anybody came"])
        assert outcome.code is ErrorCode.NONE

        async def is_allotted() -> bool:
            return await attend(cluster, "g") == ["orders#1@b1", "orders#2@b2"]

        await eventually(is_allotted)
        assert token
        await second.ask(wish, Subscribed)
        found = await second.ask(Ordered("orders", "g"), OrderedReport)
        assert {(row.partition, row.settled, row.end) for row in found.rows} >= {
            ("orders#2", 0, 1)
        }


async def test_what_failed_at_a_broker_that_has_no_partition_any_more_comes_again(
    tmp_path: Path,
) -> None:
    async with running_cluster(tmp_path) as cluster:
        url = cluster.meta.server.url
        state = tmp_path / "state"
        async with await pulque.aio.connect(url, acks="memory", state_dir=state) as client:
            for number in range(20):
                await client.send("orders", b"%d" % number, order_key=f"key-{number}")
            async with client.consumer("orders", group="g", ordered=True) as consumer:
                failed = await settle_but_one(consumer, 20, "b2")
            await cluster.meta.server.administration.merge_subject("orders", 1)

            async def is_merged() -> bool:
                return await attend(cluster, "g") == ["%retry%orders%g@b2", "orders#1@b1"]

            await eventually(is_merged)
            await leave(cluster, "g")
            async with client.consumer("orders", group="g", ordered=True) as consumer:
                (again,) = await consumer.pull(timeout=60)
                again.ack()

    assert (again.body, again.attempt) == (failed, 2)


async def settle_but_one(consumer: pulque.aio.Consumer, count: int, broker_group: str) -> bytes:
    """Ack so many messages, but for one of a broker that fails; return its body."""
    failed = b""
    while count:
        for message in await consumer.pull(timeout=60):
            count -= 1
            if message.broker_group == broker_group and not failed:
                failed = message.body
                message.nack("not yet", delay=0.001)
            else:
                message.ack()
    assert failed
    return failed


async def leave(cluster: Cluster, group: str) -> None:
    home = await cluster.meta.connect()
    await home.ask(Attend("c", 1, "orders", group, is_online=False), Attended)


async def test_each_message_is_read_once_however_many_partitions_a_broker_has(
    tmp_path: Path,
) -> None:
    def look(url: str) -> tuple[dict[bytes, int], list[bytes]]:
        with pulque.connect(url, timeout=30, state_dir=tmp_path / "state") as client:
            walked: dict[bytes, int] = defaultdict(int)
            for place in client.positions("orders"):
                for message in client.read(
                    "orders", place.start, partition=place.partition, broker=place.broker_group
                ):
                    walked[message.body] += 1
            tail = client.tail("orders", start="earliest")
            return walked, [next(tail).body for _ in range(60)]

    async with running_cluster(tmp_path) as cluster:
        url = cluster.meta.server.url
        async with pulque.aio.connect(url, timeout=30, state_dir=tmp_path) as client:
            await client.send("orders", b"0", order_key="0")
            await cluster.meta.server.administration.extend_subject("orders", 6)
            for number in range(1, 60):
                await client.send(
                    "orders", b"%d" % number, order_key=f"{number}", priority=4 + number % 2
                )
            bodies = {b"%d" % number for number in range(60)}
            places = await client.positions("orders")
            assert len({each[:1] + each[4:] for each in places}) == len(places) > 6
            read: list[bytes] = []
            for place in places:
                found = await client.read("orders", partition=place.partition)
                assert {each.partition for each in found} <= {place.partition}
                read += {each.body for each in found}
                assert len(found) == len({each.body for each in found})
            assert set(read) == bodies

            walked, followed = await asyncio.to_thread(look, url)

    assert walked == dict.fromkeys(bodies, 1)
    assert sorted(followed) == sorted(bodies)

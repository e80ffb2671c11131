"""The tree of an ordered application: a client, its subscriptions, and what each of them pulls.

A real meta server and two brokers in one event loop, and the client as applications use it. What
is pulled by whom is asked of the brokers: a lock belongs to a subject, group and partition.
"""

import asyncio
import logging
from collections import defaultdict
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.client.ordered.partition_core import OrderedCore
from pulque.model.ordered import OrderStrategy
from pulque.wire.ordered import Locked, Ordered, OrderedReport
from pulque.wire.requests import Pull
from tests.integration.test_expansion import Cluster, running_cluster
from tests.unit.meta.running import eventually

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("expansion")]

KEYS = [f"key-{number}" for number in range(12)]
WITHIN = 60.0


async def holders(cluster: Cluster) -> dict[tuple[str, str, str], tuple[str, int]]:
    """Return who has the lock of each group, broker and partition, and under which token."""
    found = {}
    for name, broker in zip(("b1", "b2"), cluster.brokers, strict=True):
        raw = await broker.connect()
        report = await raw.ask(Ordered("orders"), OrderedReport)
        for row in report.rows:
            if row.holder:
                key = (str(row.group), name, str(row.partition))
                found[key] = str(row.holder), row.token
    return found


async def send(client: aio.Client, count: int) -> list[pulque.Receipt]:
    """Send messages of all keys by one producer; number n has key n % 12."""
    async with client.producer() as producer:
        pending = [
            await producer.send("orders", str(number).encode(), order_key=KEYS[number % 12])
            for number in range(count)
        ]
        return [await each.result(WITHIN) for each in pending]


async def take(consumer: aio.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    async with asyncio.timeout(WITHIN):
        while len(found) < count:
            for message in await consumer.pull(timeout=0.5):
                found.append(message)
                message.ack()
    return found


@pytest.mark.accepts("002-29", "002-30", "002-31", "002-32")
async def test_each_subscription_pulls_its_partitions_by_itself(tmp_path: Path) -> None:
    async with (
        running_cluster(tmp_path) as cluster,
        aio.connect(cluster.meta.server.url, timeout=WITHIN, state_dir=tmp_path) as client,
    ):
        await send(client, 48)
        # Two subscriptions of one client: each gets everything, at its own pace.
        one = client.consumer("orders", "one", ordered=True, consumer_id="c1")
        two = client.consumer("orders", "two", ordered=True, consumer_id="c2")
        assert {int(each.body) for each in await take(one, 48)} == set(range(48))
        (held,) = await two.pull(1, timeout=WITHIN)

        early = []

        # One that pulls for each group, broker and partition, with a lock of its own. It begins
        # while somebody waits for messages: the first partition may have had enough.
        async def all_are_pulled() -> bool:
            if len(await holders(cluster)) == 4:
                return True
            early.extend(await two.pull(1, timeout=0.05))
            return False

        await eventually(all_are_pulled, WITHIN)
        found = await holders(cluster)
        assert set(found) == {
            (group, broker, "orders") for group in ("one", "two") for broker in ("b1", "b2")
        }
        assert {key[0]: holder for key, (holder, _) in found.items()} == {"one": "c1", "two": "c2"}

        # Retries and new messages are two branches of one subscription.
        held.nack("not now", delay=0.2)
        two.ack_all(early)
        rest = [*early, *await take(two, 48 - len(early))]
        again = [each for each in rest if each.id == held.id]
        assert [each.attempt for each in again] == [2]
        assert "%retry%" in again[0].partition
        assert {int(each.body) for each in rest} == set(range(48))

        # The client knows all of them: when it ends, so do they, and their locks are free.
        await client.close()
        assert await holders(cluster) == {}


@pytest.mark.accepts("004-62", "004-63", "002-22", "002-23")
async def test_a_key_has_one_queue_that_is_filled_and_emptied_in_order(tmp_path: Path) -> None:
    async with (
        running_cluster(tmp_path) as cluster,
        aio.connect(cluster.meta.server.url, timeout=WITHIN, state_dir=tmp_path) as client,
    ):
        receipts = await send(client, 60)
        lines: dict[str, list[pulque.Receipt]] = defaultdict(list)
        for number, receipt in enumerate(receipts):
            lines[KEYS[number % 12]].append(receipt)
        # The same hash: the same queue, in the order of sending.
        assert {len({each.position[:2] for each in line}) for line in lines.values()} == {1}
        for line in lines.values():
            assert [each.sequence for each in line] == sorted(each.sequence for each in line)
        assert len({each.broker_group for each in receipts}) == 2
        # Without a key the same producer's messages go anywhere.
        async with client.producer(max_batch=1) as producer:
            free = [await producer.send("orders", b"free") for _ in range(20)]
            assert len({(await each.result(WITHIN)).broker_group for each in free}) == 2

        # In order there is one of a key at a time; side by side there are many.
        ordered = client.consumer("orders", "ordered", ordered=True, consumer_id="c")
        shared = client.consumer("orders", "shared")
        many = await shared.pull(60, timeout=WITHIN)
        keys = [each.order_key for each in many if each.order_key]
        assert len(keys) > len(set(keys))
        few = await ordered.pull(60, timeout=WITHIN)
        keys = [each.order_key for each in few if each.order_key]
        assert len(keys) == len(set(keys))
        for each in few:
            each.ack()
        got = [*few, *await take(ordered, 80 - len(few))]
        for key in KEYS:
            numbers = [int(each.body) for each in got if each.order_key == key]
            assert numbers == sorted(numbers)
            assert len(numbers) == 5


@pytest.mark.accepts("002-41")
async def test_best_effort_a_message_that_is_not_acked_does_not_keep_the_next(
    tmp_path: Path,
) -> None:
    async with (
        running_cluster(tmp_path) as cluster,
        aio.connect(cluster.meta.server.url, timeout=WITHIN, state_dir=tmp_path) as client,
    ):
        await send(client, 48)
        consumer = client.consumer("orders", "g", ordered=True, consumer_id="c")
        (forgotten,) = await consumer.pull(1, timeout=WITHIN)
        others = await take(consumer, 44)
        assert {each.order_key for each in others} == set(KEYS) - {forgotten.order_key}


class Asked:
    """What the consumers of this process ask brokers for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: list[str] = []
        """Who had the lock, for each that was asked for in vain."""
        self.pulls: list[tuple[str, str]] = []
        """By which consumer, at which broker."""
        routed, next_pull = OrderedCore.routed, OrderedCore.next_pull

        def note_lock(core: OrderedCore, answer: Locked) -> None:
            if not answer.token:
                self.refused.append(str(answer.holder))
            routed(core, answer)

        def note_pull(core: OrderedCore, max_messages: int, timeout: float) -> Pull:
            self.pulls.append((core.options.consumer, core.broker_group))
            return next_pull(core, max_messages, timeout)

        monkeypatch.setattr(OrderedCore, "routed", note_lock)
        monkeypatch.setattr(OrderedCore, "next_pull", note_pull)

    async def wait(self) -> None:
        """Wait until a lock was refused twice, and there were some pulls."""

        async def were_made() -> bool:
            return len(self.refused) >= 2 and len(self.pulls) >= 3

        await eventually(were_made, WITHIN)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.accepts("002-56", "002-57")
async def test_a_partition_is_handed_over_when_what_runs_has_ended(  # noqa: C901, PLR0915  # step by step
    tmp_path: Path,
    asked: Asked,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "pulque.client")
    monkeypatch.setattr("pulque.client.aio.ordered_pull_pool.HAND_OVER", WITHIN)

    async def is_logged(text: str, count: int) -> None:
        async def is_there() -> bool:
            return sum(text in each.message for each in caplog.records) == count

        await eventually(is_there, WITHIN)

    async with (
        running_cluster(tmp_path) as cluster,
        aio.connect(cluster.meta.server.url, timeout=WITHIN, state_dir=tmp_path) as client,
    ):
        receipts = await send(client, 48)
        await cluster.meta.server.administration.order_subject("orders", OrderStrategy.STRICT)
        place_of = {KEYS[n % 12]: each.broker_group for n, each in enumerate(receipts)}
        assert set(place_of.values()) == {"b1", "b2"}
        one = client.consumer("orders", "g", ordered=True, consumer_id="c1")
        held: list[pulque.ReceivedMessage] = []
        while len(held) < 12:
            held += await one.pull(timeout=WITHIN)
        before = await holders(cluster)
        assert {holder for holder, _ in before.values()} == {"c1"}

        # The meta server allots one of the two partitions to another, and tells both.
        two = client.consumer("orders", "g", ordered=True, consumer_id="c2")
        coming = asyncio.create_task(two.pull(timeout=WITHIN))
        await is_logged("handed over: orders", 1)
        await is_logged("allotted: orders at", 3)

        # That one waits for the lock, as the first has not ended what it holds. The first goes on
        # to pull from the partition that it keeps, and from no other.
        asked.pulls.clear()
        going_on = asyncio.create_task(one.pull(timeout=WITHIN))
        await asked.wait()
        assert set(asked.refused) == {"c1"}
        assert len(set(asked.pulls)) == 1
        puller, kept = asked.pulls[0]
        assert puller == "c1"
        assert await holders(cluster) == before
        assert not coming.done()
        assert not any(each.is_abandoned for each in held)
        runs = {place_of[each.order_key or ""]: each for each in held}
        for message in held:
            if message not in runs.values():
                message.ack()
        more = await going_on
        for message in more:
            message.ack()
        assert {place_of[each.order_key or ""] for each in more} == {kept}
        lost = "b1" if kept == "b2" else "b2"
        assert await holders(cluster) == before
        for message in runs.values():
            message.ack()

        # Now it is the other's, under the next token, from where the first ended.
        async def is_handed_over() -> bool:
            return (await holders(cluster)).get(("g", lost, "orders")) == (
                "c2",
                before["g", lost, "orders"][1] + 1,
            )

        await eventually(is_handed_over, WITHIN)
        its = await coming
        for message in its:
            message.ack()
        its += await take(two, 3 * list(place_of.values()).count(lost) - len(its))
        mine = [*held, *more]
        mine += await take(one, 48 - len(mine) - len(its))
        got: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for owner, messages in (("c1", mine), ("c2", its)):
            for message in messages:
                got[message.order_key or ""].append((owner, int(message.body)))
        for at, key in enumerate(KEYS):
            later = "c2" if place_of[key] == lost else "c1"
            assert got[key] == list(zip(["c1", *[later] * 3], range(at, 48, 12), strict=True)), key

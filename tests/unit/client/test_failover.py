"""Another broker leads: clients ask who, and go on with it where they were."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.client.routing.broker_health import BrokerHealth
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.errors import NotAllowedError, NotLeaderError, UnsupportedError
from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import PartitionRoute, Route, RouteKind
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker, Fault, Silence
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_group import FakeGroup

Sending = Callable[[FakeGroup, Path, bytes], pulque.Receipt]


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with FakeGroup() as group:
        yield group


@pytest.fixture
def client(group: FakeGroup, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=tmp_path) as client:
        yield client


def send_plainly(group: FakeGroup, folder: Path, body: bytes) -> pulque.Receipt:
    with pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client:
        client.send("orders", b"before")
        return client.send("orders", body)


def send_in_batches(group: FakeGroup, folder: Path, body: bytes) -> pulque.Receipt:
    with (
        pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client,
        client.producer() as producer,
    ):
        producer.send("orders", b"before").result()
        return producer.send("orders", body).result()


def send_in_strict_order(group: FakeGroup, folder: Path, body: bytes) -> pulque.Receipt:
    group.order = OrderStrategy.STRICT
    group.tell()
    with (
        pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client,
        client.producer() as producer,
    ):
        producer.send("orders", b"before", order_key="k").result()
        return producer.send("orders", body, order_key="k").result()


def send_in_a_task(group: FakeGroup, folder: Path, body: bytes) -> pulque.Receipt:
    async def send() -> pulque.Receipt:
        async with aio.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client:
            await client.send("orders", b"before")
            return await client.send("orders", body)

    return asyncio.run(send())


ALL_KINDS = pytest.mark.parametrize(
    "sending", [send_plainly, send_in_batches, send_in_strict_order, send_in_a_task]
)


def once(act: Callable[[requests.Send], None]) -> Callable[[requests.Request], None]:
    """Return a fault that does something with the second send, and nothing else."""
    seen = []

    def fault(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            seen.append(request)
            if len(seen) == 2:
                act(request)

    return fault


def refuse_watches(request: requests.Request) -> None:
    if isinstance(request, requests.Watch):
        raise UnsupportedError("no watching")


@ALL_KINDS
def test_a_send_that_a_deposed_leader_refuses_goes_to_the_next_one_once(
    group: FakeGroup, tmp_path: Path, sending: Sending
) -> None:
    def depose(request: requests.Send) -> None:
        del request
        group.lead(1)
        raise NotLeaderError("broker-0 does not lead")

    group.leader.fault = once(depose)
    receipt = sending(group, tmp_path, b"x")
    assert not receipt.is_duplicate
    assert group.members[1].messages("orders") == [b"before", b"x"]
    first, second = group.members[0].seen(requests.Send)[1], group.members[1].seen(requests.Send)
    assert isinstance(first, requests.Send)
    assert [each.batches for each in second if isinstance(each, requests.Send)] == [first.batches]


@ALL_KINDS
def test_what_a_leader_stored_before_it_was_deposed_is_stored_once(
    group: FakeGroup, tmp_path: Path, sending: Sending
) -> None:
    def store_and_depose(request: requests.Send) -> None:
        for name, data in request.batches:
            group.members[0].store(name, bytes(data))
        group.lead(1)
        raise NotLeaderError("broker-0 does not lead")

    group.leader.fault = once(store_and_depose)
    receipt = sending(group, tmp_path, b"x")
    assert receipt.is_duplicate
    assert not receipt.may_be_doubled
    assert group.members[1].messages("orders") == [b"before", b"x"]


@ALL_KINDS
def test_a_leader_that_hangs_is_left_as_soon_as_the_route_names_another(
    group: FakeGroup, tmp_path: Path, sending: Sending
) -> None:
    def hang(request: requests.Send) -> None:
        del request
        group.lead(1)
        raise Silence

    group.leader.fault = once(hang)
    started = time.monotonic()
    sending(group, tmp_path, b"x")
    assert time.monotonic() - started < LIMIT / 2
    assert group.members[1].messages("orders") == [b"before", b"x"]


@ALL_KINDS
def test_who_does_not_lead_makes_clients_ask_for_the_route_at_once(
    group: FakeGroup, tmp_path: Path, sending: Sending
) -> None:
    """The route cannot be watched: without the question, it would be known after 30 seconds."""

    def depose(request: requests.Send) -> None:
        del request
        # The client has asked in vain to watch it, and asks again in 30 seconds.
        group.meta.wait_until(lambda: len(group.meta.seen(requests.Route)) == 2)
        group.lead(1)
        raise NotLeaderError("broker-0 does not lead")

    group.meta.fault = refuse_watches
    group.leader.fault = once(depose)
    sending(group, tmp_path, b"x")
    assert group.members[1].messages("orders") == [b"before", b"x"]


@pytest.mark.parametrize("end", [Drop(handled=True), NotLeaderError("I am deposed")])
@pytest.mark.parametrize("kind", ["one by one", "in batches"])
def test_what_got_no_answer_waits_for_its_own_group_though_there_are_others(
    tmp_path: Path, kind: str, end: Exception
) -> None:
    with (
        FakeBroker() as spare,
        FakeCluster(2) as cluster,
        pulque.connect(cluster.url, name="test", timeout=30, state_dir=tmp_path) as client,
        client.producer(max_batch=1) as producer,
        ThreadPoolExecutor() as threads,
    ):
        old = cluster.brokers[0]
        old.epoch = cluster.brokers[1].epoch = 1

        def send(body: bytes) -> pulque.Receipt:
            if kind == "one by one":
                return client.send("orders", body)
            return producer.send("orders", body).result()

        for _ in range(4):
            send(b"before")

        def vanish(request: requests.Request) -> None:
            if isinstance(request, requests.Send):
                old.stop_listening()
                for name, data in request.batches:
                    old.store(name, bytes(data))
                raise end

        old.fault = vanish
        pending = [threads.submit(send, b"%d" % number) for number in range(4)]
        asked = len(cluster.meta.seen(requests.Watch))
        cluster.meta.wait_until(lambda: len(cluster.meta.seen(requests.Watch)) > asked + 1)
        spare.name, spare.cluster, spare.epoch = "g0", "fakes", 2
        spare.partitions = old.partitions
        cluster.brokers[0] = spare
        cluster.serve([0, 1])
        receipts = [each.result(LIMIT) for each in pending]
        assert not any(each.may_be_doubled for each in receipts)
        assert any(each.is_duplicate for each in receipts), "it had been stored, and was known"
        assert cluster.bodies(0) + cluster.bodies(1) == 8
        old.close()


def test_a_send_outlasts_the_time_without_a_leader(
    group: FakeGroup, client: pulque.Client
) -> None:
    client.send("orders", b"before")
    with client.producer() as producer:
        producer.send("orders", b"first").result()
        group.depose()
        group.kill(0)
        pending = producer.send("orders", b"x")
        # Others are asked for again and again meanwhile.
        group.meta.wait_until(lambda: len(group.meta.seen(requests.Watch)) >= 3)
        assert not pending.done()
        group.lead(1)
        assert pending.result(timeout=LIMIT).partition == "orders"
    assert group.members[1].messages("orders") == [b"before", b"first", b"x"]


@pytest.mark.parametrize("fault", [None, refuse_watches])
def test_a_read_goes_to_who_leads(
    group: FakeGroup, client: pulque.Client, fault: Fault | None
) -> None:
    group.meta.fault = fault
    client.send("orders", b"x")
    assert len(client.read("orders")) == 1
    group.lead(1)
    assert [each.body for each in client.read("orders")] == [b"x"]
    assert group.members[1].seen(requests.Read)


def test_a_consumer_goes_on_with_the_next_leader_where_it_was(
    group: FakeGroup, client: pulque.Client
) -> None:
    client.send("orders", b"0")
    with client.consumer("orders", "kitchen") as consumer:
        (held,) = consumer.pull(timeout=LIMIT)
        group.lead(1)
        client.send("orders", b"1")
        (other,) = consumer.pull(timeout=LIMIT)
        held.ack()
        other.ack()
        consumer.settle(timeout=LIMIT)
        assert (held.body, other.body) == (b"0", b"1")
        assert consumer.abandoned == 0
    settled = [(each[1], each[3]) for each in group.members[1].settled]
    tenures = [each[2].tenure for each in group.members[1].settled]
    assert settled == [(0, "ack"), (1, "ack")]
    # The epoch is higher, and the count of starts lower: both are given back as they came.
    assert tenures == [(1, 10), (2, 9)]


@pytest.mark.parametrize("fault", [None, refuse_watches])
def test_what_a_deposed_leader_does_not_settle_the_next_one_does(
    group: FakeGroup, client: pulque.Client, fault: Fault | None
) -> None:
    group.meta.fault = fault
    client.send("orders", b"0")
    with client.consumer("orders", "kitchen") as consumer:
        (held,) = consumer.pull(timeout=LIMIT)
        group.depose()
        held.ack()
        group.members[0].wait_until(lambda: bool(group.members[0].seen(requests.Settle)))
        group.lead(1)
        consumer.settle(timeout=LIMIT)
        assert consumer.abandoned == 0
    assert [(each[1], each[3]) for each in group.members[1].settled] == [(0, "ack")]


def test_answers_of_the_next_leader_are_not_taken_for_those_of_the_last(
    group: FakeGroup, client: pulque.Client
) -> None:
    """Both connections count their requests: the route has the number that the pull had."""

    def keep_silent(request: requests.Request) -> None:
        if isinstance(request, requests.Settle):
            raise Silence

    client.send("orders", b"0")
    with client.consumer("orders", "kitchen") as consumer:
        (held,) = consumer.pull(timeout=LIMIT)
        group.leader.fault = keep_silent
        held.ack()
        group.members[0].wait_until(lambda: bool(group.members[0].seen(requests.Settle)))
        group.kill(0)
        group.lead(1)
        consumer.settle(timeout=LIMIT)
        client.send("orders", b"1")
        assert [each.body for each in consumer.pull(timeout=LIMIT)] == [b"1"]


@pytest.mark.parametrize("fault", [None, refuse_watches])
def test_what_a_deposed_leader_does_not_settle_the_next_one_does_for_asyncio(
    group: FakeGroup, tmp_path: Path, fault: Fault | None
) -> None:
    group.meta.fault = fault
    old = group.members[0]

    async def consume() -> None:
        async with aio.connect(
            group.url, name="test", timeout=LIMIT, state_dir=tmp_path
        ) as client:
            await client.send("orders", b"0")
            async with client.consumer("orders", "kitchen") as consumer:
                (held,) = await consumer.pull(timeout=LIMIT)
                group.depose()
                held.ack()
                await asyncio.to_thread(old.wait_until, lambda: bool(old.seen(requests.Settle)))
                group.lead(1)
                await consumer.settle(timeout=LIMIT)
                assert consumer.abandoned == 0

    asyncio.run(consume())
    assert [(each[1], each[3]) for each in group.members[1].settled] == [(0, "ack")]


def test_a_read_in_a_task_goes_to_who_leads(group: FakeGroup, tmp_path: Path) -> None:
    group.meta.fault = refuse_watches

    async def read() -> list[bytes]:
        async with aio.connect(
            group.url, name="test", timeout=LIMIT, state_dir=tmp_path
        ) as client:
            await client.send("orders", b"x")
            await client.read("orders")
            group.lead(1)
            return [each.body for each in await client.read("orders")]

    assert asyncio.run(read()) == [b"x"]


def test_a_consumer_for_asyncio_goes_on_where_it_was(group: FakeGroup, tmp_path: Path) -> None:
    async def consume() -> None:
        async with aio.connect(
            group.url, name="test", timeout=LIMIT, state_dir=tmp_path
        ) as client:
            await client.send("orders", b"0")
            async with client.consumer("orders", "kitchen") as consumer:
                (held,) = await consumer.pull(timeout=LIMIT)
                group.lead(1)
                await client.send("orders", b"1")
                (other,) = await consumer.pull(timeout=LIMIT)
                held.ack()
                other.ack()
                await consumer.settle(timeout=LIMIT)

    asyncio.run(consume())
    assert [(each[1], each[3]) for each in group.members[1].settled] == [(0, "ack"), (1, "ack")]


def test_an_ordered_consumer_follows_its_partition_to_the_next_leader(
    group: FakeGroup, client: pulque.Client
) -> None:
    client.send("orders", b"0")
    with client.consumer("orders", "kitchen", ordered=True) as consumer:
        (held,) = consumer.pull(timeout=LIMIT)
        held.ack()
        consumer.settle(timeout=LIMIT)
        group.kill(0)
        group.lead(1)
        client.send("orders", b"1")
        (other,) = consumer.pull(timeout=LIMIT)
        assert other.body == b"1"
        other.ack()


def test_an_ordered_consumer_for_asyncio_follows_its_partition(
    group: FakeGroup, tmp_path: Path
) -> None:
    async def consume() -> bytes:
        async with aio.connect(
            group.url, name="test", timeout=LIMIT, state_dir=tmp_path
        ) as client:
            await client.send("orders", b"0")
            async with client.consumer("orders", "kitchen", ordered=True) as consumer:
                (held,) = await consumer.pull(timeout=LIMIT)
                held.ack()
                await consumer.settle(timeout=LIMIT)
                group.kill(0)
                group.lead(1)
                await client.send("orders", b"1")
                (other,) = await consumer.pull(timeout=LIMIT)
                other.ack()
                return bytes(other.body)

    assert asyncio.run(consume()) == b"1"


def test_replicas_can_be_waited_for_and_a_refusal_is_told(
    group: FakeGroup, client: pulque.Client
) -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and request.acks is requests.Acks.REPLICA:
            raise NotAllowedError("there are no followers")

    group.leader.fault = refuse
    with client.producer(acks="replica") as producer, pytest.raises(NotAllowedError):
        producer.send("orders", b"x").result()
    with client.producer(acks="disk") as producer:
        producer.send("orders", b"x").result()


# ── what is known about brokers ────────────────────────────────────────────────────────────


def route_to(*ports: int) -> Route:
    return Route(
        Pattern("orders"),
        sum(ports),
        tuple(PartitionRoute(PartitionName("orders"), "g", "10.0.0.1", port) for port in ports),
    )


def open_circuit(health: BrokerHealth, now: float) -> None:
    health.failed(now, 2.0)
    assert health.is_open(now)


def test_a_new_leader_does_not_inherit_the_open_circuit_of_the_last() -> None:
    table, now = RouteTable(), 100.0
    key = RouteKey("orders")
    moved: list[str] = []
    table.on_moved = moved.append
    table.take_in(key, route_to(1))
    open_circuit(table.health_of("g"), now)
    table.take_in(key, route_to(1))
    assert table.health_of("g").is_open(now), "nothing has changed"
    assert not moved
    table.take_in(key, route_to(2))
    assert table.health_of("g").is_usable(now)
    assert table.targets["orders"].plain[0].health.is_usable(now)
    assert moved == ["g"]
    assert table.address_of("g").port == 2


def test_a_broker_that_comes_back_to_the_route_is_not_kept_out() -> None:
    table, now = RouteTable(), 100.0
    key = RouteKey("orders", "kitchen")
    table.take_in(key, route_to(1))
    open_circuit(table.health_of("g"), now)
    table.take_in(key, route_to())
    table.take_in(key, route_to(1))
    assert table.health_of("g").is_usable(now)


def test_followers_are_not_taken_for_leaders() -> None:
    table = RouteTable()
    table.take_in(RouteKey("orders"), route_to(1))
    table.take_in(RouteKey("orders", "", RouteKind.FOLLOWERS), route_to(2, 3))
    assert table.address_of("g").port == 1
    assert [each.address for each in table.targets["orders"]] == [("10.0.0.1", 1)]


def test_a_route_is_watched_until_the_last_consumer_of_it_is_gone() -> None:
    table, key = RouteTable(), RouteKey("orders", "kitchen")
    table.take_in(key, route_to(1))
    table.want(key)
    table.want(key)
    table.forget(key)
    assert [each.subject for each in table.known()] == ["orders"]
    table.forget(key)
    assert table.known() == ()

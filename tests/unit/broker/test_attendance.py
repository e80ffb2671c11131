"""A lone broker allots its own partitions; one in a cluster asks the meta servers."""

import asyncio

import pytest

from pulque.errors import FencedError, InvalidNameError
from pulque.model.ordered import ConsumeStrategy, OrderStrategy
from pulque.model.routes import RouteKind
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend, Attended, Close, Closed
from pulque.wire.requests import Route
from pulque.wire.responses import Routed
from tests.unit.broker.running import Running, Start, eventually, numbered

LONG = 60_000


async def attend(
    raw: RawConnection,
    consumer: str = "c1",
    known: Attended | None = None,
    *,
    subject: str = "orders",
    incarnation: int = 1,
    is_online: bool = True,
) -> Attended:
    version, wait_ms = (0, 0) if known is None else (known.version, LONG)
    request = Attend(consumer, incarnation, subject, "g", is_online, version, wait_ms)
    return await raw.ask(request, Attended)


def names(found: Attended) -> list[str]:
    return [each.partition for each in found.partitions]


async def test_a_lone_broker_allots_all_it_has(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    await raw.send("orders#1", numbered(1))

    found = await attend(raw)

    assert found.strategy is ConsumeStrategy.EXCLUSIVE
    assert names(found) == ["orders", "orders#1"]
    assert {(each.host, each.port) for each in found.partitions} == {("", 0)}
    assert found.authorised_ms == 10_000


async def test_a_subject_without_messages_has_its_plain_partition(raw: RawConnection) -> None:
    assert names(await attend(raw)) == ["orders"]


async def test_who_comes_and_goes_is_told_at_once(running: Running, raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    await raw.send("orders#1", numbered(1))
    first = await attend(raw)
    other = await running.connect()
    waiting = asyncio.create_task(attend(other, "c1", first))
    await asyncio.sleep(0.02)

    second = await attend(raw, "c2")

    pushed = await waiting
    assert sorted(names(pushed) + names(second)) == ["orders", "orders#1"]
    waiting = asyncio.create_task(attend(other, "c1", pushed))
    await attend(raw, "c2", is_online=False)
    assert names(await waiting) == ["orders", "orders#1"]


async def test_a_silent_consumer_is_gone_after_its_time(start: Start) -> None:
    raw = await (await start(consumption={"lock": "300ms"})).connect()
    await attend(raw, "a-silent-one")
    assert names(await attend(raw, "c1")) == []

    async def has_it() -> bool:
        return names(await attend(raw, "c1")) == ["orders"]

    await eventually(has_it)


async def test_a_new_partition_is_allotted_at_once(running: Running, raw: RawConnection) -> None:
    known = await attend(raw)
    other = await running.connect()
    waiting = asyncio.create_task(attend(other, "c1", known))
    await asyncio.sleep(0.02)

    await raw.send("orders#1", numbered(1))

    assert names(await waiting) == ["orders", "orders#1"]


async def test_a_twin_and_a_pattern_are_refused(raw: RawConnection) -> None:
    await attend(raw, incarnation=2)

    with pytest.raises(FencedError):
        await attend(raw, incarnation=1)
    with pytest.raises(InvalidNameError):
        await attend(raw, subject="order.*")


async def test_a_lone_broker_is_told_which_subjects_are_strict(start: Start) -> None:
    raw = await (await start(consumption={"strict": ["order.*"]})).connect()

    strict, other = await attend(raw, subject="order.book"), await attend(raw, subject="refunds")
    route = (await raw.ask(Route("order.book", "", RouteKind.REALTIME), Routed)).route

    assert (strict.order, other.order) == (OrderStrategy.STRICT, OrderStrategy.BEST_EFFORT)
    assert route.order is OrderStrategy.STRICT


async def test_closing_twice_is_closing_once(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))

    ends = [(await raw.ask(Close("orders"), Closed)).end for _ in range(2)]

    assert ends == [3, 3]

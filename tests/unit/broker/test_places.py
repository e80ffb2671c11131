"""A pull is told of partitions that it covers and does not know, and serves high levels first."""

import asyncio
from uuid import UUID

import pytest

from pulque.errors import InvalidBatchError, InvalidNameError, InvalidRequestError, error_from_wire
from pulque.testing.raw import Handed, RawConnection, expect, pack_batch
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Acks, Pull, Route, Send, Wanted
from pulque.wire.responses import Pulled, Routed, Sent
from tests.unit.broker.running import Running, Start, eventually, numbered

LONG_MS = 30_000
"""Longer than any test waits: whatever is answered was not answered by its time-out."""


def pull_of(
    covers: tuple[str, ...], *partitions: str, version: int, group: str = "g", consumer: str = "c"
) -> Pull:
    wanted = tuple(Wanted(each, FROM_SETTLED) for each in partitions)
    return Pull(group, consumer, 1, 100, 1024 * 1024, LONG_MS, EARLIEST, wanted, covers, version)


async def version_of(raw: RawConnection, subject: str) -> int:
    return (await raw.ask(Route(subject, "g"), Routed)).route.version


async def is_waiting(raw: RawConnection, pulls: int) -> bool:
    return bool((await raw.status())["pulls_waiting"] == pulls)


async def parked(raw: RawConnection, other: RawConnection, pull: Pull) -> int:
    """Ask a pull, and return its id once it stands in line."""
    before: int = (await other.status())["pulls_waiting"]
    request_id = await raw.put(pull)
    await eventually(lambda: is_waiting(other, before + 1))
    return request_id


async def answer(raw: RawConnection, request_id: int) -> Pulled:
    return expect(await raw.answer_to(request_id), Pulled)


@pytest.fixture
async def other(running: Running) -> RawConnection:
    return await running.connect()


@pytest.mark.accepts("002-07")
async def test_a_partition_may_have_any_name_and_keeps_it_over_a_restart(
    running: Running, raw: RawConnection
) -> None:
    name = str(UUID(int=2**127 + 7))
    await raw.send(name, numbered(3))
    got = await raw.pull(name)
    await raw.settle(got.runs[0], last=0)

    again = await running.restarted()
    other = await again.connect()

    assert (await other.read(name))[0].end == 3
    assert (await other.pull(name)).bodies == numbered(2, 1)
    await again.close()


# -- new partitions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("covers", "named", "appears"),
    [
        (("orders",), ("orders",), "orders#p9"),
        (("orders.*",), (), "orders.eu"),
        (("orders.*",), ("orders.eu",), "orders.eu.west#p0"),
        (("*",), ("orders",), "refunds"),
        (("orders", "refunds.*"), ("orders",), "refunds.eu"),
    ],
)
@pytest.mark.accepts("000-20")
async def test_a_waiting_pull_is_told_at_once_of_a_partition_that_appears(
    raw: RawConnection,
    other: RawConnection,
    covers: tuple[str, ...],
    named: tuple[str, ...],
    appears: str,
) -> None:
    for partition in named:
        await other.send(partition, numbered(1))
        (run,) = (await raw.pull(partition)).runs
        await raw.settle(run)
    version = await version_of(other, covers[0])
    pull = await parked(raw, other, pull_of(covers, *named, version=version))

    await other.send(appears, numbered(1))

    told = await answer(raw, pull)
    assert told.routes_changed
    assert told.deliveries == ()


async def test_a_pull_that_lags_is_told_when_it_comes(
    raw: RawConnection, other: RawConnection
) -> None:
    version = await version_of(other, "orders.*")
    await other.send("orders.eu", numbered(1))

    got = await raw.pull(covers=["orders.*"], routes_version=version, timeout_ms=LONG_MS)

    assert got.routes_changed


async def test_what_is_there_comes_together_with_the_news(raw: RawConnection) -> None:
    version = await version_of(raw, "orders.*")
    await raw.send("orders.eu", numbered(2))
    await raw.send("orders.us", numbered(2))

    got = await raw.pull("orders.eu", covers=["orders.*"], routes_version=version)

    assert got.routes_changed
    assert got.bodies == numbered(2)


async def test_a_pull_is_not_told_of_what_it_names_or_does_not_cover(
    raw: RawConnection, other: RawConnection
) -> None:
    version = await version_of(other, "orders")
    pull = await parked(raw, other, pull_of(("orders",), "orders", version=version))

    for partition in ("refunds", "orders.eu", "order", "refunds#p9"):
        await other.send(partition, numbered(1))
    await other.send("orders", numbered(3))

    got = Handed.of(await answer(raw, pull), ["orders"])
    assert not got.routes_changed
    assert got.bodies == numbered(3)


async def test_an_answer_says_up_to_where_the_routes_are_known(
    raw: RawConnection, other: RawConnection
) -> None:
    await other.send("refunds", numbered(1))
    await other.send("orders", numbered(1))
    wanted = (Wanted("orders", FROM_SETTLED),)

    first = await raw.ask(Pull("g", "c", 1, 9, 999, 0, EARLIEST, wanted, ("orders",), 1), Pulled)

    assert (first.routes_version, first.routes_changed) == (2, False)


async def test_a_group_is_told_of_its_own_retries_alone(
    running: Running, raw: RawConnection, other: RawConnection
) -> None:
    third = await running.connect()
    await other.send("orders", numbered(1))
    (run,) = (await other.pull("orders", group="g", consumer="c1")).runs
    (theirs,) = (await other.pull("orders", group="h", consumer="c1")).runs
    await other.settle(theirs, group="h", consumer="c1")
    version = await version_of(other, "orders")
    covers = ("orders",)
    own = await parked(raw, other, pull_of(covers, "orders", version=version, consumer="c2"))
    their = await parked(
        third, other, pull_of(covers, "orders", version=version, group="h", consumer="c2")
    )

    await other.settle(run, consumer="c1", nacked={0: "not now"})

    assert (await answer(raw, own)).routes_changed
    assert await is_waiting(other, 1)
    await other.send("orders", numbered(1))
    assert not (await answer(third, their)).routes_changed


@pytest.mark.parametrize("pattern", ["a.*.b", "", "a b", "%retry%a%b"])
async def test_a_pull_that_covers_nonsense_is_refused(raw: RawConnection, pattern: str) -> None:
    with pytest.raises(InvalidNameError):
        await raw.pull("orders", covers=[pattern])


async def test_a_pull_that_covers_too_much_is_refused(raw: RawConnection) -> None:
    with pytest.raises(InvalidRequestError, match=r"1001 subjects and patterns .*; at most 1000"):
        await raw.pull("orders", covers=[f"s{number}" for number in range(1001)])


async def test_a_pull_from_nothing_that_covers_nothing_is_refused(raw: RawConnection) -> None:
    with pytest.raises(InvalidRequestError, match="0 partitions; 1 to 10000 are allowed"):
        await raw.pull()


# -- priorities ---------------------------------------------------------------------------------


@pytest.mark.accepts("000-56", "004-66")
async def test_higher_levels_come_first_in_whatever_order_they_are_named(
    raw: RawConnection,
) -> None:
    names = ["orders", "orders#p0", "orders#p9", "orders#p7"]
    for name in names:
        await raw.send(name, [name.encode()])

    got = await raw.pull(*names)

    assert got.bodies == [b"orders#p9", b"orders#p7", b"orders", b"orders#p0"]


@pytest.mark.parametrize(
    ("partition", "priority"), [("orders", 7), ("orders#p7", 4), ("orders#p7", 8), ("orders#2", 0)]
)
async def test_a_batch_whose_priority_is_not_that_of_its_partition_is_refused(
    raw: RawConnection, partition: str, priority: int
) -> None:
    batch = pack_batch(partition, numbered(1), priority=priority)

    sent = await raw.ask(Send(Acks.MEMORY, 1000, ((partition, batch),)), Sent)

    (outcome,) = sent.outcomes
    problem = error_from_wire(outcome.code, outcome.text)
    assert isinstance(problem, InvalidBatchError)
    assert f"priority {priority}" in str(problem)
    assert partition in str(problem)
    assert not (await raw.status())["partitions"]


async def test_a_share_of_the_pulls_begins_below_the_highest_level(start: Start) -> None:
    running = await start(consumption={"low_priority_share": 0.25})
    raw = await running.connect()
    names = ["orders#p9", "orders", "orders#p0"]
    for name in names:
        for number in range(20):
            await raw.send(name, [f"{name} {number}".encode()])

    firsts = []
    for _ in range(16):
        (run,) = (await raw.pull(*names, max_messages=1)).runs
        await raw.settle(run)
        firsts.append(run.partition)

    high, plain, low = names
    assert firsts == [
        *(high, high, high, low),
        *(high, high, high, plain),
        *(high, high, high, high),
        *(high, high, high, low),
    ]


async def test_retries_take_turns_with_new_messages_of_their_level(raw: RawConnection) -> None:
    for number in range(6):
        await raw.send("orders", [str(number).encode()])
    (run,) = (await raw.pull("orders", max_messages=1)).runs
    await raw.settle(run, nacked={0: "not now"})
    await eventually(lambda: _exists(raw, "%retry%orders%g"))

    got = await raw.pull("orders", "%retry%orders%g", max_messages=1)

    assert got.bodies == [b"0"]


async def _exists(raw: RawConnection, partition: str) -> bool:
    status = await raw.status()
    return any(each["name"] == partition and each["end"] for each in status["partitions"])


# -- limits -------------------------------------------------------------------------------------


async def test_a_pull_at_the_limit_of_what_may_be_held_is_woken_by_a_settle(start: Start) -> None:
    running = await start(limits={"max_held": 3})
    raw, other = await running.connect(), await running.connect()
    await raw.send("orders", numbered(10))
    got = await raw.pull("orders")
    assert got.bodies == numbered(3)
    wanted = (Wanted("orders", 3),)
    pull = await parked(raw, other, Pull("g", "c", 1, 9, 9999, LONG_MS, EARLIEST, wanted))

    await other.settle(got.runs[0], last=1)

    assert Handed.of(await answer(raw, pull), ["orders"]).bodies == numbered(2, 3)


async def test_what_may_be_held_counts_over_all_partitions(start: Start) -> None:
    running = await start(limits={"max_held": 3})
    raw = await running.connect()
    for name in ("a", "b"):
        await raw.send(name, numbered(1))
        await raw.send(name, numbered(1))

    first = await raw.pull("a", "b")
    again = await raw.pull("a", "b", expected=[2, 1])

    assert [(run.partition, run.length) for run in first.runs] == [("a", 2), ("b", 1)]
    assert again.runs == ()


async def test_a_consumer_that_leaves_has_its_waiting_pulls_answered(
    raw: RawConnection, other: RawConnection
) -> None:
    pull = await parked(raw, other, pull_of((), "orders", version=0))

    await other.heartbeat(is_leaving=True)

    assert (await answer(raw, pull)).deliveries == ()
    assert await is_waiting(other, 0)
    await other.send("orders", numbered(1))
    assert (await other.pull("orders", consumer="c2")).bodies == numbered(1)


async def test_pulls_of_others_wait_on_when_one_leaves(
    running: Running, raw: RawConnection, other: RawConnection
) -> None:
    await parked(raw, other, pull_of((), "orders", version=0, consumer="c1"))
    third = await running.connect()
    await parked(third, other, pull_of((), "orders", version=0, consumer="c2"))

    await other.heartbeat(consumer="c1", is_leaving=True)
    await asyncio.sleep(0)

    assert await is_waiting(other, 1)

"""Allotting partitions to the consumers of ordered groups: who is there, and what is whose."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain

import pytest

from pulque.errors import FencedError, InvalidNameError
from pulque.meta.database.allotment_store import Allotment, AttendingConsumer, AttendingStore, Word
from pulque.meta.database.connection import Database, parse_database_url
from pulque.model.cluster import ServerState
from pulque.model.names import ConsumerId, Group, Subject
from pulque.model.ordered import ConsumeStrategy, OrderStrategy
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend, Attended
from pulque.wire.responses import Response
from tests.unit.meta.running import RunningMeta, Start, eventually, register, route

TIMEOUT = {"timeout": "900ms"}
LONG = 60_000


def word(consumer: str, known: Attended | None = None, **fields: object) -> Attend:
    values: dict[str, object] = {
        "consumer": consumer,
        "incarnation": 1,
        "subject": "orders",
        "group": "g",
        "version": 0 if known is None else known.version,
        "wait_ms": 0 if known is None else LONG,
    }
    return Attend(**(values | fields))  # type: ignore[arg-type]


async def attend(
    raw: RawConnection, consumer: str, known: Attended | None = None, **fields: object
) -> Attended:
    return await raw.ask(word(consumer, known, **fields), Attended)


def names(found: Response | Exception) -> list[str]:
    assert isinstance(found, Attended), found
    return [f"{each.partition}@{each.broker_group}" for each in found.partitions]


@pytest.fixture
async def placed(raw: RawConnection) -> RawConnection:
    """A connection to a meta server that has a subject with two partitions."""
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    return raw


@pytest.mark.accepts("002-33", "002-36", "002-42", "002-49", "002-50")
async def test_one_consumer_gets_all_partitions_and_is_told_for_how_long(
    placed: RawConnection,
) -> None:
    found = await attend(placed, "c1")

    assert (found.strategy, found.order) == (ConsumeStrategy.EXCLUSIVE, OrderStrategy.BEST_EFFORT)
    assert names(found) == ["orders@b1", "orders@b2"]
    assert {(each.host, each.port) for each in found.partitions} == {("127.0.0.1", 7450)}
    assert (found.authorised_ms, found.heartbeat_ms) == (10_000, 3_333)


@pytest.mark.accepts("002-34", "002-47", "004-80")
async def test_who_comes_and_who_goes_is_told_to_the_others_at_once(
    running: RunningMeta, placed: RawConnection
) -> None:
    first = await attend(placed, "c1")
    waiting = await placed.put(word("c1", first))
    other = await running.connect()

    second = await attend(other, "c2")
    pushed = await placed.answer_to(waiting)

    assert sorted(names(second) + names(pushed)) == ["orders@b1", "orders@b2"]
    assert len(names(second)) == 1
    assert isinstance(pushed, Attended)
    waiting = await placed.put(word("c1", pushed))
    gone = await attend(other, "c2", is_online=False)
    assert names(gone) == []
    assert names(await placed.answer_to(waiting)) == ["orders@b1", "orders@b2"]


@pytest.mark.accepts("002-12", "004-76")
async def test_consumers_beyond_the_partitions_get_nothing(placed: RawConnection) -> None:
    for number in range(4):
        await attend(placed, f"c{number}")
    found = [names(await attend(placed, f"c{number}")) for number in range(4)]

    assert sorted(map(len, found)) == [0, 0, 1, 1]
    assert sorted(chain.from_iterable(found)) == ["orders@b1", "orders@b2"]


async def test_groups_and_subjects_are_allotted_by_themselves(placed: RawConnection) -> None:
    await attend(placed, "c1")

    assert len(names(await attend(placed, "c2", group="other"))) == 2
    assert names(await attend(placed, "c3", subject="nothing.yet")) == []


async def test_a_subject_that_comes_later_is_allotted_at_once(placed: RawConnection) -> None:
    before = await attend(placed, "c1", subject="later")
    waiting = await placed.put(word("c1", before, subject="later"))

    await route(placed, "later")

    assert len(names(await placed.answer_to(waiting))) == 2


@pytest.mark.accepts("002-48", "002-50", "002-51")
async def test_the_partitions_of_a_silent_consumer_go_to_others(start: Start) -> None:
    loop = asyncio.get_running_loop()
    running = await start(ordered=TIMEOUT)
    raw = await running.connect()
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    known = await attend(raw, "c1")
    last_word = loop.time()
    silent = await attend(raw, "silent")
    known = await attend(raw, "c1")
    assert len(names(known)) == 1

    async def has_all() -> bool:
        nonlocal known
        known = await attend(raw, "c1", known)
        return len(names(known)) == 2

    await eventually(has_all)
    took_ms = (loop.time() - last_word) * 1000
    assert took_ms >= silent.authorised_ms - 1, "it may consume for so long after its last word"
    assert len(names(await attend(raw, "silent"))) == 1


async def test_who_says_that_it_is_there_stays(start: Start) -> None:
    running = await start(ordered=TIMEOUT)
    raw = await running.connect()
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    first, second = await attend(raw, "c1"), await attend(raw, "c2")
    first = await attend(raw, "c1", first)
    for _ in range(5):
        answers = [await raw.put(word("c1", first)), await raw.put(word("c2", second))]
        for each in answers:
            assert len(names(await raw.answer_to(each))) == 1


@pytest.mark.accepts("002-45", "002-46")
async def test_that_a_consumer_is_online_is_in_the_database(
    running: RunningMeta, placed: RawConnection
) -> None:
    await attend(placed, "c1")
    url = parse_database_url(running.settings.database_url())
    database = Database(url, password=None, timeout_s=60)
    store = AttendingStore(database)
    row = AttendingConsumer(Subject("orders"), Group("g"), ConsumerId("c1"), 1, True)

    before = (await store.beats())[row]
    await attend(placed, "c1")
    after = (await store.beats())[row]
    await attend(placed, "c1", is_online=False)

    assert after > before
    assert await store.beats() == {}
    await database.close()


async def test_a_newer_run_of_a_consumer_fences_the_older(placed: RawConnection) -> None:
    await attend(placed, "c1", incarnation=2**64 - 2)
    await attend(placed, "c1", incarnation=2**64 - 1)

    with pytest.raises(FencedError, match="must stop"):
        await attend(placed, "c1", incarnation=2**64 - 2)
    assert len(names(await attend(placed, "c1", incarnation=2**64 - 1))) == 2


@pytest.mark.parametrize(
    "fields",
    [{"subject": "order.*"}, {"subject": ""}, {"group": "a b"}, {"consumer": "%"}],
)
async def test_what_is_no_name_is_refused(
    placed: RawConnection, fields: dict[str, object]
) -> None:
    with pytest.raises(InvalidNameError):
        await placed.ask(replace(word("c1"), **fields), Attended)  # type: ignore[arg-type]


@pytest.mark.accepts("002-24", "002-37")
async def test_the_strategy_of_order_is_set_per_subject_and_told_at_once(
    running: RunningMeta, placed: RawConnection
) -> None:
    found = await attend(placed, "c1")
    waiting = await placed.put(word("c1", found))

    await running.server.administration.order_subject("orders", OrderStrategy.STRICT)

    pushed = await placed.answer_to(waiting)
    assert isinstance(pushed, Attended)
    assert pushed.order is OrderStrategy.STRICT
    assert (await route(placed, "orders", "g")).order is OrderStrategy.STRICT
    other = await attend(placed, "c1", subject="others")
    assert other.order is OrderStrategy.BEST_EFFORT


@pytest.mark.accepts("002-36", "002-42")
async def test_a_meta_server_may_say_that_there_is_no_order(start: Start) -> None:
    running = await start(ordered={"exclusive": False})
    raw = await running.connect()
    await register(raw, "b1")
    await route(raw, "orders")

    found = await attend(raw, "c1")

    assert (found.strategy, found.partitions) == (ConsumeStrategy.SHARED, ())


@pytest.fixture
async def two(start: Start) -> list[RawConnection]:
    """Connections to two meta servers over one database."""
    servers = [await start(ordered=TIMEOUT) for _ in range(2)]
    raws = [await each.connect() for each in servers]
    for raw in raws:
        await register(raw, "b1", "b2")
    await route(raws[0], "orders")
    return raws


@pytest.mark.accepts("002-48")
async def test_meta_servers_over_one_database_allot_the_same(two: list[RawConnection]) -> None:
    one, other = two
    known = await attend(one, "c1")
    waiting = await one.put(word("c1", known))

    far = await attend(other, "c2")

    await one.answer_to(waiting)
    near: Attended | None = None

    async def is_told() -> bool:  # the first answer may have come by the clock, before the other
        nonlocal near
        near = await attend(one, "c1", near)
        return len(names(near)) == 1

    await eventually(is_told)
    assert near is not None
    assert sorted(names(near) + names(far)) == ["orders@b1", "orders@b2"]
    # Whoever is asked, the answer is the same to the last bit.
    assert await attend(one, "c2") == await attend(other, "c2")

    async def has_all() -> bool:
        # Nobody says anything at the other one any more.
        return len(names(await attend(one, "c1"))) == 2

    await eventually(has_all)


async def test_many_come_at_once_at_two_meta_servers(two: list[RawConnection]) -> None:
    async def comes(raw: RawConnection, some: list[str]) -> None:
        for each in [await raw.put(word(name)) for name in some]:
            names(await raw.answer_to(each))

    everybody = [f"c{number:02}" for number in range(20)]
    await asyncio.gather(comes(two[0], everybody[::2]), comes(two[1], everybody[1::2]))

    async def is_settled() -> bool:
        found = [names(await attend(two[0], each)) for each in everybody]
        return sorted(chain.from_iterable(found)) == ["orders@b1", "orders@b2"]

    await eventually(is_settled)


async def test_what_is_allotted_outlives_the_meta_server(start: Start) -> None:
    running = await start()
    raw = await running.connect()
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    for consumer in ("c1", "c2"):
        await attend(raw, consumer)
    before = [await attend(raw, consumer) for consumer in ("c1", "c2")]
    await running.close()

    again = await (await start()).connect()
    await register(again, "b1", "b2", incarnation=2)

    assert [await attend(again, consumer) for consumer in ("c1", "c2")] == before


@pytest.mark.accepts("004-65", "002-25")
async def test_in_strict_order_a_partition_stays_in_the_route_while_its_broker_is_away(
    running: RunningMeta, placed: RawConnection
) -> None:
    both = await route(placed, "orders")
    await running.server.administration.order_subject("orders", OrderStrategy.STRICT)
    await route(placed, "others")

    await register(placed, "b1", state=ServerState.LEAVING)

    strict, other = await route(placed, "orders"), await route(placed, "others")
    assert [each.slots for each in strict.partitions] == [each.slots for each in both.partitions]
    assert {each.broker_group: each.is_writable for each in strict.partitions} == {
        "b1": False,
        "b2": True,
    }
    assert [each.broker_group for each in other.partitions] == ["b2"]


# -- the database -------------------------------------------------------------------------------


@pytest.fixture
async def store(running: RunningMeta) -> AsyncIterator[AttendingStore]:
    """The tables of a meta server, by themselves."""
    url = parse_database_url(running.settings.database_url())
    database = Database(url, password=None, timeout_s=60)
    yield AttendingStore(database)
    await database.close()


ROW = AttendingConsumer(Subject("orders"), Group("g"), ConsumerId("c1"), 1, True)


@pytest.mark.accepts("002-51")
async def test_who_was_counted_meanwhile_is_not_lost(store: AttendingStore) -> None:
    await store.attend([ROW])
    seen = await store.beats()
    assert await store.attend([ROW]) == [Word()]

    assert not await store.lose(seen)
    assert list(await store.beats()) == [ROW]
    assert await store.lose(await store.beats())
    assert await store.beats() == {}
    # Whoever was said to be offline hears that it came anew: its partitions may be others'.
    assert await store.attend([ROW]) == [Word(is_new=True)]


async def test_only_who_saw_what_is_allotted_may_change_it(store: AttendingStore) -> None:
    mine = Allotment(0, {0: ConsumerId("c1")}, frozenset())
    others = Allotment(0, {0: ConsumerId("c2")}, frozenset([1]))

    assert await store.allot(ROW.key, 0, mine)
    assert not await store.allot(ROW.key, 0, others)
    assert await store.allot(ROW.key, 1, others)
    assert not await store.allot(ROW.key, 1, mine)


async def test_words_of_one_turn_count_one_after_the_other(store: AttendingStore) -> None:
    gone, newer = ROW._replace(is_online=False), ROW._replace(incarnation=2)

    words = await store.attend([ROW, gone, newer, ROW, gone])

    assert words == [
        Word(is_new=True),
        Word(is_new=True),
        Word(is_new=True),
        Word(is_new=True),
        Word(is_new=True),
    ]
    assert list(await store.beats()) == [newer]
    assert await store.attend([ROW, gone]) == [Word(newer=2), Word(newer=2)]

"""A pull is answered as soon as there is something, at the latest when its time is up."""

import asyncio
from functools import partial

import pytest

from pulque.errors import ErrorCode, StorageError
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import Handed, RawConnection, expect, pack_batch
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    LATEST,
    Acks,
    Pull,
    Read,
    Send,
    Status,
    Wanted,
)
from pulque.wire.responses import Pulled, ReadBack
from tests.unit.broker.running import Running, Start, eventually, numbered

LONG_MS = 30_000
"""Longer than any test waits: whatever is answered was not answered by its time-out."""


def pull_of(*partitions: str, consumer: str = "c", group: str = "g", **limits: int) -> Pull:
    return Pull(
        group,
        consumer,
        1,
        limits.get("max_messages", 100),
        limits.get("max_bytes", 1024 * 1024),
        limits.get("timeout_ms", LONG_MS),
        limits.get("start_at", EARLIEST),
        tuple(Wanted(each, limits.get("expected", FROM_SETTLED)) for each in partitions),
    )


async def is_waiting(raw: RawConnection, pulls: int) -> bool:
    return bool((await raw.status())["pulls_waiting"] == pulls)


async def handed(raw: RawConnection, request_id: int, *partitions: str) -> Handed:
    return Handed.of(expect(await raw.answer_to(request_id), Pulled), partitions)


@pytest.mark.accepts("003-34")
async def test_what_is_there_is_returned_at_once(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))

    got = await raw.pull("orders", timeout_ms=LONG_MS)

    assert got.bodies == numbered(3)


@pytest.mark.accepts("003-35", "003-36", "003-37", "004-08", "004-47", "004-98")
async def test_an_empty_pull_waits_and_is_answered_when_a_message_arrives(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(1))
    await raw.pull("orders", expected=0)
    producer = await running.connect()
    waiting = await raw.put(pull_of("orders", consumer="d"))
    await eventually(lambda: is_waiting(producer, 1))

    await producer.send("orders", [b"new"])

    assert await is_waiting(producer, 0), "the message itself ends the pull, and not a timer"
    assert (await handed(raw, waiting, "orders")).bodies == [b"new"]


@pytest.mark.accepts("000-18", "004-98")
async def test_the_time_out_ends_a_pull_that_finds_nothing(raw: RawConnection) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    got = await raw.pull("orders", timeout_ms=120)

    assert got.runs == ()
    assert loop.time() - began >= 0.119
    assert await is_waiting(raw, 0)


@pytest.mark.accepts("000-18", "000-05")
async def test_the_number_ends_a_pull(raw: RawConnection) -> None:
    await raw.send("orders", numbered(10))

    got = await raw.pull("orders", max_messages=4, timeout_ms=LONG_MS)

    assert got.bodies == numbered(4)


@pytest.mark.accepts("000-18", "000-05")
async def test_the_bytes_end_a_pull(raw: RawConnection) -> None:
    for _ in range(10):
        await raw.send("orders", [b"x" * 1000])

    got = await raw.pull("orders", max_bytes=3500, timeout_ms=LONG_MS)

    assert 2 <= got.length <= 4


async def test_one_message_larger_than_all_bytes_asked_for_is_still_returned(
    raw: RawConnection,
) -> None:
    await raw.send("orders", [b"x" * 10_000, b"y"])

    got = await raw.pull("orders", max_bytes=10, timeout_ms=LONG_MS)

    assert got.bodies == [b"x" * 10_000]


async def test_a_pull_waits_for_a_subject_that_does_not_exist_yet(
    running: Running, raw: RawConnection
) -> None:
    waiting = await raw.put(pull_of("later"))
    producer = await running.connect()
    await eventually(lambda: is_waiting(producer, 1))

    await producer.send("later", [b"first"], acks=Acks.DISK)

    assert (await handed(raw, waiting, "later")).bodies == [b"first"]


@pytest.mark.accepts("000-50", "000-05")
async def test_nothing_is_sent_to_a_consumer_that_does_not_ask(
    running: Running, raw: RawConnection
) -> None:
    producer = await running.connect()
    await producer.send("orders", numbered(1))
    await raw.pull("orders")
    await producer.send("orders", numbered(5, 1))
    before = (await producer.status())["messages_delivered"]

    # Its connection is silent but for the answer to what it asks next.
    request = await raw.put(Status())

    assert (await raw.get())[0] == request
    assert (await producer.status())["messages_delivered"] == before == 1


async def test_any_of_several_partitions_wakes_a_pull(
    running: Running, raw: RawConnection
) -> None:
    waiting = await raw.put(pull_of("a", "b", "c"))
    producer = await running.connect()
    await eventually(lambda: is_waiting(producer, 1))

    await producer.send("b", [b"to b"])

    got = await handed(raw, waiting, "a", "b", "c")
    assert [run.partition for run in got.runs] == ["b"]
    assert await is_waiting(producer, 0)


async def test_those_who_wait_are_served_first_come_first_served(running: Running) -> None:
    producer = await running.connect()
    consumers = [await running.connect() for _ in range(3)]
    ids = []
    for number, consumer in enumerate(consumers):
        ids.append(await consumer.put(pull_of("orders", consumer=f"c{number}", max_messages=1)))
        await eventually(partial(is_waiting, producer, number + 1))

    await producer.send("orders", numbered(2))

    for number in range(2):
        got = await handed(consumers[number], ids[number], "orders")
        assert got.bodies == [str(number).encode()]
    assert await is_waiting(producer, 1)


async def test_every_group_that_waits_is_served(running: Running) -> None:
    producer = await running.connect()
    consumers = {group: await running.connect() for group in ("g", "h", "i")}
    ids = {
        group: await raw.put(pull_of("orders", group=group)) for group, raw in consumers.items()
    }
    await eventually(lambda: is_waiting(producer, 3))

    await producer.send("orders", numbered(2))

    for group, raw in consumers.items():
        assert (await handed(raw, ids[group], "orders")).bodies == numbered(2)


async def test_a_send_that_also_makes_a_partition_wakes_the_others(running: Running) -> None:
    """A partition is made by a write of its own, which must not swallow who is to be woken."""
    producer, consumer = await running.connect(), await running.connect()
    await producer.send("old", numbered(1))
    await consumer.pull("old", expected=0)
    waiting = await consumer.put(pull_of("old", consumer="d"))
    await eventually(lambda: is_waiting(producer, 1))
    batches = (("old", pack_batch("old", [b"x"])), ("new", pack_batch("new", [b"y"])))

    await producer.put(Send(Acks.MEMORY, 1000, batches))

    assert (await handed(consumer, waiting, "old")).bodies == [b"x"]


async def test_a_consumer_that_holds_too_much_does_not_stand_in_the_way(start: Start) -> None:
    running = await start(limits={"max_held": 2})
    producer, full, hungry = [await running.connect() for _ in range(3)]
    await producer.send("orders", numbered(2))
    await full.pull("orders", consumer="full")
    await full.put(pull_of("orders", consumer="full", expected=2))
    await eventually(lambda: is_waiting(producer, 1))
    waiting = await hungry.put(pull_of("orders", consumer="hungry"))
    await eventually(lambda: is_waiting(producer, 2))

    await producer.send("orders", [b"for the hungry"])

    assert (await handed(hungry, waiting, "orders")).bodies == [b"for the hungry"]
    assert await is_waiting(producer, 1)


async def test_a_closed_connection_waits_no_more_and_is_handed_nothing(running: Running) -> None:
    producer, gone, heir = [await running.connect() for _ in range(3)]
    await gone.put(pull_of("orders", consumer="gone"))
    await eventually(lambda: is_waiting(producer, 1))
    gone.close()
    await eventually(lambda: is_waiting(producer, 0))

    await producer.send("orders", numbered(2))

    assert (await heir.pull("orders", consumer="heir")).bodies == numbered(2)


async def test_a_lost_consumer_that_waits_is_answered_and_handed_nothing(start: Start) -> None:
    """Should it be dead, nothing must go to it; should it live, it asks again."""
    clock = ManualClock()
    running = await start(clock=clock)
    producer, silent, lively = [await running.connect() for _ in range(3)]
    waiting = await silent.put(pull_of("orders", consumer="silent"))
    await eventually(partial(is_waiting, producer, 1))

    clock.advance(30_001)
    answer = await handed(silent, waiting, "orders")
    await producer.send("orders", numbered(1))

    assert answer.runs == ()
    assert (await lively.pull("orders", consumer="lively")).bodies == numbered(1)


async def test_a_pull_that_cannot_be_written_down_is_refused_and_the_next_is_served(
    start: Start,
) -> None:
    files = MemoryFileSystem()
    running = await start(files=files)
    producer, first = await running.connect(), await running.connect()
    await producer.send("orders", numbered(1))
    got = await first.pull("orders")
    await first.settle(got.runs[0])
    waiting = await first.put(pull_of("orders", expected=1))
    await eventually(partial(is_waiting, producer, 1))
    # The first write is the message, the second the fact that it was pulled.
    files.fail_after(2, StorageError("the disk is gone"))

    outcome = await producer.send("orders", numbered(1, 1))

    assert outcome.code is ErrorCode.NONE
    assert isinstance(await first.answer_to(waiting), StorageError)


async def test_a_group_that_starts_at_the_end_gets_what_comes_while_it_waits(
    running: Running, raw: RawConnection
) -> None:
    producer = await running.connect()
    await producer.send("orders", [b"old"])
    waiting = await raw.put(pull_of("orders", start_at=LATEST))
    await eventually(lambda: is_waiting(producer, 1))

    await producer.send("orders", [b"new"])

    assert (await handed(raw, waiting, "orders")).bodies == [b"new"]


async def test_a_group_that_starts_at_the_end_starts_there_though_its_pull_ended_empty(
    raw: RawConnection,
) -> None:
    await raw.send("orders", [b"old"])
    await raw.pull("orders", start_at=LATEST)

    await raw.send("orders", [b"new"])

    assert (await raw.pull("orders", start_at=LATEST)).bodies == [b"new"]


async def test_a_read_waits_as_a_pull_does(running: Running, raw: RawConnection) -> None:
    producer = await running.connect()
    waiting = await raw.put(Read("orders", 0, 10, 1000, LONG_MS))

    await producer.send("orders", [b"x"])

    answer = expect(await raw.answer_to(waiting), ReadBack)
    assert (answer.first_sequence, answer.count) == (0, 1)


async def test_a_read_that_finds_nothing_ends_with_its_time(raw: RawConnection) -> None:
    await raw.send("orders", [b"x"])

    answer, messages = await raw.read("orders", 1, timeout_ms=50)

    assert (answer.first_sequence, answer.count, answer.start, answer.end) == (1, 0, 0, 1)
    assert messages == []

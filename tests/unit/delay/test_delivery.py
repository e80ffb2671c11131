"""Messages get to brokers when they are due: not before, each once, whatever happens between."""

import asyncio

import pytest

from pulque.client.arguments.due_times import LEVELS
from pulque.errors import DisconnectedError, ReadOnlyError, RequestTimeoutError
from pulque.model.batch import read_header, seed_of
from pulque.model.pack import BatchPacker, ProducedBy, encode_headers
from pulque.model.returning import REASON_HEADER, RETURN_HEADER
from pulque.testing.clock import ManualClock
from pulque.wire.requests import Acks
from tests.unit.delay.running import FakeBrokers, StartDelay, delayed_batch, eventually

SECOND = 1000
HOUR = 3_600_000
DAY = 24 * HOUR


async def settled(clock: ManualClock, brokers: FakeBrokers, count: int) -> None:
    """Let messages arrive, and see that no more come."""
    await eventually(lambda: len(brokers.accepted) >= count)


@pytest.mark.accepts("001-31", "001-32", "001-38")
async def test_any_time_within_two_years_is_kept_to_the_tenth_of_a_second(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    delays = [1, 999, 12_345, HOUR - 200, HOUR, 5 * DAY + 7, 731 * DAY]
    await running.send([(str(delay).encode(), now + delay) for delay in delays])

    for count, delay in enumerate(delays):
        clock.set_now_ms(now + delay - 1)
        await asyncio.sleep(0.06)
        assert len(brokers.accepted) == count
        clock.set_now_ms(now + delay + 100)
        await settled(clock, brokers, count + 1)

    assert brokers.bodies == [str(delay).encode() for delay in delays]
    for each, delay in zip(brokers.accepted, delays, strict=True):
        assert now + delay <= each.at_ms <= now + delay + 100


async def test_messages_of_a_subject_come_in_the_order_of_their_times(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    for part in range(4):
        await running.send(
            [(b"%d" % (part + 4 * i), now + SECOND + 7 * (part + 4 * i)) for i in range(50)],
            acks=Acks.MEMORY,
        )
    clock.advance(5 * SECOND)
    await settled(clock, brokers, 200)

    assert brokers.bodies == [b"%d" % i for i in range(200)]


@pytest.mark.accepts("004-72")
async def test_the_original_partition_is_restored(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    due = clock.now_ms() + SECOND
    await running.send([(b"a", due)], "orders")
    await running.send([(b"b", due)], "refunds")
    await running.send([(b"c", due)], "orders#p7")
    clock.advance(2 * SECOND)
    await settled(clock, brokers, 3)

    assert {(each.body, each.partition) for each in brokers.accepted} == {
        (b"a", "orders"),
        (b"b", "refunds"),
        (b"c", "orders#p7"),
    }


@pytest.mark.accepts("001-37")
async def test_the_index_of_an_hour_is_loaded_from_the_disk_before_it_comes(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    def in_memory() -> int:
        return int(running.server.status()["schedule"]["in_memory"])

    running = await start_delay()
    hour = clock.now_ms() // HOUR * HOUR + 2 * HOUR
    await running.send([(b"first", hour), (b"last", hour + HOUR - 1), (b"next", hour + HOUR)])
    await running.send([(b"before", hour - 100 * SECOND)])
    running = await start_delay()
    clock.set_now_ms(hour - 90 * SECOND)
    await eventually(lambda: brokers.bodies == [b"before"])
    assert in_memory() == 1, "by that time the hour before is there alone"
    clock.set_now_ms(hour - 30 * SECOND)
    await eventually(lambda: in_memory() == 2)
    assert brokers.bodies == [b"before"]
    clock.set_now_ms(hour)
    await settled(clock, brokers, 2)

    assert brokers.bodies == [b"before", b"first"]
    assert in_memory() <= 2, "the hour after it has time"


@pytest.mark.accepts("004-70", "004-71")
async def test_levels_keep_their_order_and_none_holds_up_another(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    began = clock.now_ms()
    due: dict[bytes, int] = {}
    for turn in range(3):
        for level in reversed(range(len(LEVELS))):
            body = b"%d/%d" % (level, turn)
            due[body] = clock.now_ms() + LEVELS[level]
            await running.send([(body, due[body])], acks=Acks.MEMORY)
        clock.advance(200)
    for delay_ms in LEVELS:
        clock.set_now_ms(max(began + delay_ms + SECOND, clock.now_ms()))
        expected = {body for body, due_ms in due.items() if due_ms <= clock.now_ms()}
        await settled(clock, brokers, len(expected))
        assert set(brokers.bodies) == expected, "a level was held up, or came early"

    assert len(brokers.bodies) == 3 * 18
    for level in range(18):
        of_level = [body for body in brokers.bodies if body.startswith(b"%d/" % level)]
        assert of_level == [b"%d/%d" % (level, turn) for turn in range(3)]


async def test_what_is_overdue_goes_at_once(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    await running.send([(b"long ago", 1), (b"just now", clock.now_ms() - 5)])
    await settled(clock, brokers, 2)

    assert len(running.schedule("*.log")) == 1


@pytest.mark.accepts("001-45", "001-46", "001-47")
async def test_what_was_delivered_is_not_delivered_again_after_a_restart_within_the_tick(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    await running.send([(b"%d" % i + b"x" * 500, now + SECOND * (i + 1)) for i in range(20)])
    clock.advance(10 * SECOND + 100)
    await settled(clock, brokers, 10)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 10)
    await start_delay()
    clock.advance(20 * SECOND)
    await settled(clock, brokers, 20)

    assert [int(body.rstrip(b"x")) for body in brokers.bodies] == list(range(20))
    # Not even the same batch again, which a broker would recognise by its number.
    assert len(set(brokers.batches)) == len(brokers.batches)
    (log,) = running.schedule("*.dispatch")
    assert len(log.read_bytes()) < 2000, "it holds offsets, not messages"


async def test_a_lost_answer_makes_nothing_twice(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.groups = ("group-a", "group-b")
    brokers.lost_answers = [RequestTimeoutError("no answer"), DisconnectedError("gone")]
    await running.send([(b"%d" % i, clock.now_ms() + SECOND) for i in range(5)])
    clock.advance(2 * SECOND)
    await eventually(lambda: len(brokers.batches) == 3)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 5)

    assert brokers.bodies == [b"%d" % i for i in range(5)]
    assert len({(group, partition) for group, partition, _ in brokers.batches}) == 1
    assert len({batch for _, _, batch in brokers.batches}) == 1


async def test_a_refusal_sends_it_to_another_broker(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.groups = ("group-a", "group-b")
    brokers.failures = [ReadOnlyError("not here")]
    await running.send([(b"a", clock.now_ms() + SECOND)])
    clock.advance(2 * SECOND)
    await settled(clock, brokers, 1)

    assert {group for group, _, _ in brokers.batches} == {"group-a", "group-b"}
    assert brokers.bodies == [b"a"]


async def test_batches_of_a_partition_are_numbered_and_named(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay(delivery={"batch_messages": 3})
    await running.send([(b"%d" % i, clock.now_ms() + SECOND) for i in range(8)])
    clock.advance(2 * SECOND)
    await settled(clock, brokers, 8)
    headers = [read_header(batch) for _, _, batch in brokers.batches]

    assert [header.count for header in headers] == [3, 3, 2]
    assert [header.producer_sequence for header in headers] == [0, 1, 2]
    assert len({header.producer_id for header in headers}) == 1


async def test_a_batch_that_is_sent_again_is_stored_once(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    batch, _ = delayed_batch([(b"a", clock.now_ms() + SECOND)], produced_by=ProducedBy(7, 0, 0))
    first = await running.send_batch(batch)
    again = await running.send_batch(batch)
    running = await start_delay()
    after = await running.send_batch(batch)
    clock.advance(2 * SECOND)
    await settled(clock, brokers, 1)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 1)

    assert [first.is_duplicate, again.is_duplicate, after.is_duplicate] == [False, True, True]
    assert brokers.bodies == [b"a"]


@pytest.mark.accepts("000-58")
async def test_a_message_for_one_group_is_adopted_whole_for_that_group(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    partition = "%retry%orders%billing"
    packer = BatchPacker()
    headers = {
        "mine": "1",
        RETURN_HEADER: "group-a orders 41 host/shop/0",
        REASON_HEADER: "no paper",
    }
    packer.add_encoded(
        b"the whole body",
        headers=encode_headers(headers, is_system=True),
        attempt=3,
        due_at_ms=clock.now_ms() + SECOND,
        message_id=b"0123456789abcdef",
    )
    batch = packer.encode(seed=seed_of(partition), ids=b"\0" * 16, created_at_ms=5)
    outcome = await running.send_batch(batch, partition)
    assert not outcome.code, outcome.text
    clock.advance(2 * SECOND)
    await eventually(lambda: bool(brokers.adopted))
    (request,) = brokers.adopted

    assert (request.group, request.consumer, request.reason) == (
        "billing",
        "host/shop/0",
        "no paper",
    )
    assert tuple(request.origin) == ("group-a", "orders", 41)
    assert b"the whole body" in request.batch
    assert b"pulque.return" not in request.batch
    assert (request.delay_ms, request.attempt) == (0, 3)
    assert brokers.accepted == []


@pytest.mark.parametrize("step_ms", [HOUR, -HOUR, 365 * DAY, -365 * DAY])
async def test_somebody_sets_the_clock(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, step_ms: int
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    await running.send([(b"near", now + 10 * SECOND), (b"far", now + 366 * DAY)])
    clock.set_now_ms(now + step_ms)
    if step_ms > 0:
        await settled(clock, brokers, 1)
    else:
        await running.send([(b"then", clock.now_ms() + SECOND)])
        clock.advance(2 * SECOND)
        await settled(clock, brokers, 1)
        assert brokers.bodies == [b"then"]
    clock.set_now_ms(now + 367 * DAY)
    await settled(clock, brokers, 2 if step_ms > 0 else 3)

    assert sorted(brokers.bodies)[:2] == [b"far", b"near"]
    assert running.server.status()["dispatch"]["clock_steps"] >= 2


async def test_a_change_to_winter_time_changes_nothing(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    """In Berlin 2027-10-31 02:30 is twice; in UTC all hours are one after the other."""
    running = await start_delay()
    first = 1_824_942_600_000  # 2027-10-31 00:30 UTC: 02:30 in summer time
    await running.send([(b"summer", first), (b"winter", first + HOUR)])
    await running.caught_up()
    names = [path.name for path in running.schedule("*.log")]
    assert names == ["20271031T0000Z.log", "20271031T0100Z.log"]
    clock.set_now_ms(first)
    await settled(clock, brokers, 1)
    assert brokers.bodies == [b"summer"]
    clock.set_now_ms(first + HOUR)
    await settled(clock, brokers, 2)

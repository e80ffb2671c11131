"""Cancelling, moving and listing what waits."""

import pytest

from pulque.errors import InvalidNameError, InvalidRequestError
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.testing.clock import ManualClock
from pulque.wire.delay import Fate, HourCount, Listing, Scheduled
from tests.unit.delay.running import FakeBrokers, StartDelay, eventually

SECOND = 1000
HOUR = 3_600_000
DAY = 24 * HOUR


async def test_a_cancelled_message_is_never_delivered(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    due = clock.now_ms() + 5 * SECOND
    a, b, c = await running.send([(b"a", due), (b"b", due), (b"c", due + DAY)])

    assert await running.cancel((b, due), (c, due + DAY)) == [Fate.CANCELLED] * 2
    assert await running.cancel((b, due), (c, 0)) == [Fate.ALREADY_CANCELLED] * 2
    running = await start_delay()
    assert await running.cancel((b, due), (c, 0)) == [Fate.ALREADY_CANCELLED] * 2
    clock.advance(6 * SECOND)
    await eventually(lambda: bool(brokers.accepted))
    assert await running.cancel((a, due)) == [Fate.TOO_LATE]
    clock.set_now_ms(due + 2 * DAY)
    await running.send([(b"last", clock.now_ms())])
    await eventually(lambda: len(brokers.accepted) == 2)

    assert brokers.bodies == [b"a", b"last"]


async def test_ids_that_are_not_here_are_unknown(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    due = clock.now_ms() + HOUR
    (a,) = await running.send([(b"a", due)])
    stranger = b"\xff" * 16

    assert await running.cancel((stranger, 0), (stranger, due), (a, due + 1)) == [Fate.UNKNOWN] * 3
    assert await running.move((stranger, 0, due)) == [Fate.UNKNOWN]


async def test_an_id_alone_is_searched_for_in_all_ticks(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    ids = await running.send([(b"%d" % i, now + i * 3 * HOUR) for i in range(1, 9)])

    assert await running.cancel((ids[5], 0)) == [Fate.CANCELLED]
    assert await running.cancel((ids[5], now + 18 * HOUR)) == [Fate.ALREADY_CANCELLED]


async def test_a_moved_message_comes_at_the_new_time_only(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    a, b = await running.send([(b"later", now + 5 * SECOND), (b"sooner", now + DAY)])

    assert (
        await running.move((a, now + 5 * SECOND, now + 3 * HOUR), (b, 0, now + SECOND))
        == [Fate.MOVED] * 2
    )
    assert await running.move((a, now + 5 * SECOND, now + 3 * HOUR)) == [Fate.MOVED], "once more"
    running = await start_delay()
    clock.advance(10 * SECOND)
    await eventually(lambda: bool(brokers.accepted))
    assert brokers.bodies == [b"sooner"]
    assert await running.move((b, 0, now + DAY)) == [Fate.TOO_LATE]
    clock.set_now_ms(now + 3 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 2)
    clock.set_now_ms(now + 2 * DAY)
    await running.send([(b"last", clock.now_ms())])
    await eventually(lambda: len(brokers.accepted) == 3)

    assert brokers.bodies == [b"sooner", b"later", b"last"]
    assert brokers.accepted[0].id == b.hex()


async def test_a_moved_message_can_be_cancelled_by_its_first_receipt(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    due = clock.now_ms() + HOUR
    (a,) = await running.send([(b"a", due)])
    await running.move((a, due, due + DAY))

    assert await running.cancel((a, due)) == [Fate.CANCELLED]
    assert await running.move((a, due, due + HOUR)) == [Fate.ALREADY_CANCELLED]


async def test_times_that_cannot_be_are_refused(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay(schedule={"longest_delay": "1d"})
    due = clock.now_ms() + HOUR
    (a,) = await running.send([(b"a", due)])

    for wrong in (0, -5, due + 2 * DAY):
        with pytest.raises(InvalidRequestError, match="are allowed"):
            await running.move((a, due, wrong))
    with pytest.raises(InvalidRequestError, match="1001 messages to cancel; at most 1000"):
        await running.cancel(*[(a, due)] * 1001)
    with pytest.raises(InvalidRequestError, match="0 messages in one request"):
        await running.cancel()


async def test_counts_by_hour_and_subject(start_delay: StartDelay, clock: ManualClock) -> None:
    running = await start_delay(schedule={"tick": "10m"})
    now = clock.now_ms()  # ten past nine
    hour = now - 600_000
    ids = await running.send([(b"x", now + i * 600_000) for i in range(1, 12)])
    await running.send([(b"y", now + 600_000)], "refunds")
    await running.cancel((ids[0], 0))

    all_of_them = await running.listed(Scheduled(Listing.COUNTS))
    assert all_of_them.counts == (
        HourCount(hour, "orders", 3),
        HourCount(hour, "refunds", 1),
        HourCount(hour + HOUR, "orders", 6),
        HourCount(hour + 2 * HOUR, "orders", 1),
    )
    some = await running.listed(
        Scheduled(Listing.COUNTS, "orders", from_ms=now + 1_200_000, until_ms=hour + HOUR)
    )
    assert some.counts == (HourCount(hour, "orders", 3),)
    pages: list[HourCount] = []
    after = b""
    while True:
        page = await running.listed(Scheduled(Listing.COUNTS, max_rows=1, after=after))
        pages += page.counts
        after = page.next
        if not after:
            break
    assert tuple(pages) == all_of_them.counts


async def test_the_next_ones_in_pages(start_delay: StartDelay, clock: ManualClock) -> None:
    running = await start_delay()
    now = clock.now_ms()
    ids = await running.send([(b"%d" % i, now + (10 - i) * 900_000) for i in range(10)])
    await running.send([(b"other", now + HOUR)], "refunds")
    await running.cancel((ids[9], 0))
    found = []
    after = b""
    while True:
        page = await running.listed(Scheduled(Listing.NEXT, "orders", max_rows=4, after=after))
        found += [(each.id, each.due_ms, each.size) for each in page.messages]
        after = page.next
        if not after:
            break

    assert found == [(ids[i], now + (10 - i) * 900_000, 1) for i in range(8, -1, -1)]


async def test_one_by_its_id_with_its_content(start_delay: StartDelay, clock: ManualClock) -> None:
    running = await start_delay()
    due = clock.now_ms() + DAY
    a, b = await running.send([(b"first", due), (b"second", due + 1)])
    (found,) = (await running.listed(Scheduled(Listing.ONE, id=b))).messages
    stored = StoredBatch(
        found.batch,
        partition=PartitionName("orders"),
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )

    assert (found.id, found.due_ms, found.partition) == (b, due + 1, "orders")
    assert Message(stored, 0).body == b"second"
    await running.cancel((a, 0))
    assert (await running.listed(Scheduled(Listing.ONE, id=a))).messages == ()
    with pytest.raises(InvalidRequestError, match="an id of 3 bytes"):
        await running.listed(Scheduled(Listing.ONE, id=b"abc"))
    with pytest.raises(InvalidNameError):
        await running.listed(Scheduled(Listing.NEXT, "no%subject"))
    with pytest.raises(InvalidRequestError, match="place to go on at"):
        await running.listed(Scheduled(Listing.NEXT, after=b"junk"))

"""Messages are found by their ids with the hash indexes of ticks, and without them."""

from pathlib import Path

import pytest

from pulque.testing.clock import ManualClock
from pulque.wire.delay import ANY_DUE, Fate, Listing, Scheduled
from tests.unit.delay.running import FakeBrokers, RunningDelay, StartDelay, eventually

SECOND = 1000
HOUR = 3_600_000
BODY = b"x" * 1000
COUNT = 30


async def filled(running: RunningDelay, clock: ManualClock, hours: int) -> dict[bytes, int]:
    """Send some messages for each of some hours; return their due times by id."""
    due = clock.now_ms() + 2 * HOUR
    found: dict[bytes, int] = {}
    for hour in range(hours):
        times = [due + hour * HOUR + i for i in range(COUNT)]
        ids = await running.send([(BODY, time) for time in times], ["orders", "refunds"][hour % 2])
        found.update(zip(ids, times, strict=True))
    return found


def indexes(running: RunningDelay) -> list[Path]:
    return running.schedule("*.index")


async def indexed(running: RunningDelay, hours: int) -> None:
    await running.checkpointed()
    await eventually(lambda: len(indexes(running)) == hours)


async def counts(running: RunningDelay) -> list[tuple[str, int]]:
    found = await running.listed(Scheduled(Listing.COUNTS, "", 0, 0, 100, b"", b""))
    return [(each.subject, each.messages) for each in found.counts]


async def test_a_tick_gets_an_index_and_loses_it_with_its_messages(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    await filled(running, clock, 3)
    await indexed(running, 3)
    assert len(running.schedule("*")) == 6
    clock.advance(8 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 3 * COUNT)
    await eventually(lambda: running.server.is_idle)
    await running.checkpointed()
    await running.checkpointed()

    assert running.schedule("*") == []


@pytest.mark.parametrize("how", ["whole", "missing", "spoilt", "another's", "behind"])
async def test_each_message_is_found_by_its_id_alone(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, how: str
) -> None:
    running = await start_delay()
    sent = await filled(running, clock, 4)
    await indexed(running, 4)
    files = indexes(running)
    if how == "missing":
        files[0].unlink()
    elif how == "spoilt":
        data = bytearray(files[0].read_bytes())
        data[-20] ^= 1
        files[0].write_bytes(data)
    elif how == "another's":
        files[0].write_bytes(files[1].read_bytes())
    elif how == "behind":
        more = await running.send([(b"more", min(sent.values()) + 7)])
        sent[more[0]] = min(sent.values()) + 7
    some = list(sent)[:5] + list(sent)[-5:]

    assert await running.cancel(*[(each, ANY_DUE) for each in some]) == [Fate.CANCELLED] * 10
    again = await running.cancel((some[0], ANY_DUE), (some[-1], sent[some[-1]]))
    assert again == [Fate.ALREADY_CANCELLED] * 2
    assert await running.cancel((b"?" * 16, ANY_DUE)) == [Fate.UNKNOWN]
    running = await start_delay()
    assert await running.cancel((some[0], ANY_DUE)) == [Fate.ALREADY_CANCELLED]
    clock.advance(9 * HOUR)
    await eventually(lambda: len(brokers.accepted) == len(sent) - 10)
    await eventually(lambda: running.server.is_idle)
    assert len(brokers.accepted) == len(sent) - 10


async def test_the_same_message_twice_in_one_request_is_cancelled_once(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    sent = await filled(running, clock, 1)
    first = next(iter(sent))

    fates = await running.cancel((first, sent[first]), (first, ANY_DUE))
    assert fates == [Fate.CANCELLED, Fate.ALREADY_CANCELLED]


async def test_counts_know_what_was_cancelled_and_moved(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    sent = await filled(running, clock, 3)
    await indexed(running, 3)
    assert await counts(running) == [("orders", 30), ("refunds", 30), ("orders", 30)]
    ids = list(sent)
    await running.cancel((ids[0], sent[ids[0]]), (ids[1], ANY_DUE))
    moved = await running.move(
        (ids[2], ANY_DUE, sent[ids[-1]]), (ids[40], sent[ids[40]], sent[ids[0]])
    )

    assert moved == [Fate.MOVED, Fate.MOVED]
    expected = [("orders", 27), ("refunds", 1), ("refunds", 29), ("orders", 31)]
    assert await counts(running) == expected
    running = await start_delay()
    assert await counts(running) == expected


async def test_a_list_shows_what_was_changed_since_it_was_asked_last(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    sent = await filled(running, clock, 1)
    await indexed(running, 1)
    request = Scheduled(Listing.NEXT, "", 0, 0, 100, b"", b"")
    assert len((await running.listed(request)).messages) == COUNT
    first, second = list(sent)[:2]
    await running.cancel((first, ANY_DUE))
    await running.move((second, sent[second], sent[second] + HOUR))
    messages = (await running.listed(request)).messages

    assert first not in [each.id for each in messages]
    assert [each.due_ms for each in messages if each.id == second] == [sent[second] + HOUR]

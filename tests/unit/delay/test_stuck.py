"""What brokers refuse for good is put aside, shown, and does not hold up the rest."""

from random import Random

import pytest

from pulque.errors import MessageTooLargeError, NotAllowedError, PulqueError
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.delay import Fate, Listing, Scheduled
from pulque.wire.stuck import StuckMessages
from tests.unit.delay.running import FakeBrokers, RunningDelay, StartDelay, eventually

SECOND = 1000
MINUTE = 60_000
HOUR = 3_600_000


def refuse_large(partition: str, batch: bytes) -> PulqueError | None:
    del partition
    return MessageTooLargeError("too large") if b"large" in batch else None


def refuse_secrets(partition: str, batch: bytes) -> PulqueError | None:
    del batch
    return NotAllowedError("no such subject") if partition == "secrets" else None


def stuck(running: RunningDelay) -> int:
    return int(running.server.status()["dispatch"]["stuck"]["messages"])


async def test_one_message_that_is_refused_does_not_keep_the_others(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.refuses = refuse_large
    due = clock.now_ms() + SECOND
    bodies = [b"%d" % i for i in range(7)] + [b"large"] + [b"%d" % i for i in range(7, 20)]
    await running.send([(body, due) for body in bodies])
    clock.advance(2 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 20)
    await eventually(lambda: stuck(running) == 1)

    assert brokers.bodies == [b"%d" % i for i in range(20)]
    (refusal,) = running.server.status()["dispatch"]["stuck"]["refusals"]
    assert (refusal["partition"], refusal["reason"]) == ("orders", "too large")


async def test_a_subject_that_is_refused_does_not_keep_itself_busy(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.refuses = refuse_secrets
    due = clock.now_ms() + SECOND
    await running.send([(b"%d" % i, due) for i in range(50)], "secrets")
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 50)
    tried = len(brokers.batches)
    await running.send([(b"fine", due)], "orders")
    await eventually(lambda: brokers.bodies == [b"fine"])

    assert tried == 3
    assert len(brokers.batches) == tried + 1


async def test_what_is_stuck_can_be_listed_cancelled_and_moved(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.refuses = refuse_large
    due = clock.now_ms() + SECOND
    first, second, third = await running.send([(b"large %d" % i, due) for i in range(3)])
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 3)
    listed = await running.listed(Scheduled(Listing.NEXT, "", 0, 0, 10, b"", b""))
    assert [each.id for each in listed.messages] == [first, second, third]

    assert await running.cancel((first, due)) == [Fate.CANCELLED]
    brokers.refuses = lambda _, __: None
    assert await running.move((second, due, clock.now_ms() + SECOND)) == [Fate.MOVED]
    clock.advance(2 * SECOND)
    await eventually(lambda: brokers.bodies == [b"large 1"])
    assert stuck(running) == 1


async def test_what_is_stuck_is_listed_with_the_reason(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    # Less than the ten minutes after which they are tried again.
    running = await start_delay(schedule={"tick": "5m"})
    brokers.refuses = lambda partition, batch: (
        refuse_secrets(partition, batch) or refuse_large(partition, batch)
    )
    due = clock.now_ms() + SECOND
    large = await running.send([(b"large %d" % i, due + 9 - i) for i in range(9)])
    secrets = await running.send([(b"secret", due + 100)], "secrets")
    await running.send([(b"fine", due)])
    later = await running.send([(b"large, later", due + 6 * MINUTE)])
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 10)
    clock.advance(6 * MINUTE)
    await eventually(lambda: stuck(running) == 11)
    assert await running.cancel((large[3], due + 6)) == [Fate.CANCELLED]

    whole = await running.stuck(StuckMessages())
    ids = [*reversed(large[4:]), *reversed(large[:3]), *secrets, *later]
    assert [each.id for each in whole.messages] == ids
    reasons = [each.reason for each in whole.messages]
    assert (reasons[8], {*reasons[:8], reasons[9]}) == ("no such subject", {"too large"})
    first = whole.messages[0]
    assert (first.due_ms, first.partition, first.size) == (due + 1, "orders", len(b"large 8"))
    assert whole.next == b""
    pages, after = [], b""
    for _ in range(4):
        page = await running.stuck(StuckMessages("", 3, after))
        pages.append([each.id for each in page.messages])
        after = page.next
    assert (pages, after) == ([ids[:3], ids[3:6], ids[6:9], ids[9:]], b"")
    of_one = await running.stuck(StuckMessages("secrets", 3))
    assert [each.id for each in of_one.messages] == secrets
    for nonsense in (StuckMessages("not a subject"), StuckMessages(after=b"?")):
        with pytest.raises(PulqueError):
            await running.stuck(nonsense)


async def test_what_is_stuck_is_tried_again_after_a_while(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.refuses = refuse_large
    await running.send([(b"large", clock.now_ms() + SECOND)])
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 1)
    brokers.refuses = lambda _, __: None
    clock.advance(11 * 60 * SECOND)
    await eventually(lambda: brokers.bodies == [b"large"])

    assert stuck(running) == 0


async def test_what_is_stuck_is_tried_again_after_a_restart(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    brokers.refuses = refuse_large
    await running.send([(b"large", clock.now_ms() + SECOND), (b"fine", clock.now_ms() + SECOND)])
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 1)
    clock.advance(3 * HOUR)
    await running.checkpointed()
    assert len(running.schedule("*.log")) == 1, "its tick must stay"
    brokers.refuses = lambda _, __: None
    await start_delay()
    await eventually(lambda: len(brokers.accepted) == 2)

    assert sorted(brokers.bodies) == [b"fine", b"large"]


async def test_what_was_refused_before_a_power_cut_is_sent_under_a_new_number(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    """A broker knows the last 64 numbers: it would take the old one for a batch that it has."""
    files = MemoryFileSystem()
    running = await start_delay(files=files, delivery={"batch_messages": 1})
    brokers.refuses = refuse_large
    hour = clock.now_ms() - clock.now_ms() % HOUR + HOUR
    clock.set_now_ms(hour - 5 * SECOND)
    await running.send([(b"large", hour - 4 * SECOND)])
    clock.advance(2 * SECOND)
    await eventually(lambda: stuck(running) == 1)
    clock.advance(4 * SECOND)
    await running.send([(b"%d" % i, hour + 2 * SECOND) for i in range(70)])
    clock.advance(2 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 70)
    await eventually(lambda: running.server.is_idle)
    left = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    brokers.refuses = lambda _, __: None

    running = await start_delay(files=left)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert brokers.bodies.count(b"large") == 1

"""Whoever looks into a tick, or loads one, keeps neither senders nor what is due waiting."""

import asyncio
from threading import Event, current_thread

import pytest

from pulque.errors import DisconnectedError
from pulque.storage.files import File
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import RawConnection
from pulque.wire.delay import ANY_DUE, Fate, Listing, Scheduled, ScheduledListed
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.delay.running import (
    FakeBrokers,
    RunningDelay,
    StartDelay,
    delayed_batch,
    eventually,
)

SECOND = 1000
HOUR = 3_600_000
MINUTE = 60 * SECOND


class SlowRead(MemoryFileSystem):
    """The first who reads a file after it was told to be slow does so until released."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        """How the file's name ends."""
        self.has_begun = Event()
        self.released = Event()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if self.slow and not writable and path.endswith(self.slow):
            self.wait()
        return super().open(path, create=create, writable=writable)

    def wait(self) -> None:
        self.slow = ""
        self.has_begun.set()
        assert self.released.wait(30)


NEXT_HOUR = "16T1000Z.log"
TOMORROW = "17T1000Z.log"


class SlowNotes(SlowRead):
    """The same, for whoever is about to read a dispatch log in the thread of schedule logs."""

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        is_there = current_thread().name.startswith("pulque-schedule")
        if self.slow and path.endswith(self.slow) and is_there:
            self.wait()
        return found


@pytest.fixture
def files() -> SlowRead:
    return SlowRead()


def next_hour(clock: ManualClock) -> int:
    return clock.now_ms() - clock.now_ms() % HOUR + HOUR


def in_memory(running: RunningDelay) -> int:
    found: int = running.server.status()["schedule"]["in_memory"]
    return found


@pytest.mark.parametrize("listing", [Listing.NEXT, Listing.COUNTS, Listing.ONE])
async def test_messages_are_taken_while_somebody_looks(
    start_delay: StartDelay, clock: ManualClock, files: SlowRead, listing: Listing
) -> None:
    running = await start_delay(files=files)
    due = clock.now_ms() + HOUR
    (known,) = await running.send([(b"known", due)])
    await running.checkpointed()
    files.slow = NEXT_HOUR
    asking = await RawConnection.open(running.server.url)
    request = Scheduled(listing, id=known, from_ms=ANY_DUE if listing is Listing.ONE else 0)
    looking = asyncio.create_task(asking.ask(request, ScheduledListed))
    await eventually(files.has_begun.is_set)

    await running.send([(b"new", due)])
    await running.caught_up()
    assert not looking.done()

    files.released.set()
    found = await looking
    assert found.counts or found.messages
    asking.close()


async def test_what_is_due_is_not_kept_waiting_by_the_next_tick(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, files: SlowRead
) -> None:
    running = await start_delay(files=files)
    hour = next_hour(clock)
    await running.send([(b"this hour", hour - 30 * SECOND), (b"next hour", hour + SECOND)])
    (cancelled,) = await running.send([(b"cancelled", hour + SECOND)])
    (moved,) = await running.send([(b"moved", hour + SECOND)])
    await running.checkpointed()
    files.slow = NEXT_HOUR
    clock.set_now_ms(hour - 50 * SECOND)
    clock.advance(5 * SECOND)
    await eventually(files.has_begun.is_set)

    clock.advance(20 * SECOND)
    await eventually(lambda: brokers.bodies == [b"this hour"])
    await running.send([(b"new", hour + 2 * SECOND)])
    await running.caught_up()
    assert await running.cancel((cancelled, hour + SECOND)) == [Fate.CANCELLED]
    assert await running.move((moved, hour + SECOND, hour + 3 * SECOND)) == [Fate.MOVED]
    assert in_memory(running) == 1

    files.released.set()
    await eventually(lambda: in_memory(running) == 2)
    clock.set_now_ms(hour + 10 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 4)
    await eventually(lambda: running.server.is_idle)
    assert brokers.bodies[1:] == [b"next hour", b"new", b"moved"]


async def test_what_is_cancelled_while_its_tick_is_loaded_does_not_come(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = SlowNotes()
    running = await start_delay(files=files)
    hour = next_hour(clock)
    cancelled, _ = await running.send([(b"cancelled", hour + SECOND), (b"other", hour + SECOND)])
    await running.checkpointed()
    files.slow = ".dispatch"
    clock.set_now_ms(hour - 50 * SECOND)
    await eventually(files.has_begun.is_set)

    assert await running.cancel((cancelled, hour + SECOND)) == [Fate.CANCELLED]
    files.released.set()
    await eventually(lambda: in_memory(running) == 1)
    clock.set_now_ms(hour + 10 * SECOND)
    await eventually(lambda: b"other" in brokers.bodies)
    await eventually(lambda: running.server.is_idle)
    assert brokers.bodies == [b"other"]


async def test_a_tick_that_goes_waits_for_those_who_look_and_nobody_for_it(  # noqa: PLR0915
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, files: SlowRead
) -> None:
    running = await start_delay(files=files)
    hour = next_hour(clock)
    await running.send([(b"this hour", clock.now_ms() + SECOND)])
    await running.send([(b"tomorrow", hour + 24 * HOUR + SECOND)])
    clock.advance(2 * SECOND)
    await eventually(lambda: brokers.bodies == [b"this hour"])
    clock.set_now_ms(hour + HOUR)
    await eventually(lambda: running.server.is_idle)
    await running.checkpointed()
    files.slow = TOMORROW
    asking = await RawConnection.open(running.server.url)
    request = Scheduled(Listing.NEXT, from_ms=hour + 20 * HOUR)
    looking = asyncio.create_task(asking.ask(request, ScheduledListed))
    await eventually(files.has_begun.is_set)
    going = asyncio.create_task(running.server.checkpoint())
    await eventually(lambda: running.server.status()["checkpoints"] == 2)

    await running.send([(b"new", hour + 24 * HOUR + SECOND)])
    await running.caught_up()
    clock.advance(3 * SECOND)  # the dispatcher looks once more which ticks it should have
    await asyncio.sleep(0.2)
    assert not going.done()

    files.released.set()
    await looking
    await going
    asking.close()
    assert in_memory(running) == 0
    assert running.server.status()["removed_ticks"] == 1
    clock.advance(3 * SECOND)
    await asyncio.sleep(0.2)
    assert await running.send([(b"late", clock.now_ms() - SECOND)])
    await eventually(lambda: brokers.bodies == [b"this hour", b"late"])


async def test_messages_of_several_partitions_that_come_together_keep_their_times_and_ids(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay(files=MemoryFileSystem())
    now = clock.now_ms()
    await running.send([(b"loads the tick", now + MINUTE)])
    await eventually(lambda: in_memory(running) == 1)
    sent: list[tuple[str, bytes]] = []
    tickets = []
    for number, name in enumerate(("one", "two", "three")):
        messages = [(b"%s %d" % (name.encode(), i), now + (i + 1) * SECOND) for i in range(4)]
        batch, ids = delayed_batch(messages, name, first_id=100 * (number + 1))
        sent.append((name, batch))
        tickets.append((ids[number], messages[number][1]))
    outcomes = (await running.raw.ask(Send(Acks.DISK, 10_000, tuple(sent)), Sent)).outcomes
    assert not any(outcome.code for outcome in outcomes)
    await running.caught_up()
    assert await running.cancel(*tickets) == [Fate.CANCELLED] * 3

    for i, left in enumerate(({"two", "three"}, {"one", "three"}, {"one", "two"})):
        clock.set_now_ms(now + (i + 1) * SECOND)
        await eventually(lambda i=i: len(brokers.accepted) == 2 * (i + 1))  # type: ignore[misc]
        newest = brokers.accepted[-2:]
        assert {each.partition for each in newest} == left
        assert {each.body for each in newest} == {b"%s %d" % (n.encode(), i) for n in left}


async def test_what_was_on_its_way_goes_before_anything_new(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, files: SlowRead
) -> None:
    one_by_one = {"batch_messages": 1}
    running = await start_delay(files=files, delivery=one_by_one)
    hour = next_hour(clock)
    clock.set_now_ms(hour + SECOND)
    brokers.refuses = lambda *_: DisconnectedError("away")
    await running.send([(b"keeps its tick", hour - SECOND)], "other")
    await eventually(lambda: len(brokers.batches) == 1)
    await running.send([(b"on its way", hour + SECOND)])
    await eventually(lambda: "orders" in [partition for _, partition, _ in brokers.batches])
    await running.close()  # its batch is written down, and no broker has it
    brokers.refuses = lambda *_: None
    files.slow = NEXT_HOUR
    running = await start_delay(files=files, delivery=one_by_one)
    await eventually(files.has_begun.is_set)
    late = [b"late %d" % i for i in range(70)]  # a broker knows the last 64 numbers
    await running.send([(body, hour - 500) for body in late])
    await running.caught_up()
    await asyncio.sleep(0.2)
    assert b"late 0" not in brokers.bodies

    files.released.set()
    await eventually(lambda: len(brokers.accepted) == 72)
    assert sorted(brokers.bodies) == sorted([*late, b"keeps its tick", b"on its way"])


async def test_damage_at_the_end_of_a_tick_is_told_once_when_it_is_loaded(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = await start_delay()
    hour = next_hour(clock)
    for body in (b"whole", b"damaged"):
        await running.send([(body, hour + SECOND)])
        await running.caught_up()
    await running.checkpointed()
    (path,) = running.schedule("*Z.log")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    clock.set_now_ms(hour - 50 * SECOND)
    await eventually(lambda: in_memory(running) == 1)
    clock.set_now_ms(hour + 2 * SECOND)
    await eventually(lambda: brokers.bodies == [b"whole"])

    assert capsys.readouterr().out.count("corruption_found") == 1

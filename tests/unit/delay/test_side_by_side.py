"""Whoever looks into a tick, or loads one, keeps neither senders nor what is due waiting."""

import asyncio
from threading import Event

import pytest

from pulque.storage.files import File
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import RawConnection
from pulque.wire.delay import ANY_DUE, Fate, Listing, Scheduled, ScheduledListed
from tests.unit.delay.running import FakeBrokers, StartDelay, eventually

SECOND = 1000
HOUR = 3_600_000
LATER = "T1000Z.log"
"""The tick after the one that it is."""


class SlowRead(MemoryFileSystem):
    """The first who reads a schedule log after it was told to be slow does so until released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slow = False
        self.has_begun = Event()
        self.released = Event()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if self.is_slow and not writable and path.endswith(LATER):
            self.is_slow = False
            self.has_begun.set()
            assert self.released.wait(30)
        return super().open(path, create=create, writable=writable)


@pytest.fixture
def files() -> SlowRead:
    return SlowRead()


@pytest.mark.parametrize("listing", [Listing.NEXT, Listing.COUNTS, Listing.ONE])
async def test_messages_are_taken_while_somebody_looks(
    start_delay: StartDelay, clock: ManualClock, files: SlowRead, listing: Listing
) -> None:
    running = await start_delay(files=files)
    due = clock.now_ms() + HOUR
    (known,) = await running.send([(b"known", due)])
    await running.checkpointed()
    files.is_slow = True
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
    hour = clock.now_ms() - clock.now_ms() % HOUR + HOUR
    await running.send([(b"this hour", hour - 30 * SECOND), (b"next hour", hour + SECOND)])
    (cancelled,) = await running.send([(b"cancelled", hour + SECOND)])
    (moved,) = await running.send([(b"moved", hour + SECOND)])
    await running.checkpointed()
    files.is_slow = True
    clock.set_now_ms(hour - 50 * SECOND)
    clock.advance(5 * SECOND)
    await eventually(files.has_begun.is_set)

    clock.advance(20 * SECOND)
    await eventually(lambda: brokers.bodies == [b"this hour"])
    await running.send([(b"new", hour + 2 * SECOND)])
    await running.caught_up()
    assert await running.cancel((cancelled, hour + SECOND)) == [Fate.CANCELLED]
    assert await running.move((moved, hour + SECOND, hour + 3 * SECOND)) == [Fate.MOVED]
    assert running.server.status()["schedule"]["in_memory"] == 1

    files.released.set()
    await eventually(lambda: running.server.status()["schedule"]["in_memory"] == 2)
    clock.set_now_ms(hour + 10 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 4)
    await eventually(lambda: running.server.is_idle)
    assert brokers.bodies[1:] == [b"next hour", b"new", b"moved"]

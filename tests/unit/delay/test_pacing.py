"""Sends come faster than they can be put into the schedule: their answers wait."""

import asyncio
from threading import Event

from pulque.errors import StorageFullError
from pulque.storage.files import File
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.delay.running import RunningDelay, StartDelay, delayed_batch, eventually

MIB = 1024 * 1024
SENDS = 16
HOUR = 3_600_000


class HeldFiles(MemoryFileSystem):
    """Schedule logs cannot be opened for writing until somebody lets them, or have no room."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = Event()
        self.is_full = False

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if create and path.endswith("Z.log"):
            if self.is_full:
                raise StorageFullError("there is no room for it")
            self.may_go.wait(20)
        return super().open(path, create=create, writable=writable)


async def put_all(running: RunningDelay, clock: ManualClock) -> list[int]:
    """Send batches of a MiB each, without waiting; return the numbers of the requests."""
    numbers = []
    for i in range(SENDS):
        dues = [(b"x" * (MIB // 2), clock.now_ms() + HOUR + i)] * 2
        batch, _ = delayed_batch(dues, first_id=2 * i)
        numbers.append(await running.raw.put(Send(Acks.MEMORY, 10_000, (("orders", batch),))))
    return numbers


async def answers_of(running: RunningDelay, numbers: list[int]) -> list[Sent]:
    found = [await running.raw.answer_to(number) for number in numbers]
    return [each for each in found if isinstance(each, Sent)]


async def test_answers_wait_while_much_waits_for_the_schedule(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    files = HeldFiles()
    running = await start_delay(files=files)
    files.may_go.set()
    # Where there are many ticks, this is the work of a thread, which can be held.
    await running.send([(b"x", clock.now_ms() + i * HOUR) for i in range(1, 25)])
    await running.caught_up()
    files.may_go.clear()
    numbers = await put_all(running, clock)
    await eventually(lambda: running.server.status()["received"]["batches"] == SENDS + 1)
    first, *_ = await answers_of(running, numbers[:4])
    waiting = asyncio.create_task(answers_of(running, numbers[4:]))
    done, _ = await asyncio.wait([waiting], timeout=0.1)

    assert not first.outcomes[0].code
    assert not done, "all are answered, though none of them is in the schedule"
    files.may_go.set()
    answers = await waiting
    assert [each.outcomes[0].code for each in answers] == [0] * (SENDS - 4)
    await running.caught_up()
    assert running.server.status()["schedule"]["messages"] == 24 + 2 * SENDS


async def test_answers_do_not_wait_for_room(start_delay: StartDelay, clock: ManualClock) -> None:
    files = HeldFiles()
    files.is_full = True
    running = await start_delay(files=files)

    answers = await answers_of(running, await put_all(running, clock))

    assert [each.outcomes[0].code for each in answers] == [0] * SENDS
    files.is_full = False
    files.may_go.set()
    await running.caught_up()
    assert running.server.status()["schedule"]["messages"] == 2 * SENDS

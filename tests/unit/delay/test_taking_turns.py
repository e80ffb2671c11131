"""Who changes very many messages lets others change theirs in between."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect
from pulque.wire.delay import (
    ANY_DUE,
    Cancel,
    Cancelled,
    Fate,
    Move,
    Reschedule,
    Rescheduled,
    Ticket,
)
from tests.unit.broker.disks import GatedDisk
from tests.unit.delay.running import FakeBrokers, StartDelay, eventually
from tests.unit.delay.test_side_by_side import SlowRead

HOUR = 3_600_000
FAR = 30 * 24 * HOUR
"""So far ahead that the tick is not in memory."""
MANY = 200

Change = Callable[[list[bytes], int], Cancel | Reschedule]


def a_cancel(ids: list[bytes], due_ms: int) -> Cancel:
    return Cancel(tuple(Ticket(each, due_ms) for each in ids))


def a_move(ids: list[bytes], due_ms: int) -> Reschedule:
    return Reschedule(tuple(Move(each, due_ms, due_ms + HOUR) for each in ids))


class SlowGatedDisk(SlowRead, GatedDisk):
    """A disk on which one read is slow, and whose syncs wait for a gate to open."""


@pytest.fixture
def disk() -> Iterator[SlowGatedDisk]:
    """A disk that is not in the way of whoever stops; asked for behind all that use it."""
    found = SlowGatedDisk()
    yield found
    found.released.set()
    found.open_gate()


@pytest.mark.parametrize("requests", [1, MANY])
@pytest.mark.parametrize("change", [a_cancel, a_move])
async def test_a_client_changes_a_message_before_another_has_changed_all_of_its_own(
    start_delay: StartDelay, clock: ManualClock, change: Change, requests: int
) -> None:
    running = await start_delay()
    due_ms = clock.now_ms() + HOUR
    ids = await running.send([(b"x", due_ms)] * (MANY + 1))
    await running.caught_up()
    answered: list[str] = []

    async def note(raw: RawConnection, asked: list[int], who: str) -> None:
        for each in asked:
            await raw.answer_to(each)
            answered.append(who)

    greedy, each = running.raw, MANY // requests
    modest = await RawConnection.open(running.server.url)
    some = [await greedy.put(change(ids[at : at + each], due_ms)) for at in range(0, MANY, each)]
    one = await modest.put(change(ids[-1:], due_ms))
    await asyncio.gather(note(modest, [one], "modest"), note(greedy, some, "greedy"))
    modest.close()

    # One message of the greedy one's was changed first, and one as the modest one waited.
    assert answered.index("modest") < min(requests, 3)


@pytest.mark.parametrize("change", [a_cancel, a_move])
async def test_that_another_cancelled_a_message_is_said_once_it_is_on_disk(
    start_delay: StartDelay, clock: ManualClock, disk: GatedDisk, change: Change
) -> None:
    running = await start_delay(files=disk, storage={"sync_interval": "1m"})
    due_ms = clock.now_ms() + FAR
    ids = await running.send([(b"x", due_ms)] * 2)
    await running.caught_up()
    others = [await RawConnection.open(running.server.url) for _ in range(2)]
    disk.close_gate()
    # What is being written holds up what comes next: that is in no file yet.
    await running.raw.put(a_cancel(ids[:1], due_ms))
    await eventually(lambda: disk.syncs_waiting > 0)
    first = await others[0].put(a_cancel(ids[1:], due_ms))
    await eventually(lambda: running.server.status()["changed"]["cancelled"] == 2)
    second = await others[1].put(change(ids[1:], due_ms))

    assert not await others[1].is_answered(second)
    disk.open_gate()
    assert expect(await others[0].answer_to(first), Cancelled).fates == (Fate.CANCELLED,)
    answer = await others[1].answer_to(second)
    assert getattr(answer, "fates", ()) == (Fate.ALREADY_CANCELLED,)
    for each in others:
        each.close()


async def test_a_cancel_that_is_written_while_another_client_looks_holds(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, disk: SlowGatedDisk
) -> None:
    """The other has read the dispatch log before the cancel was in it, and is not done yet."""
    running = await start_delay(files=disk, storage={"sync_interval": "1m"})
    due_ms = clock.now_ms() + FAR
    (cancelled,) = await running.send([(b"cancelled", due_ms)])
    await running.send([(b"other", due_ms + 2 * HOUR)])
    await running.caught_up()
    other = await RawConnection.open(running.server.url)
    disk.close_gate()
    cancelling = await running.raw.put(a_cancel([cancelled], due_ms))
    await eventually(lambda: disk.syncs_waiting > 0)
    # Looked for everywhere: the tick of the other message comes after its own.
    disk.slow = max(path for path in disk.contents() if path.endswith("Z.log"))
    moving = await other.put(Reschedule((Move(cancelled, ANY_DUE, due_ms + HOUR),)))
    await eventually(disk.has_begun.is_set)

    disk.open_gate()
    answer = await running.raw.answer_to(cancelling)
    assert expect(answer, Cancelled).fates == (Fate.CANCELLED,)
    disk.released.set()
    answer = await other.answer_to(moving)
    assert expect(answer, Rescheduled).fates == (Fate.ALREADY_CANCELLED,)
    other.close()
    clock.set_now_ms(due_ms + 3 * HOUR)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert brokers.bodies == [b"other"]

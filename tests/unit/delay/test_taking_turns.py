"""Who changes very many messages lets others change theirs in between."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect
from pulque.wire.delay import Cancel, Cancelled, Fate, Move, Reschedule, Ticket
from tests.unit.broker.disks import GatedDisk
from tests.unit.delay.running import StartDelay, eventually

HOUR = 3_600_000
FAR = 30 * 24 * HOUR
"""So far ahead that the tick is not in memory."""
MANY = 200

Change = Callable[[list[bytes], int], Cancel | Reschedule]


def a_cancel(ids: list[bytes], due_ms: int) -> Cancel:
    return Cancel(tuple(Ticket(each, due_ms) for each in ids))


def a_move(ids: list[bytes], due_ms: int) -> Reschedule:
    return Reschedule(tuple(Move(each, due_ms, due_ms + HOUR) for each in ids))


@pytest.fixture
def disk() -> Iterator[GatedDisk]:
    """A disk that is not in the way of whoever stops; asked for behind all that use it."""
    found = GatedDisk()
    yield found
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

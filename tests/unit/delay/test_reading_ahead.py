"""Messages that are due soon are read in advance, many at once, and come as if they were not."""

from random import Random

import pytest

from pulque.delay.dispatch import read_ahead as shelf
from pulque.delay.schedule import entries as placing
from pulque.storage.schedule.schedule_log import TickFile
from pulque.testing.clock import ManualClock
from pulque.wire.delay import Fate
from tests.unit.delay.running import FakeBrokers, RunningDelay, StartDelay, eventually

SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each read of a schedule log asked for."""
    found: list[int] = []
    read = TickFile.read

    def counted(self: TickFile, places: list[tuple[int, int]]) -> object:
        found.append(len(places))
        return read(self, places)

    monkeypatch.setattr(TickFile, "read", counted)
    return found


def spread(count: int, start_ms: int, over_ms: int) -> list[tuple[bytes, int]]:
    """Return messages that are due over some time, in another order than they are sent in."""
    dues = [start_ms + i * over_ms // count for i in range(count)]
    return [(b"%d" % due, due) for due in dues[1::2] + dues[::2]]


def read_ahead(running: RunningDelay) -> int:
    found: int = running.server.status()["dispatch"]["read_ahead"]
    return found


async def read(running: RunningDelay, reads: list[int]) -> None:
    """Wait until what was sent is in the schedule, and what is due soon was read."""
    await running.caught_up()
    await eventually(lambda: bool(reads) and running.server.is_idle)


async def pass_by(clock: ManualClock, brokers: FakeBrokers, until_ms: int, due: list[int]) -> None:
    """Let time go by a tenth of a second at a time, and wait for what is due by then."""
    while clock.now_ms() < until_ms:
        clock.advance(100)
        count = sum(1 for each in due if -(-each // 100) * 100 <= clock.now_ms())
        await eventually(lambda count=count: len(brokers.accepted) >= count)  # type: ignore[misc]


async def test_an_entry_is_read_once_for_messages_that_are_due_one_after_the_other(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, reads: list[int]
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 2 * SECOND
    messages = spread(200, start, 8 * SECOND)
    await running.send(messages)
    await read(running, reads)
    await pass_by(clock, brokers, start + 9 * SECOND, [due for _, due in messages])

    assert brokers.bodies == sorted(body for body, _ in messages)
    assert all(int(each.body) <= each.at_ms for each in brokers.accepted)
    assert read_ahead(running) == 200
    assert len(reads) < 10


async def test_what_is_cancelled_or_moved_after_it_was_read_does_not_come(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, reads: list[int]
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 5 * SECOND
    messages = spread(200, start, 2 * SECOND)
    ids = await running.send(messages)
    await read(running, reads)
    tickets = list(zip(ids, [due for _, due in messages], strict=True))
    assert await running.cancel(*tickets[:50]) == [Fate.CANCELLED] * 50
    later = start + 10 * SECOND
    assert await running.move(*[(*each, later) for each in tickets[50:60]]) == [Fate.MOVED] * 10
    clock.advance(start + 3 * SECOND - clock.now_ms())
    await eventually(lambda: len(brokers.accepted) == 140)
    clock.advance(later - clock.now_ms())
    await eventually(lambda: len(brokers.accepted) == 150)
    await eventually(lambda: running.server.is_idle)

    assert sorted(brokers.bodies[:140]) == sorted(body for body, _ in messages[60:])
    assert sorted(brokers.bodies[140:]) == sorted(body for body, _ in messages[50:60])
    assert read_ahead(running) >= 140


@pytest.mark.parametrize(("count", "is_ahead"), [(100, False), (1500, True)])
async def test_what_comes_for_a_time_that_was_read_already_is_in_time(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    reads: list[int],
    count: int,
    is_ahead: bool,  # noqa: FBT001
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 5 * SECOND
    first = spread(200, start, 2 * SECOND)
    await running.send(first)
    await read(running, reads)
    second = spread(count, start + 50, 2 * SECOND)
    await running.send(second)
    await running.caught_up()
    before = len(reads)
    clock.advance(2 * SECOND + 100)  # so often it looks for what is new
    if is_ahead:
        await eventually(lambda: len(reads) > before)
    due = [due for _, due in [*first, *second]]
    await pass_by(clock, brokers, start + 3 * SECOND, due)

    assert brokers.bodies == sorted(body for body, _ in [*first, *second])
    assert (read_ahead(running) > 200) is is_ahead


async def test_what_the_shelf_has_no_room_for_comes_all_the_same(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shelf, "_FILL_BYTES", 20_000)
    monkeypatch.setattr(shelf, "_MOST_BYTES", 40_000)
    running = await start_delay()
    start = clock.now_ms() + 5 * SECOND
    messages = [*spread(500, start, 4 * SECOND), *[(b"%d" % start, start)] * 500]
    await running.send(messages)
    await running.caught_up()
    await pass_by(clock, brokers, start + 5 * SECOND, [due for _, due in messages])

    assert brokers.bodies == sorted(body for body, _ in messages)
    assert 0 < (before := read_ahead(running)) < len(messages)
    start = clock.now_ms() + 30 * SECOND
    again = spread(100, start, SECOND)
    await running.send(again)
    await running.caught_up()
    due = [due for _, due in [*messages, *again]]
    await pass_by(clock, brokers, start + 2 * SECOND, due)
    assert read_ahead(running) > before, "there is room again"


async def test_a_clock_that_is_set_back_has_its_messages_read_ahead_again(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, reads: list[int]
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 12 * SECOND
    messages = spread(200, start, 2 * SECOND)
    await running.send(messages)
    await read(running, reads)
    clock.set_now_ms(start - 5 * MINUTE)  # still in the same tick
    await eventually(lambda: running.server.status()["dispatch"]["clock_steps"] == 1)
    later = spread(200, clock.now_ms() + 25 * SECOND, 2 * SECOND)
    await running.send(later)
    await running.caught_up()
    before = len(reads)
    clock.advance(15 * SECOND)
    await eventually(lambda: len(reads) > before)
    await pass_by(clock, brokers, clock.now_ms() + 15 * SECOND, [due for _, due in later])

    assert brokers.bodies == sorted(body for body, _ in later)
    assert read_ahead(running) == 200


async def test_what_is_overdue_is_read_together(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, reads: list[int]
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 10 * MINUTE
    messages = spread(600, start, 30 * MINUTE)
    await running.send(messages)
    await running.close()
    clock.set_now_ms(start + HOUR)
    running = await start_delay()
    await eventually(lambda: len(brokers.accepted) == 600)

    assert brokers.bodies == sorted(body for body, _ in messages)
    assert len(reads) < 30


async def test_damage_takes_one_entry_of_those_that_are_read_ahead(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    start = clock.now_ms() + 30 * SECOND
    for turn in range(3):
        await running.send([(b"%d/%d" % (turn, i), start + i * 10) for i in range(100)])
        await running.caught_up()  # so that each has an entry of its own
    await running.checkpointed()
    (file,) = running.schedule("*.log")
    data = bytearray(file.read_bytes())
    data[data.find(b"1/50")] ^= 1
    file.write_bytes(data)
    clock.set_now_ms(start - SECOND)
    await pass_by(clock, brokers, start + 2 * SECOND, [])
    await eventually(lambda: len(brokers.accepted) == 200)

    assert sorted(brokers.bodies) == sorted(
        b"%d/%d" % (turn, i) for turn in (0, 2) for i in range(100)
    )
    assert running.server.status()["dispatch"]["lost"] == 100


async def test_whatever_is_read_ahead_each_message_comes_once_and_whole(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    sizes = {"FILL_BYTES": 4000, "MOST_BYTES": 16_000, "WORTH_READING": 2, "MANY_NEW": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(shelf, f"_{name}", size)
    monkeypatch.setattr(placing, "_WORTH_WINDOWS", 1)
    random = Random(seed)
    running = await start_delay(schedule={"tick": "5m"})
    sent: dict[bytes, tuple[bytes, int]] = {}
    cancelled: set[bytes] = set()
    for turn in range(60):
        now = clock.now_ms()
        dues = [now + random.randrange(30 * SECOND) for _ in range(random.randrange(1, 40))]
        messages = [(b"%d/%d" % (turn, i), due) for i, due in enumerate(dues)]
        subject = random.choice(("orders", "refunds"))
        ids = await running.send(messages, subject)
        sent |= dict(zip(ids, messages, strict=True))
        wanted = random.sample(sorted(sent), min(len(sent), 3))
        fates = await running.cancel(*[(each, sent[each][1]) for each in wanted])
        cancelled |= {
            each for each, fate in zip(wanted, fates, strict=True) if fate is not Fate.TOO_LATE
        }
        clock.advance(random.randrange(2 * SECOND))
    clock.advance(40 * SECOND)
    await eventually(lambda: len(brokers.accepted) >= len(sent) - len(cancelled))
    await eventually(lambda: running.server.is_idle)

    found = [(bytes.fromhex(each.id.replace("-", "")), each) for each in brokers.accepted]
    assert sorted(each for each, _ in found) == sorted(sent.keys() - cancelled)
    for message_id, each in found:
        body, due = sent[message_id]
        assert each.body == body
        assert each.at_ms >= due
    assert read_ahead(running) > 100

"""Damaged files of a delay server cost no other message, and what they cost is told."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from pulque.errors import NotAllowedError
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.delay import Cancel, Fate, Ticket
from pulque.wire.requests import Acks
from tests.unit.broker.disks import GatedDisk
from tests.unit.delay.running import FakeBrokers, RunningDelay, StartDelay, eventually

SECOND = 1000
HOUR = 3_600_000


def left_by(files: MemoryFileSystem) -> MemoryFileSystem:
    """Return what a killed server leaves."""
    return files.after_power_cut(files.operations, Cut.KEPT, Random(1))


def only(files: MemoryFileSystem, suffix: str) -> str:
    (path,) = [path for path in files.contents() if path.endswith(suffix)]
    return path


def replace(files: MemoryFileSystem, path: str, content: bytes) -> None:
    file = files.open(path)
    file.truncate(0)
    file.write([content], 0)
    file.close()


def flip(files: MemoryFileSystem, path: str, at: int) -> None:
    content = bytearray(files.contents()[path])
    content[at] ^= 1
    replace(files, path, bytes(content))


def remove_newest_checkpoint(files: MemoryFileSystem) -> None:
    files.remove(newest_checkpoint(files))


def flip_newest_checkpoint(files: MemoryFileSystem) -> None:
    flip(files, newest_checkpoint(files), -3)


def newest_checkpoint(files: MemoryFileSystem) -> str:
    return max(path for path in files.contents() if path.endswith(".checkpoint"))


def remove_checkpoints(files: MemoryFileSystem) -> None:
    for path in files.contents():
        if path.endswith(".checkpoint"):
            files.remove(path)


def damaged(running: RunningDelay) -> int:
    return int(running.server.status()["schedule"]["damaged"])


async def send_due(running: RunningDelay, clock: ManualClock, body: bytes) -> None:
    """Send a message, and wait until it was delivered."""
    await running.send([(body, clock.now_ms() + SECOND)])
    await running.caught_up()
    clock.advance(2 * SECOND)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)


@pytest.mark.parametrize("is_gone", [False, True], ids=["emptied", "gone"])
async def test_what_is_sent_for_a_tick_that_lost_its_log_is_delivered(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, *, is_gone: bool
) -> None:
    """Its dispatch log says of places in the old log that they were cancelled."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + 3 * HOUR
    (first,) = await running.send([(b"cancelled", due)])
    await running.send([(b"lost", due)])
    await running.caught_up()
    assert await running.cancel((first, due)) == [Fate.CANCELLED]
    await running.close()
    files = left_by(files)
    path = only(files, "Z.log")
    if is_gone:
        files.remove(path)
    else:
        replace(files, path, b"")
    running = await start_delay(files=files)
    assert damaged(running) == 1
    await running.send([(b"new", due)])
    await running.caught_up()

    await start_delay(files=files)
    clock.advance(4 * HOUR)
    await eventually(lambda: brokers.bodies == [b"new"])


async def test_a_log_that_is_given_its_name_back_is_as_it_was(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    due = clock.now_ms() + HOUR
    cancelled, _ = await running.send([(b"cancelled", due), (b"kept", due)])
    await running.caught_up()
    assert await running.cancel((cancelled, due)) == [Fate.CANCELLED]
    await running.close()
    (path,) = running.schedule("*.log")
    path.rename(path.with_name("20261116T0900Z.log"))
    running = await start_delay()
    assert damaged(running) == 2
    await running.close()
    (kept,) = running.schedule("*.misnamed")
    kept.rename(path)

    running = await start_delay()
    assert damaged(running) == 0
    clock.advance(2 * HOUR)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert brokers.bodies == [b"kept"]


@pytest.mark.parametrize("lost", ["dispatch log", "checkpoints"])
async def test_a_number_that_a_broker_knows_is_not_given_to_another_batch(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, lost: str
) -> None:
    """The broker would take it for the batch that it has, and store nothing."""
    files = MemoryFileSystem()
    running = await start_delay(storage={"segment_size": "64KiB"}, files=files)
    await send_due(running, clock, b"first")
    if lost == "checkpoints":
        clock.advance(3 * HOUR)
        for _ in range(2):
            await running.send([(b"x" * 60_000, clock.now_ms() + 20 * HOUR)])
        await running.checkpointed()
        await running.checkpointed()
        assert running.server.status()["removed_ticks"] == 1
    await running.send([(b"second", clock.now_ms() + SECOND)])
    await running.caught_up()
    files = left_by(files)
    if lost == "checkpoints":
        remove_checkpoints(files)
    else:
        flip(files, only(files, ".dispatch"), 20)
    clock.advance(20 * SECOND)

    running = await start_delay(files=files)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert b"second" in brokers.bodies
    for _ in range(2):  # also after a start that had nothing to send
        running = await start_delay(files=files)
    await send_due(running, clock, b"third")
    assert b"third" in brokers.bodies


@pytest.mark.parametrize("count", [1, 2], ids=["files are there", "files are removed"])
@pytest.mark.parametrize("damage", [flip_newest_checkpoint, remove_newest_checkpoint])
async def test_an_older_checkpoint_delivers_nothing_twice(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    damage: Callable[[MemoryFileSystem], None],
    count: int,
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await running.checkpointed()
    await send_due(running, clock, b"over")
    clock.advance(3 * HOUR)
    for _ in range(count):
        await running.checkpointed()
    assert running.server.status()["removed_ticks"] == count - 1
    files = left_by(files)
    damage(files)

    running = await start_delay(files=files)
    assert damaged(running) == 0
    await send_due(running, clock, b"new")
    assert brokers.bodies == [b"over", b"new"]


@pytest.mark.parametrize("size", [5, 5000, 9000], ids=["smaller", "equal", "larger"])
async def test_an_older_checkpoint_doubles_nothing_of_a_tick_that_came_back(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, size: int
) -> None:
    """It knows how large the files of the tick were, and these were removed since."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await running.checkpointed()
    over, late = b"o" * 5000, b"l" * size
    await send_due(running, clock, over)
    hour = clock.now_ms() - clock.now_ms() % HOUR + HOUR
    clock.set_now_ms(hour + SECOND)
    for _ in range(2):
        await running.checkpointed()
    assert running.server.status()["removed_ticks"] == 1
    await running.send([(late, hour - SECOND)])
    await running.caught_up()
    await eventually(lambda: brokers.bodies == [over, late])
    await eventually(lambda: running.server.is_idle)
    flip_newest_checkpoint(files := left_by(files))

    running = await start_delay(files=files)
    assert damaged(running) == 0
    await send_due(running, clock, b"new")
    assert brokers.bodies == [over, late, b"new"]


async def test_a_dispatch_log_that_is_gone_is_told_if_its_tick_is_over_and_there(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await send_due(running, clock, b"over")
    clock.advance(3 * HOUR)
    await running.checkpointed()
    files = left_by(files)
    files.remove(only(files, ".dispatch"))

    running = await start_delay(files=files)
    assert damaged(running) == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda files, path: files.remove(path), "the file is gone"),
        (lambda files, path: replace(files, path, b""), "its end is missing"),
        (lambda files, path: flip(files, path, 20), "its end is missing"),
    ],
    ids=["gone", "emptied", "flipped"],
)
async def test_a_dispatch_log_that_lost_its_end_is_told(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[MemoryFileSystem, str], None],
    told: str,
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + HOUR
    cancelled, _ = await running.send([(b"cancelled", due), (b"kept", due)])
    await running.caught_up()
    await running.cancel((cancelled, due))
    await running.close()
    files = left_by(files)
    damage(files, only(files, ".dispatch"))
    capsys.readouterr()

    running = await start_delay(files=files)

    (line,) = [each for each in capsys.readouterr().out.splitlines() if "corruption_" in each]
    assert "path=schedule/20261116T1000Z.dispatch" in line
    assert told in line
    assert damaged(running) == 1
    clock.advance(2 * HOUR)
    await eventually(lambda: b"kept" in brokers.bodies)


async def test_a_dispatch_log_that_is_gone_is_told_after_any_number_of_starts(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    """Nothing was noted since the first of them."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + 3 * HOUR
    cancelled, _ = await running.send([(b"cancelled", due), (b"kept", due)])
    await running.caught_up()
    await running.cancel((cancelled, due))
    await running.close()
    for _ in range(2):
        running = await start_delay(files=files)
        assert damaged(running) == 0
        await running.close()
    files = left_by(files)
    files.remove(only(files, ".dispatch"))

    running = await start_delay(files=files)
    assert damaged(running) == 1


async def test_a_start_goes_by_nothing_that_a_power_cut_may_take_back(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    """A server that stops does not sync that its last batches were accepted."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await send_due(running, clock, b"accepted")
    await running.close()
    path = only(files, ".dispatch")

    await start_delay(files=files)
    left = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    assert left.contents()[path] == files.contents()[path]


async def test_damage_within_a_dispatch_log_is_counted(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await send_due(running, clock, b"first")
    await send_due(running, clock, b"second")
    await running.close()
    flip(files := left_by(files), only(files, ".dispatch"), 20)

    running = await start_delay(files=files)
    assert damaged(running) == 1


async def test_a_log_that_is_gone_before_a_checkpoint_knew_it_is_told(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + HOUR
    cancelled, _ = await running.send([(b"cancelled", due), (b"kept", due)])
    await running.caught_up()
    await running.cancel((cancelled, due))
    files = left_by(files)
    files.remove(only(files, "Z.log"))
    capsys.readouterr()

    running = await start_delay(files=files)

    assert "what the message log has of it is made again" in capsys.readouterr().out
    assert damaged(running) == 1
    clock.advance(2 * HOUR)
    await eventually(lambda: b"kept" in brokers.bodies)


@pytest.mark.parametrize("is_gone", [False, True], ids=["emptied", "gone"])
async def test_a_lost_schedule_log_is_told_once(
    start_delay: StartDelay, clock: ManualClock, *, is_gone: bool
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await running.send([(b"lost", clock.now_ms() + 300 * 24 * HOUR)])
    await running.caught_up()
    await running.close()
    files = left_by(files)
    path = only(files, "Z.log")
    if is_gone:
        files.remove(path)
    else:
        replace(files, path, b"")

    told = []
    for _ in range(3):
        running = await start_delay(files=files)
        told.append(damaged(running))
        await running.close()
        files = left_by(files)
    assert told == [1, 0, 0]


def empty(files: MemoryFileSystem, path: str) -> None:
    replace(files, path, b"")


def flip_all(files: MemoryFileSystem, path: str) -> None:
    content = bytes(byte ^ 1 for byte in files.contents()[path])
    replace(files, path, content)


@pytest.mark.parametrize("damage", [empty, flip_all])
async def test_a_log_that_is_made_again_differs_from_what_its_dispatch_log_names(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    damage: Callable[[MemoryFileSystem, str], None],
) -> None:
    """What came step by step is made again in one: then the large message comes first."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    hour = clock.now_ms() - clock.now_ms() % HOUR + 3 * HOUR
    (cancelled,) = await running.send([(b"cancelled", hour + 50 * 60 * SECOND)])
    await running.caught_up()
    large = b"large" + b"x" * 300_000
    await running.send([(large, hour + 5 * 60 * SECOND)])
    await running.caught_up()
    assert await running.cancel((cancelled, hour + 50 * 60 * SECOND)) == [Fate.CANCELLED]
    files = left_by(files)
    damage(files, only(files, "Z.log"))

    running = await start_delay(files=files)
    assert damaged(running) == 1
    await running.close()
    running = await start_delay(files=left_by(files))
    assert damaged(running) == 0
    clock.advance(5 * HOUR)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert brokers.bodies.count(large) == 1


async def test_an_id_is_found_in_a_log_that_is_made_again(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    """The hash index says where it was."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + 3 * HOUR
    (first,) = await running.send([(b"first", due)])
    ids = []
    for number in range(6):
        ids += await running.send([(b"%d" % number + b"x" * 20_000, due)])
        await running.caught_up()
    assert await running.cancel((first, due)) == [Fate.CANCELLED]
    assert await running.cancel((bytes(16), due)) == [Fate.UNKNOWN]
    files = left_by(files)
    assert only(files, "Z.index")
    empty(files, only(files, "Z.log"))

    running = await start_delay(files=files)
    assert await running.cancel(*[(each, due) for each in ids]) == [Fate.CANCELLED] * 6


async def test_what_a_power_cut_tears_out_of_a_log_that_is_made_again_is_delivered(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    due = clock.now_ms() + 3 * HOUR
    ids = []
    for number in range(9):
        ids += await running.send([(b"old %d" % number, due)])
        await running.caught_up()
    assert await running.cancel((ids[0], due)) == [Fate.CANCELLED]
    files = left_by(files)
    path = only(files, "Z.log")
    empty(files, path)
    running = await start_delay(files=files)
    assert damaged(running) == 1
    for body in (b"lost", b"kept"):
        await running.send([(body, due)])
        await running.caught_up()
    files = left_by(files)
    # No dispatch log names them, so they need not be on disk yet.
    content = bytearray(files.contents()[path])
    at = content.index(b"lost")
    content[at : at + 4] = bytes(4)
    replace(files, path, bytes(content))

    running = await start_delay(files=files)
    clock.advance(4 * HOUR)
    await eventually(lambda: running.server.is_idle and not running.server.has_due)
    assert sorted(brokers.bodies)[:2] == [b"kept", b"lost"]
    assert len(set(brokers.bodies)) == len(brokers.bodies)


async def test_a_tick_to_which_something_came_as_a_checkpoint_began_is_not_over(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    """If its files are lost, nobody may take them for removed ones."""
    files = GatedDisk()
    running = await start_delay(files=files, storage={"sync_interval": "1m"})
    far = clock.now_ms() + 20 * HOUR
    (cancelled,) = await running.send([(b"far", far)])
    await send_due(running, clock, b"over")
    tick_end = clock.now_ms() - clock.now_ms() % HOUR + HOUR
    clock.set_now_ms(tick_end + SECOND)
    brokers.refuses = lambda *_: NotAllowedError("no")
    files.close_gate()
    cancelling = await running.raw.put(Cancel((Ticket(cancelled, far),)))
    await eventually(lambda: files.syncs_waiting > 0)
    writing = asyncio.create_task(running.server.checkpoint())
    await asyncio.sleep(0)
    # Nobody waits for the disk to have it.
    await running.send([(b"late", tick_end - SECOND)], acks=Acks.MEMORY)
    await running.caught_up()
    files.open_gate()
    await writing
    await running.raw.answer_to(cancelling)
    left = left_by(files)
    left.remove(min(path for path in left.contents() if path.endswith("Z.log")))

    running = await start_delay(files=left)
    assert damaged(running) == 1

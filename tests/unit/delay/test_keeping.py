"""What a delay server keeps on disk, and for how long; and what it does with what is damaged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Event

import pytest

from pulque.delay import housekeeping
from pulque.delay.dispatch import live_ticks as live
from pulque.errors import ErrorCode, NotAllowedError
from pulque.storage.files import File
from pulque.storage.schedule.schedule_log import tick_named
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.power import DirectorySynced, Linked
from pulque.wire.requests import Acks
from tests.unit.broker.disks import GatedDisk
from tests.unit.delay.running import (
    FakeBrokers,
    RunningDelay,
    StartDelay,
    delayed_batch,
    eventually,
)

SECOND = 1000
HOUR = 3_600_000
DAY = 24 * HOUR


def segments(running: RunningDelay) -> list[Path]:
    return sorted(Path(running.settings.storage.directory, "messages").glob("*.log"))


@pytest.mark.accepts("001-34", "001-35", "001-40", "001-42")
async def test_each_tick_has_one_file_with_full_messages(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay()
    first = clock.now_ms() // HOUR * HOUR + HOUR
    for turn, past in enumerate((0, HOUR // 2, HOUR - 1)):
        await running.send(
            [(b"hour %d turn %d" % (i, turn), first + i * HOUR + past) for i in range(4)]
        )
    await running.caught_up()
    files = running.schedule("*.log")

    assert [tick_named(path.name) for path in files] == [first + i * HOUR for i in range(4)]
    for i, path in enumerate(files):
        data = path.read_bytes()
        assert all(b"hour %d turn %d" % (i, turn) in data for turn in range(3))


@pytest.mark.accepts("001-31", "001-36")
async def test_files_are_bounded_by_the_longest_delay(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay(schedule={"longest_delay": "2d"})
    now = clock.now_ms()
    await running.send([(b"x", now + i * 600_000) for i in range(-300, 289)])
    late, _ = delayed_batch([(b"x", now + 2 * DAY + 61 * SECOND)])
    outcome = await running.send_batch(late)

    assert outcome.code == ErrorCode.INVALID_REQUEST
    assert "172861 s ahead; at most 172800 s are allowed" in outcome.text
    assert len(running.schedule("*.log")) <= 2 * 24 + 2


@pytest.mark.accepts("001-41", "001-43", "004-68")
async def test_the_message_log_can_go_once_it_is_in_the_schedule(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay(storage={"segment_size": "64KiB"})
    due = clock.now_ms() + DAY
    for _ in range(10):
        await running.send([(b"x" * 20_000, due)])
    await running.checkpointed()

    assert len(segments(running)) == 1
    running = await start_delay(storage={"segment_size": "64KiB"})
    clock.set_now_ms(due)
    await eventually(lambda: len(brokers.accepted) == 10)


@pytest.mark.accepts("001-44")
async def test_files_of_ticks_that_are_over_go(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    await running.send([(b"%d" % i, now + i * HOUR + SECOND) for i in range(3)])
    clock.set_now_ms(now + HOUR + 2 * SECOND)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 2)
    await running.checkpointed()
    assert len(running.schedule("*.log")) == 3, "an older checkpoint knows it"
    await running.checkpointed()
    assert [path.suffix for path in running.schedule("*")] == [".dispatch", ".log", ".log"]
    clock.set_now_ms(now + 4 * HOUR)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 3)
    await running.checkpointed()
    await running.checkpointed()

    assert running.schedule("*") == []
    running = await start_delay()
    assert running.server.status()["schedule"]["damaged"] == 0
    assert brokers.bodies == [b"0", b"1", b"2"]


async def test_a_tick_that_goes_never_comes_back_without_what_became_of_it(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    """Whatever order a disk has for names: else its messages would be delivered again."""
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    now = clock.now_ms()
    await running.send([(b"x", now + SECOND)])
    clock.set_now_ms(now + 4 * HOUR)
    await eventually(lambda: running.server.status()["dispatch"]["dispatched"] == 1)
    await running.checkpointed()
    await running.checkpointed()
    assert files.list("schedule") == []

    told = []
    for operation in map(files.operation, range(files.operations)):
        match operation:
            case Linked(((_, name, None),)) if name.endswith(("Z.log", ".dispatch")):
                told.append(name.partition(".")[2])
            case DirectorySynced() if told:
                told.append("synced")
    assert told[:4] == ["log", "synced", "dispatch", "synced"]


async def test_what_was_sent_by_killed_servers_is_there(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(files=files)
    await running.send([(b"%d" % i, clock.now_ms() + i * HOUR) for i in range(1, 30)])
    await running.caught_up()
    left = files.after_power_cut(files.operations, Cut.KEPT, Random(1))
    running = await start_delay(files=left)
    assert running.server.status()["schedule"]["messages"] == 29
    clock.advance(2 * DAY)
    await eventually(lambda: len(brokers.accepted) == 29)

    assert sorted(map(int, brokers.bodies)) == list(range(1, 30))


async def damaged(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> tuple[RunningDelay, list[Path]]:
    """Stop a delay server that has three messages in each of three hours."""
    running = await start_delay()
    now = clock.now_ms()
    for turn in range(3):
        await running.send([(b"%d/%d" % (i, turn), now + i * HOUR) for i in (1, 2, 3)])
        await running.caught_up()  # so that each has an entry of its own
    await running.close()
    return running, running.schedule("*.log")


async def test_a_flipped_bit_takes_one_entry_and_is_told(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, files = await damaged(start_delay, clock, brokers)
    data = bytearray(files[1].read_bytes())
    at = data.find(b"2/1")
    data[at] ^= 1
    files[1].write_bytes(data)
    await start_delay()
    clock.advance(5 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 8)
    told = capsys.readouterr().out

    assert b"2/1" not in brokers.bodies
    assert "corruption_found" in told
    assert "20261116T1100Z.log" in told
    assert "crc of 1 messages of orders does not match" in told


@pytest.mark.parametrize("cut", [1, 30, 100])
async def test_a_file_that_was_cut_loses_its_end_and_is_told(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
    cut: int,
) -> None:
    _, files = await damaged(start_delay, clock, brokers)
    files[0].write_bytes(files[0].read_bytes()[:-cut])
    running = await start_delay()
    assert running.server.status()["schedule"]["damaged"] == 1
    clock.advance(5 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 8)

    assert b"1/2" not in brokers.bodies
    assert "the file ends before what was written" in capsys.readouterr().out


async def test_a_deleted_file_is_told_and_the_rest_goes_on(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, files = await damaged(start_delay, clock, brokers)
    files[1].unlink()
    running = await start_delay()
    clock.advance(5 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 6)
    told = capsys.readouterr().out

    assert "20261116T1100Z.log" in told
    assert "the file is gone" in told
    assert running.server.status()["schedule"]["damaged"] == 1


async def test_a_file_of_another_tick_is_told_and_not_delivered_early(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, files = await damaged(start_delay, clock, brokers)
    files[2].rename(files[2].with_name("20261116T0900Z.log"))
    (files[0].parent / "notes.txt").write_text("?")
    running = await start_delay()
    clock.advance(HOUR)
    await eventually(lambda: len(brokers.accepted) == 3)
    told = capsys.readouterr().out

    assert all(body.startswith(b"1/") for body in brokers.bodies)
    assert "an entry of schedule/20261116T1200Z.log lies here" in told
    assert "no schedule log is named like this" in told
    (kept,) = running.schedule("*.misnamed")
    await running.close()
    kept.rename(files[2])
    await start_delay()
    clock.advance(2 * HOUR)
    await eventually(lambda: len(brokers.accepted) == 9)


async def test_a_full_disk_refuses_sends_serves_on_and_recovers(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    files.room = 8 * 1024 * 1024
    running = await start_delay(files=files, storage={"reserve": "2MiB"})
    due = clock.now_ms() + 10 * SECOND
    sent = 0
    while True:
        batch, _ = delayed_batch([(b"x" * 200_000, due)], first_id=sent)
        outcome = await running.send_batch(batch, acks=Acks.MEMORY)
        if outcome.code:
            break
        sent += 1
    assert outcome.code == ErrorCode.STORAGE_FULL
    clock.advance(11 * SECOND)
    await eventually(lambda: len(brokers.accepted) == sent)
    files.room = 64 * 1024 * 1024
    async with asyncio.timeout(20):
        while (await running.send_batch(batch)).code:  # noqa: ASYNC110  # as a producer does
            await asyncio.sleep(0.05)
    await eventually(lambda: len(brokers.accepted) == sent + 1)


async def test_ticks_of_another_length_before_are_served(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    now = clock.now_ms()
    ids = await running.send([(b"a", now + 20 * 60 * SECOND), (b"b", now + 40 * 60 * SECOND)])
    running = await start_delay(schedule={"tick": "5m"})
    await running.send([(b"c", now + 30 * 60 * SECOND)])
    await running.cancel((ids[1], now + 40 * 60 * SECOND))
    clock.advance(HOUR)
    await eventually(lambda: len(brokers.accepted) == 2)

    assert sorted(brokers.bodies) == [b"a", b"c"]


class SlowFiles(MemoryFileSystem):
    """Files that take their time, by the clock of the server."""

    def __init__(self, clock: ManualClock, *, sync_ms: int = 0, schedule_ms: int = 0) -> None:
        super().__init__()
        self._clock = clock
        self._sync_ms = sync_ms
        self._schedule_ms = schedule_ms

    def sync_files(self, paths: Sequence[str]) -> None:
        self._clock.advance(self._sync_ms)
        super().sync_files(paths)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if create and path.endswith("Z.log"):
            self._clock.advance(self._schedule_ms)
        return super().open(path, create=create, writable=writable)


def checkpoints(running: RunningDelay) -> int:
    return int(running.server.status()["checkpoints"])


async def seal(running: RunningDelay, count: int, due_ms: int) -> None:
    """Send what fills so many small segments; each of it counts as much."""
    for _ in range(count):
        await running.send([(b"x" * 200_000, due_ms)] * 6)
    await running.caught_up()


async def test_checkpoints_that_make_room_leave_time_for_others(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    files = SlowFiles(clock, sync_ms=2 * SECOND)
    running = await start_delay(storage={"segment_size": "64KiB"}, files=files)
    due_ms = clock.now_ms() + DAY
    clock.advance(10 * SECOND)
    await seal(running, 10, due_ms)
    await asyncio.sleep(0.6)  # two turns of the housekeeper
    assert checkpoints(running) == 0, "so few are not worth it"
    await seal(running, 7, due_ms)
    await eventually(lambda: checkpoints(running) == 1)
    await seal(running, 17, due_ms)
    clock.advance(SECOND)
    await asyncio.sleep(0.6)
    assert checkpoints(running) == 1, "the last one took two seconds, and began three ago"
    clock.advance(SECOND)
    await eventually(lambda: checkpoints(running) == 2)


async def test_segments_go_as_soon_as_there_is_a_pause(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(storage={"segment_size": "64KiB"}, files=files)
    clock.advance(2 * SECOND)
    await seal(running, 3, clock.now_ms() + DAY)
    await asyncio.sleep(0.6)  # two turns of the housekeeper
    assert checkpoints(running) == 0, "there may be more to come"
    clock.advance(SECOND)
    await eventually(lambda: checkpoints(running) == 1)
    await eventually(lambda: sum(name.endswith(".log") for name in files.list("messages")) == 1)
    housekeeper = running.server._housekeeper  # noqa: SLF001
    # Else the same checkpoint may remove what is sealed now.
    await eventually(lambda: not housekeeper._turn.locked())  # noqa: SLF001
    await running.send([(b"begins a segment", clock.now_ms() + DAY)])
    clock.advance(10 * SECOND)
    await eventually(lambda: checkpoints(running) == 2)
    await running.send([(b"stays in it", clock.now_ms() + DAY)])
    await running.caught_up()
    clock.advance(10 * SECOND)
    await asyncio.sleep(0.6)
    assert checkpoints(running) == 2, "no segment would go"


async def test_no_more_has_to_be_replayed_than_takes_some_seconds(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    running = await start_delay(files=SlowFiles(clock, schedule_ms=SECOND))
    due = clock.now_ms() + DAY
    await running.send([(b"x", due)])
    await running.caught_up()
    clock.advance(5 * SECOND)
    await asyncio.sleep(0.6)  # two turns of the housekeeper
    assert checkpoints(running) == 0
    await running.send([(b"x", due)])
    await eventually(lambda: checkpoints(running) == 1)


async def test_what_removed_segments_held_is_delivered(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    files = MemoryFileSystem()
    running = await start_delay(storage={"segment_size": "64KiB"}, files=files)
    due = clock.now_ms() + DAY
    for turn in range(6):
        for number in range(4):
            await running.send([(b"%d %d " % (turn, number) + b"x" * 20_000, due)])
        await running.checkpointed()
        names = [name.partition(".")[2] for name in files.list("messages")]
        assert names.count("log") == 1
    left = files.after_power_cut(files.operations, Cut.KEPT, Random(1))
    running = await start_delay(storage={"segment_size": "64KiB"}, files=left)
    clock.set_now_ms(due)
    await eventually(lambda: len(brokers.accepted) == 24)
    assert len(set(brokers.bodies)) == 24


async def test_segments_that_fill_while_a_checkpoint_is_written_outlive_it(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    """The checkpoint does not know that they are in the schedule, and nothing synced that."""
    files = GatedDisk()
    storage = {"segment_size": "64KiB"}
    running = await start_delay(storage=storage, files=files)
    due = clock.now_ms() + DAY
    await running.send([(b"before", due)])
    await running.caught_up()
    files.close_gate()
    checkpoint = asyncio.create_task(running.server.checkpoint())
    await eventually(lambda: files.syncs_waiting > 0)
    bodies = [b"%d " % number + b"x" * 40_000 for number in range(6)]
    for body in bodies:
        await running.send([(body, due + 2 * HOUR)], acks=Acks.MEMORY)
    files.open_gate()
    await checkpoint
    await running.send([(b"after", due)], acks=Acks.DISK)
    left = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    await start_delay(storage=storage, files=left)
    clock.set_now_ms(due + 2 * HOUR)

    wanted = sorted([b"before", *bodies, b"after"])
    await eventually(lambda: len(brokers.accepted) >= len(wanted))
    assert sorted(brokers.bodies) == wanted


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_many_messages_that_are_over_or_stuck_keep_no_tick_out(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
    is_stuck: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(live, "_MOST_COMING", 100)
    refusal = NotAllowedError("no") if is_stuck else None
    brokers.refuses = lambda partition, _: refusal if partition == "refused" else None
    running = await start_delay(files=MemoryFileSystem(), schedule={"tick": "5m"})
    now = clock.now_ms()
    await running.send([(b"many", now + SECOND)] * 100, "refused")
    await running.send([(b"next", now + 5 * 60 * SECOND + SECOND)])
    clock.advance(2 * SECOND)
    if is_stuck:
        await eventually(lambda: running.server.status()["dispatch"]["stuck"]["messages"] == 100)
    else:
        await eventually(lambda: len(brokers.accepted) == 100)
    clock.set_now_ms(now + 5 * 60 * SECOND)
    clock.advance(3 * SECOND)
    clock.set_now_ms(now + 5 * 60 * SECOND + 2 * SECOND)
    await eventually(lambda: b"next" in brokers.bodies)


async def test_ticks_that_are_over_leave_the_memory_soon_if_they_are_large(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(housekeeping, "_MANY_OVER", 50)
    running = await start_delay(files=MemoryFileSystem())
    await running.send([(b"x", clock.now_ms() + SECOND)] * 49)
    clock.advance(2 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 49)
    clock.set_now_ms(clock.now_ms() + 2 * HOUR)
    clock.advance(5 * SECOND)
    await asyncio.sleep(0.6)  # two turns of the housekeeper
    assert checkpoints(running) == 0, "so few can wait for their minute"
    monkeypatch.setattr(housekeeping, "_MANY_OVER", 49)
    await eventually(lambda: checkpoints(running) == 1)
    clock.advance(5 * SECOND)
    await eventually(lambda: running.server.status()["removed_ticks"] == 1)


class SlowCheckpoint(MemoryFileSystem):
    """A disk on which the first checkpoint takes until another one begins, or for a second."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.is_first_done = False
        self.are_two = Event()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if path.startswith("checkpoints/") and create:
            self.begun += 1
            if self.begun == 1:
                self.are_two.wait(1.0)
            elif not self.is_first_done:
                self.are_two.set()
            self.is_first_done = True
        return super().open(path, create=create, writable=writable)


async def test_the_last_checkpoint_is_not_written_beside_another(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    files = SlowCheckpoint()
    running = await start_delay(files=files, storage={"checkpoint_interval": "1s"})
    await running.send([(b"x", clock.now_ms() + HOUR)])
    await running.caught_up()
    clock.advance(2 * SECOND)
    await eventually(lambda: files.begun == 1)
    await running.close()
    assert not files.are_two.is_set()
    assert files.begun == 2
    running = await start_delay(files=files)
    assert running.server.status()["schedule"]["messages"] == 1

"""Steps of the replay that stop half-way, and batches that could not be replayed."""

import pytest

from pulque.delay import receiver as receive
from pulque.delay import server
from pulque.delay.schedule import replay
from pulque.errors import ErrorCode, StorageFullError
from pulque.model.batch import HEADER, Codec, layout_of, read_header, seal, seed_of
from pulque.storage.files import File
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from tests.unit.delay.running import (
    FakeBrokers,
    RunningDelay,
    StartDelay,
    delayed_batch,
    eventually,
)

SECOND = 1000
HOUR = 3_600_000


class HalfFullFiles(MemoryFileSystem):
    """There is room for the schedule log of the first hour, and for later ones only if told."""

    has_room = True

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if create and path.endswith("T1000Z.log") and not self.has_room:
            raise StorageFullError("there is no room for it")
        return super().open(path, create=create, writable=writable)


async def half_done(
    start_delay: StartDelay, clock: ManualClock, files: HalfFullFiles
) -> RunningDelay:
    """Return a server that could put a message into this hour, and not the other into the next."""
    running = await start_delay(files=files)
    await running.send([(b"before", clock.now_ms() + 5 * SECOND)])
    await eventually(lambda: running.server.status()["schedule"]["in_memory"] == 1)
    files.has_room = False
    now = clock.now_ms()
    await running.send([(b"near", now + 5 * SECOND), (b"far", now + HOUR)])
    await eventually(lambda: running.server.status()["schedule"]["messages"] == 2)
    return running


async def test_what_was_written_before_the_disk_was_full_is_delivered(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_TRY_AGAIN_S", 0.05)
    files = HalfFullFiles()
    running = await half_done(start_delay, clock, files)
    files.has_room = True
    await running.caught_up()
    await running.send([(b"after", clock.now_ms() + 5 * SECOND)])
    await running.caught_up()
    clock.advance(6 * SECOND)
    await eventually(lambda: len(brokers.accepted) >= 3)

    assert brokers.bodies == [b"before", b"near", b"after"]


async def test_what_is_half_done_when_the_server_stops_comes_once(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_CATCH_UP_S", 0.1)
    files = HalfFullFiles()
    running = await half_done(start_delay, clock, files)
    await running.close()
    files.has_room = True
    running = await start_delay(files=files)
    clock.advance(2 * HOUR)
    await eventually(lambda: len(brokers.accepted) >= 3)
    await eventually(lambda: running.server.is_idle)

    assert sorted(brokers.bodies) == [b"before", b"far", b"near"]


def spoilt(due_ms: int) -> bytes:
    """Return a batch whose crc is right, and whose records are not compressed as it says."""
    batch, _ = delayed_batch([(b"x" * 10, due_ms)], first_id=1000)
    header = read_header(batch)
    start = layout_of(header.flags).records_start(1)
    head = HEADER.pack(*header._replace(codec=int(Codec.LZ4)))[4:]
    return seal(head + batch[HEADER.size : start] + b"garbage", seed_of("orders"))


async def test_a_batch_that_cannot_be_opened_is_refused_and_costs_nobody_else_anything(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    running = await start_delay()
    due = clock.now_ms() + SECOND
    outcome = await running.send_batch(spoilt(due))
    await running.send([(b"good", due)])
    clock.advance(2 * SECOND)
    await eventually(lambda: brokers.bodies == [b"good"])

    assert outcome.code == ErrorCode.INVALID_BATCH
    assert "lz4" in outcome.text or "decompress" in outcome.text


async def test_one_that_is_in_the_log_is_told_and_left_out_at_the_start(
    start_delay: StartDelay,
    clock: ManualClock,
    brokers: FakeBrokers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = await start_delay()
    due = clock.now_ms() + SECOND
    with monkeypatch.context() as patched:
        patched.setattr(receive, "_check_records", lambda _: None)
        patched.setattr(replay.Replayer, "put", lambda *_: None)
        await running.send_batch(spoilt(due))
        await running.send([(b"good", due)])
    await running.close()
    await start_delay()
    clock.advance(2 * SECOND)
    await eventually(lambda: brokers.bodies == [b"good"])

    assert "a batch cannot be opened" in capsys.readouterr().out

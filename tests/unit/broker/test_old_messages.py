"""Messages that are old, cold, damaged or gone: what is left is served, and nobody stops."""

import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulque.storage.directory.archive_progress import ArchivedUpTo, write_archived
from pulque.storage.files import OsFileSystem
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Positions,
    Pull,
    Read,
    Seal,
    Send,
    Wanted,
)
from pulque.wire.responses import Located, ReadBack, Sealed, Sent
from tests.unit.broker.disks import ColdDirectory, ReplacingDirectory
from tests.unit.broker.running import Running, Start, eventually, numbered

LONG_LEASE = {"lease": "1h"}
"""No consumer is lost while the clock of a test runs."""
NO_CACHE = {"tail_cache": "0B"}
"""Every read goes to the file."""


async def send_sealed(raw: RawConnection, segments: int, count: int = 2) -> None:
    """Send batches, each into a segment of its own."""
    for at in range(segments):
        await raw.send("orders", numbered(count, count * at), acks=Acks.DISK)
        await raw.ask(Seal(), Sealed)


async def begins_at(raw: RawConnection, sequence: int) -> bool:
    return (await raw.ask(Positions("orders"), Located)).start == sequence


# -- retention ----------------------------------------------------------------------------------


@pytest.mark.accepts("004-10")
async def test_old_segments_go_by_age_whether_consumed_or_not(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"})
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    await raw.ask(Seal(), Sealed)
    clock.advance(30_000)
    await raw.send("orders", numbered(2, 2))
    await raw.ask(Seal(), Sealed)

    clock.advance(60_001)
    await eventually(lambda: begins_at(raw, 4))
    await running.house_kept()

    assert len(list(running.directory.glob("messages/*.log"))) == 1
    assert (await raw.pull("orders")).runs == ()


async def test_segments_stay_until_their_newest_message_is_too_old(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"})
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    clock.advance(50_000)
    await raw.send("orders", numbered(2, 2))
    await raw.ask(Seal(), Sealed)

    clock.advance(59_000)
    await running.house_kept()

    assert await begins_at(raw, 0)
    assert (await raw.pull("orders")).bodies == numbered(4)


async def test_what_is_not_archived_stays_whatever_its_age(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m", "archive": True})
    raw = await running.connect()
    await send_sealed(raw, 3)
    clock.advance(60_001)
    await running.house_kept()
    assert await begins_at(raw, 0)

    bases = sorted(int(each.stem) for each in running.directory.glob("messages/*.log"))
    files = OsFileSystem(str(running.directory))
    write_archived(files, ArchivedUpTo(messages=bases[2], actions=0))
    await eventually(lambda: begins_at(raw, 4))
    await running.house_kept()

    assert await begins_at(raw, 4)
    assert (await raw.pull("orders")).bodies == numbered(2, 4)


@pytest.mark.accepts("004-10")
async def test_the_oldest_segments_go_when_the_log_is_too_large(start: Start) -> None:
    running = await start(storage={"retention_size": "1MiB"})
    raw = await running.connect()
    for _ in range(4):
        await raw.send("orders", [b"x" * 400_000])
        await raw.ask(Seal(), Sealed)

    await eventually(lambda: begins_at(raw, 2))
    await running.house_kept()

    assert await begins_at(raw, 2)


async def test_a_group_that_fell_behind_goes_on_with_what_is_left(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"}, consumption=LONG_LEASE)
    raw = await running.connect()
    await send_sealed(raw, 2)
    first = await raw.pull("orders", max_messages=1)
    clock.advance(60_001)
    await raw.send("orders", numbered(3, 4))
    await eventually(lambda: begins_at(raw, 4))

    got = await raw.pull("orders", expected=1)

    assert got.bodies == numbered(3, 4)
    assert [(run.first_pull, run.first_sequence) for run in got.runs] == [(1, 4)]
    assert (await raw.settle(first.runs[0])).settled == 1
    assert (await raw.settle(got.runs[0])).settled == 4


async def test_held_messages_that_retention_took_are_a_hole_that_can_be_settled(
    start: Start,
) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"}, consumption=LONG_LEASE)
    raw = await running.connect()
    await send_sealed(raw, 2)
    clock.advance(60_001)
    await raw.send("orders", numbered(1, 4))
    held = await raw.pull("orders")
    await eventually(lambda: begins_at(raw, 4))

    again = await raw.pull("orders")

    assert held.length == again.length == 5
    assert again.bodies == [b"4"]
    assert (await raw.settle(held.runs[0], last=4)).settled == 5


async def test_a_redelivery_of_what_is_gone_is_given_up(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"}, consumption=LONG_LEASE)
    raw = await running.connect()
    await send_sealed(raw, 1)
    held = await raw.pull("orders")
    clock.advance(60_001)
    await raw.send("orders", numbered(1, 2))
    await eventually(lambda: begins_at(raw, 2))

    await raw.settle(held.runs[0], nacked={0: "too late"})

    async def is_given_up() -> bool:
        groups = (await raw.status())["groups"]
        return all(group["redeliveries_pending"] == 0 for group in groups)

    await eventually(is_given_up)
    assert (await raw.pull("orders", expected=2)).bodies == [b"2"]


async def test_where_a_partition_begins_is_known_after_a_restart(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"retention": "1m"})
    raw = await running.connect()
    await send_sealed(raw, 2)
    clock.advance(60_001)
    await raw.send("orders", numbered(1, 4))
    await eventually(lambda: begins_at(raw, 4))
    await running.house_kept()

    again = await (await start(running.as_if_killed("killed"), clock=clock)).connect()

    assert await begins_at(again, 4)
    assert (await again.pull("orders")).bodies == [b"4"]


# -- cold reads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_what_is_not_in_memory_is_read_in_a_thread_and_served(
    start: Start, *, is_sealed: bool
) -> None:
    files = MemoryFileSystem()
    running = await start(files=files, storage=NO_CACHE)
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    if is_sealed:
        await raw.ask(Seal(), Sealed)
    files.cold = True

    first = await raw.pull("orders", max_messages=3)
    again = await raw.pull("orders", timeout_ms=5000)
    _, messages = await raw.read("orders", 1)

    assert first.bodies == numbered(3)
    assert again.bodies == numbered(5)
    assert [message.body for message in messages] == numbered(4, 1)


async def test_a_pull_whose_connection_ends_during_a_cold_read_is_handed_nothing(
    start: Start, tmp_path: Path
) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw, gone = await running.connect(), await running.connect()
    await raw.send("orders", numbered(3))
    wanted = (Wanted("orders", FROM_SETTLED),)

    async def is_reading() -> bool:
        return files.reads_waiting > 0

    async def is_gone() -> bool:
        return bool((await raw.status())["connections"] == 1)

    files.gate.clear()
    await gone.put(Pull("g", "gone", 1, 10, 1000, 5000, EARLIEST, wanted))
    await eventually(is_reading)
    gone.close()
    await eventually(is_gone)
    files.gate.set()

    assert (await raw.pull("orders", consumer="heir")).bodies == numbered(3)
    assert (await raw.status())["messages_delivered"] == 3


async def test_the_broker_serves_others_while_a_cold_read_waits(
    start: Start, tmp_path: Path
) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files)
    raw, slow = await running.connect(), await running.connect()
    await raw.send("old", numbered(3))
    running = await running.restarted(files=files)
    raw, slow = await running.connect(), await running.connect()
    await raw.send("new", numbered(1))
    files.gate.clear()
    waiting = await slow.put(Read("old", 0, 10, 1000, 0))

    assert (await raw.pull("new")).bodies == numbered(1)
    assert (await raw.send("new", numbered(1, 1))).first_sequence == 1
    files.gate.set()

    assert expect(await slow.answer_to(waiting), ReadBack).count == 3
    await running.close()


def drop_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@pytest.mark.accepts("004-12")
async def test_a_backlog_that_the_page_cache_lost_is_read_from_the_disk(
    start: Start,
) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    for at in range(0, 500, 50):
        await raw.send("orders", [b"%d:" % n + b"x" * 2000 for n in range(at, at + 50)])
    await raw.ask(Seal(), Sealed)
    for path in running.directory.glob("messages/*"):
        drop_page_cache(path)

    at = 0
    while at < 500:
        got = await raw.pull("orders", expected=at, max_messages=37, timeout_ms=5000)
        assert [body.split(b":")[0] for body in got.bodies] == numbered(got.length, at)
        at += got.length


# -- damage -------------------------------------------------------------------------------------


def damage(running: Running, body: bytes) -> None:
    """Change one byte of a message in its segment."""
    for path in running.directory.glob("messages/*.log"):
        data = path.read_bytes()
        if body in data:
            with path.open("r+b") as file:
                file.seek(data.index(body))
                file.write(b"!")


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_damaged_batch_is_a_hole_that_is_reported_and_its_neighbours_are_served(
    start: Start, *, is_sealed: bool
) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    for body in (b"first", b"victim", b"third"):
        await raw.send("orders", [body], acks=Acks.DISK)
    if is_sealed:
        await raw.ask(Seal(), Sealed)
    damage(running, b"victim")

    with capture_logs() as lines:
        got = await raw.pull("orders", timeout_ms=5000)

    assert got.bodies == [b"first", b"third"]
    assert got.length == 3
    (line,) = (line for line in lines if line["event"] == "corruption_found")
    assert (line["log_level"], line["bytes"] > 0) == ("error", True)
    assert line["path"].startswith("messages/")
    assert (await raw.settle(got.runs[0])).settled == 3


async def test_what_is_damaged_is_counted_beside_the_lag_also_after_a_restart(
    start: Start,
) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    for body in (b"first", b"victim", b"third"):
        await raw.send("orders", [body], acks=Acks.DISK)
    damage(running, b"victim")
    assert (await raw.pull("orders", timeout_ms=5000)).length == 3

    await check_damaged(raw)
    again = await running.restarted()
    await check_damaged(await again.connect())
    await again.close()


async def check_damaged(raw: RawConnection) -> None:
    """Check what a broker says of three messages of which the second is damaged."""
    status = await raw.status()
    (group,) = status["groups"]
    assert (group["lag"], group["damaged"], status["messages_damaged"]) == (0, 1, 1)
    assert status["damaged"] == [{"partition": "orders", "first_sequence": 1, "end": 2}]


async def test_very_much_damage_is_written_down_at_once_and_not_by_the_event_loop(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    files = ReplacingDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw = await running.connect()
    batch = ("orders", pack_batch("orders", [b"victim"]))
    await raw.ask(Send(Acks.DISK, 10_000, (batch,) * 200), Sent)
    await raw.send("orders", [b"whole"], acks=Acks.DISK)
    (path,) = running.directory.glob("messages/*.log")
    path.write_bytes(path.read_bytes().replace(b"victim", b"Victim"))

    got = await raw.pull("orders", timeout_ms=5000)

    assert got.bodies == [b"whole"]
    assert (await raw.status())["messages_damaged"] == 200
    writers = [thread for path, thread in files.replaced if path == "damaged.json"]
    assert 1 <= len(writers) <= 2
    assert threading.current_thread().name not in writers


async def test_a_pull_of_nothing_but_damage_can_be_settled_and_passed(start: Start) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    await raw.send("orders", [b"victim"], acks=Acks.DISK)
    await raw.send("orders", [b"after"], acks=Acks.DISK)
    damage(running, b"victim")

    first = await raw.pull("orders", max_messages=1, timeout_ms=5000)
    second = await raw.pull("orders", expected=1, timeout_ms=5000)

    assert (first.length, first.bodies) == (1, [])
    assert second.bodies == [b"after"]
    assert (await raw.settle(first.runs[0])).settled == 1


async def test_a_damaged_message_is_not_retried_but_its_neighbours_are(start: Start) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    for body in (b"first", b"victim", b"third"):
        await raw.send("orders", [body], acks=Acks.DISK)
    held = await raw.pull("orders")
    damage(running, b"victim")

    await raw.settle(held.runs[0], nacked={0: "", 1: "", 2: ""})
    retried = await raw.pull("%retry%orders%g", timeout_ms=5000)

    assert retried.bodies == [b"first", b"third"]


async def test_a_read_passes_over_damage(start: Start) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    for body in (b"victim", b"after"):
        await raw.send("orders", [body], acks=Acks.DISK)
    damage(running, b"victim")

    _, messages = await raw.read("orders", 0, max_messages=1)

    assert [message.body for message in messages] == [b"after"]


async def test_a_read_passes_over_very_much_damage(start: Start) -> None:
    running = await start(storage=NO_CACHE)
    raw = await running.connect()
    batch = ("orders", pack_batch("orders", [b"victim"]))
    for _ in range(2):
        await raw.ask(Send(Acks.DISK, 10_000, (batch,) * 600), Sent)
    await raw.send("orders", [b"whole"], acks=Acks.DISK)
    (path,) = running.directory.glob("messages/*.log")
    path.write_bytes(path.read_bytes().replace(b"victim", b"Victim"))

    at, bodies = 0, list[bytes]()
    while not bodies:
        answer, messages = await raw.read("orders", at, max_messages=1)
        assert answer.first_sequence + answer.count > at
        at = answer.first_sequence + answer.count
        bodies = [message.body for message in messages]

    assert bodies == [b"whole"]
    assert (await raw.status())["messages_damaged"] == 1200

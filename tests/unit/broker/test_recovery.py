"""What a broker does before it serves, and how often it writes down where it stands."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulque.broker.config import StorageSection
from pulque.errors import DataDirectoryError
from pulque.rules.consumption_state import load_state
from pulque.storage.checkpoint import Mark, read_checkpoint
from pulque.storage.files import File, OsFileSystem
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection
from pulque.wire.requests import Acks
from tests.unit.broker.running import Running, Start, eventually, numbered


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class WatchedDirectory(OsFileSystem):
    """Looks, at every file that is opened or renamed, whether the port is open already."""

    def __init__(self, root: Path, port: int) -> None:
        super().__init__(str(root))
        self._port = port
        self.looks: list[bool] = []

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        self.looks.append(is_open(self._port))
        return super().open(path, create=create, writable=writable)

    def rename(self, source: str, target: str) -> None:
        self.looks.append(is_open(self._port))
        super().rename(source, target)


@pytest.mark.accepts("003-26")
async def test_nothing_is_served_before_recovery_has_ended(
    running: Running, raw: RawConnection, start: Start
) -> None:
    await raw.send("orders", numbered(3))
    await raw.pull("orders")
    killed, port = running.as_if_killed("killed"), free_port()
    files = WatchedDirectory(killed, port)

    again = await start(killed, files=files, listen={"port": port})
    before = list(files.looks)

    assert len(before) > 5
    assert not any(before)
    assert is_open(port)
    assert (await (await again.connect()).pull("orders")).bodies == numbered(3)


async def test_a_directory_that_is_in_use_is_refused(running: Running) -> None:
    with pytest.raises(DataDirectoryError, match="in use"):
        await Running(running.directory, {}, None, None).start()


@pytest.mark.accepts("003-49")
async def test_positions_are_where_they_were_after_a_kill(
    running: Running, raw: RawConnection, start: Start
) -> None:
    await raw.send("orders", numbered(10), acks=Acks.DISK)
    c1 = await raw.pull("orders", consumer="c1", max_messages=4)
    await raw.pull("orders", consumer="c2", max_messages=3)
    await raw.settle(c1.runs[0], consumer="c1", last=1)
    before = await raw.status()

    recovered = await (await start(running.as_if_killed("killed"))).connect()
    after = await recovered.status()

    for part in ("partitions", "groups", "subscriptions"):
        assert after[part] == before[part]
    assert (await recovered.pull("orders", consumer="c1")).bodies == [
        *numbered(2, 2),
        *numbered(3, 7),
    ]
    assert (await recovered.pull("orders", consumer="c2")).bodies == numbered(3, 4)


async def test_positions_set_back_by_a_power_cut_stay_so_though_a_checkpoint_is_damaged(
    start: Start,
) -> None:
    """The disk kept the facts and lost messages; no fact tells that positions were set back."""
    running = await start(storage={"sync_interval": "1m"})
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    (log,) = running.directory.glob("messages/*.log")
    kept = log.stat().st_size
    await raw.send("orders", [b"lost"] * 5)
    (run,) = (await raw.pull("orders")).runs
    assert (await raw.settle(run)).settled == 10
    cut = running.as_if_killed("cut")
    os.truncate(cut / "messages" / log.name, kept)

    after = await start(cut)
    raw = await after.connect()
    await raw.send("orders", numbered(5, 5), acks=Acks.DISK)
    damaged = after.as_if_killed("damaged")
    (damaged / "checkpoints" / after.checkpoints()[-1]).write_bytes(b"?")
    again = await (await start(damaged)).connect()

    assert (await again.pull("orders")).bodies == numbered(5, 5)


async def test_retries_whose_facts_a_power_cut_took_are_replayed_no_more(start: Start) -> None:
    """The disk kept a retry and lost the nack before it: a replay would take it for the next's."""
    running = await start(storage={"sync_interval": "1m"})
    raw = await running.connect()
    await raw.send("orders", numbered(3))
    (run,) = (await raw.pull("orders")).runs
    (log,) = running.directory.glob("actions/*.log")
    kept = log.stat().st_size
    await raw.settle(run, last=0, nacked={0: "no"})

    async def has_retry() -> bool:
        found = (await raw.status())["partitions"]
        return "%retry%orders%g" in {each["name"] for each in found}

    await eventually(has_retry)
    cut = running.as_if_killed("cut")
    os.truncate(cut / "actions" / log.name, kept)
    before = {each.name for each in (cut / "checkpoints").iterdir()}

    after = await start(cut)

    assert before.isdisjoint(after.checkpoints())


async def test_every_start_is_counted_and_told(running: Running, raw: RawConnection) -> None:
    assert raw.welcome is not None
    assert raw.welcome.tenure == (0, 1)

    again = await running.restarted()
    second = await again.connect()

    assert second.welcome is not None
    assert second.welcome.tenure == (0, 2)
    await again.close()


@pytest.mark.accepts("003-22")
async def test_a_checkpoint_holds_both_positions_and_those_of_every_consumer(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(10))
    c1 = await raw.pull("orders", consumer="c1", max_messages=4)
    await raw.pull("orders", consumer="c2", max_messages=3)
    await raw.settle(c1.runs[0], consumer="c1", last=1)
    await running.close()

    files = OsFileSystem(str(running.directory))
    state = read_checkpoint(files, f"checkpoints/{running.checkpoints()[-1]}")

    assert isinstance(state, dict)
    mark = Mark.decode(state)
    (messages,) = running.directory.glob("messages/*.log")
    (actions,) = running.directory.glob("actions/*.log")
    assert mark.message_offset == messages.stat().st_size
    assert mark.action_offset == actions.stat().st_size
    found = load_state(state)
    assert {s.consumer: (s.settled, s.next_pull) for s in found.subscriptions.values()} == {
        "c1": (2, 4),
        "c2": (0, 3),
    }
    assert [group.next_sequence for group in found.groups.values()] == [7]


# -- the rhythm of checkpoints ------------------------------------------------------------------


def test_the_rhythm_is_ten_thousand_records_or_a_minute() -> None:
    section = StorageSection(directory=Path("x"))

    assert section.checkpoint_records == 10_000
    assert section.checkpoint_interval.total_seconds() == 60


@pytest.mark.accepts("003-19", "003-23")
async def test_a_checkpoint_is_written_after_so_many_records(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"checkpoint_records": 20})
    raw = await running.connect()
    clock.advance(2000)
    for _ in range(19):
        await raw.send("orders", [b"x"])
    before = running.checkpoints()

    await raw.send("orders", [b"x"])

    async def is_written() -> bool:
        return running.checkpoints() > before

    await eventually(is_written)
    assert (await raw.status())["batches_sent"] == 20


@pytest.mark.accepts("003-45")
async def test_settles_count_towards_the_next_checkpoint(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"checkpoint_records": 24})
    raw = await running.connect()
    clock.advance(2000)
    await raw.send("orders", numbered(20))
    got = await raw.pull("orders")
    before = running.checkpoints()
    for pull in range(20):
        await raw.settle(got.runs[0], first=pull, last=pull)

    async def is_written() -> bool:
        return running.checkpoints() > before

    await eventually(is_written)
    found = read_checkpoint(running.files, f"checkpoints/{running.checkpoints()[-1]}")
    assert isinstance(found, dict)
    assert [s.settled for s in load_state(found).subscriptions.values()] == [20]


@pytest.mark.accepts("003-19", "003-23")
async def test_a_checkpoint_is_written_after_a_minute_if_anything_happened(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    raw = await running.connect()
    await raw.send("orders", [b"x"])
    before = running.checkpoints()

    clock.advance(59_999)
    await running.house_kept()
    assert running.checkpoints() == before
    clock.advance(1)

    async def is_written() -> bool:
        return running.checkpoints() > before

    await eventually(is_written)
    before = running.checkpoints()
    clock.advance(600_000)
    await running.house_kept()
    assert running.checkpoints() == before


@pytest.mark.accepts("003-21", "003-24", "003-20", "003-18")
async def test_only_what_came_after_the_checkpoint_is_replayed(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, storage={"checkpoint_records": 30})
    raw = await running.connect()
    clock.advance(2000)
    for number in range(30):
        await raw.send("orders", numbered(1, number))
    before = running.checkpoints()

    async def is_written() -> bool:
        return running.checkpoints() > before

    await eventually(is_written)
    for number in range(30, 37):
        await raw.send("orders", numbered(1, number))
    await raw.pull("orders")

    with capture_logs() as lines:
        again = await start(running.as_if_killed("killed"))
    (started,) = (line for line in lines if line["event"] == "broker_started")
    assert started["replayed_batches"] == 7
    assert 1 <= started["replayed_facts"] <= 3
    assert (await (await again.connect()).pull("orders")).bodies == numbered(37)


@pytest.mark.accepts("003-18", "003-20", "004-56")
async def test_without_any_checkpoint_everything_comes_back_from_the_logs(
    running: Running, raw: RawConnection, start: Start
) -> None:
    await raw.send("orders", numbered(5))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], last=1, nacked={0: "no"})
    await raw.pull("%retry%orders%g", timeout_ms=5000)
    killed = running.as_if_killed("killed")
    shutil.rmtree(killed / "checkpoints")
    for derived in (*killed.glob("messages/*.index"), *killed.glob("messages/*.open")):
        derived.unlink()

    recovered = await (await start(killed)).connect()

    assert (await recovered.pull("orders")).bodies == numbered(3, 2)
    assert (await recovered.pull("%retry%orders%g")).bodies == [b"0"]


async def test_a_clean_stop_leaves_nothing_to_replay(running: Running, start: Start) -> None:
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    await raw.pull("orders")
    await running.close()

    with capture_logs() as lines:
        await start()

    (started,) = (line for line in lines if line["event"] == "broker_started")
    assert (started["replayed_batches"], started["replayed_facts"]) == (0, 0)

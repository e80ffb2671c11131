"""When things reach the disk: what is synced, checkpointed and replayed, and what is refused."""

import socket
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.recovery import recover
from pulque.errors import ErrorCode
from pulque.model.pack import ProducedBy
from pulque.storage.events import SilentListener
from pulque.storage.files import File, OsFileSystem
from pulque.storage.options import StorageOptions
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.broker.running import Running, Start, eventually, numbered

NEVER = {"sync_interval": "1min"}


def settings() -> BrokerSettings:
    return BrokerSettings.model_validate({"storage": {"directory": "/nowhere"}})


def replayed(directory: Path) -> tuple[int, int]:
    """Return how many batches and facts a start on this directory has to replay."""
    engine, recovered = recover(
        OsFileSystem(str(directory)), StorageOptions(), SilentListener(), now_ms=1
    )
    engine.close()
    return recovered.batches, recovered.facts


async def checkpoints(running: Running) -> int:
    names = [p.name for p in (running.directory / "checkpoints").glob("*.checkpoint")]
    return max(int(name.partition(".")[0]) for name in names)


@pytest.mark.accepts("004-50", "000-16")
async def test_memory_is_answered_before_anything_is_synced(start: Start) -> None:
    raw = await (await start(storage=NEVER)).connect()

    outcome = await raw.send("orders", numbered(3), acks=Acks.MEMORY)

    log = (await raw.status())["message_log"]
    assert outcome.code is ErrorCode.NONE
    assert log["synced"] < log["end"]


@pytest.mark.accepts("004-51", "004-06")
async def test_many_sends_that_wait_for_the_disk_share_its_syncs(start: Start) -> None:
    raw = await (await start(storage=NEVER)).connect()
    before = (await raw.status())["syncs"]
    sends = [
        Send(Acks.DISK, 10_000, (("orders", pack_batch("orders", [b"%d" % n])),))
        for n in range(300)
    ]

    ids = [await raw.put(send) for send in sends]
    answers = [expect(await raw.answer_to(each), Sent) for each in ids]

    after = await raw.status()
    assert all(a.outcomes[0].code is ErrorCode.NONE for a in answers)
    assert 0 < after["syncs"] - before < len(sends) / 3
    assert after["message_log"]["synced"] == after["message_log"]["end"]


@pytest.mark.accepts("004-52")
async def test_whoever_waits_for_the_disk_waits_for_a_sync_at_each_send(start: Start) -> None:
    raw = await (await start(storage=NEVER)).connect()
    syncs = [(await raw.status())["syncs"]]

    for acks in (Acks.MEMORY, Acks.DISK):
        for number in range(20):
            await raw.send("orders", [b"%d" % number], acks=acks)
        syncs.append((await raw.status())["syncs"])

    assert syncs[1] == syncs[0], "nobody waited for the disk"
    assert syncs[2] >= syncs[1] + 20


async def test_disk_is_not_answered_before_it_is_synced(tmp_path: Path) -> None:
    files = MemoryFileSystem()
    running = Running(tmp_path / "data", {"storage": NEVER}, None, files)
    await running.start()
    raw = await running.connect()
    await raw.send("orders", numbered(5), acks=Acks.DISK)

    survivor = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    await running.close()
    again = Running(tmp_path / "again", {"storage": NEVER}, None, survivor)
    await again.start()

    _, messages = await (await again.connect()).read("orders")
    assert [m.body for m in messages] == numbered(5)
    await again.close()


@pytest.mark.accepts("003-16", "003-17")
async def test_both_logs_are_synced_again_and_again(start: Start) -> None:
    assert settings().storage.sync_interval == timedelta(milliseconds=500)
    raw = await (await start(storage={"sync_interval": "5ms"})).connect()
    await raw.send("orders", numbered(3), acks=Acks.MEMORY)

    async def is_synced() -> bool:
        log = (await raw.status())["message_log"]
        return bool(log["synced"] == log["end"])

    await eventually(is_synced)


@pytest.mark.accepts("003-19", "003-21", "003-23", "003-24", "003-45")
async def test_a_checkpoint_comes_after_so_many_records_and_bounds_the_replay(
    start: Start,
) -> None:
    chosen = settings().storage
    assert (chosen.checkpoint_records, chosen.checkpoint_interval.total_seconds()) == (10_000, 60)
    running = await start(storage={"checkpoint_records": 20})
    raw = await running.connect()
    before = await checkpoints(running)
    for number in range(10):
        await raw.send("orders", [b"%d" % number])
        got = await raw.pull("orders", expected=number)
        await raw.settle(got.runs[0])

    async def is_written() -> bool:
        return await checkpoints(running) > before

    await eventually(is_written)
    await raw.send("orders", [b"after"])
    batches, facts = replayed(running.as_if_killed("copy"))

    assert batches == 1
    assert facts == 0


@pytest.mark.accepts("003-22")
async def test_a_checkpoint_keeps_where_everybody_is(start: Start, tmp_path: Path) -> None:
    running = await start()
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    got = await raw.pull("orders", max_messages=3)
    await raw.settle(got.runs[0], last=1)
    await running.close()

    batches, facts = replayed(tmp_path / "data")
    again = await start()
    report = await (await again.connect()).status()

    assert (batches, facts) == (0, 0)
    (subscription,) = report["subscriptions"]
    assert (subscription["settled"], subscription["next_pull"]) == (2, 3)


class Watched(OsFileSystem):
    """Tries to reach a port whenever a file is opened."""

    def __init__(self, root: str, port: int) -> None:
        super().__init__(root)
        self._port = port
        self.reached: list[bool] = []

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        with socket.socket() as probe:
            self.reached.append(probe.connect_ex(("127.0.0.1", self._port)) == 0)
        return super().open(path, create=create, writable=writable)


@pytest.mark.accepts("003-26")
async def test_nothing_is_served_before_recovery_has_ended(start: Start) -> None:
    first = await start()
    raw = await first.connect()
    await raw.send("orders", numbered(5))
    await raw.pull("orders", max_messages=2)
    await first.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = Watched(str(first.directory), port)

    again = await start(files=files, listen={"port": port})
    recovery = len(files.reached)
    got = await (await again.connect()).pull("orders")

    assert recovery > 3
    assert not any(files.reached[:recovery])
    assert got.bodies == numbered(5)


@pytest.mark.accepts("003-42")
async def test_what_cannot_be_stored_is_refused_and_nothing_of_it_is_seen(tmp_path: Path) -> None:
    files = MemoryFileSystem()
    running = Running(tmp_path / "data", {}, None, files)
    await running.start()
    raw = await running.connect()
    await raw.send("orders", [b"before"])

    files.room = 0
    refused = await raw.send("orders", [b"no room"])
    files.room = None

    async def is_stored() -> bool:
        return (await raw.send("orders", [b"after"])).code is ErrorCode.NONE

    await eventually(is_stored)
    _, messages = await raw.read("orders")
    await running.close()

    assert refused.code is ErrorCode.STORAGE_FULL
    assert [m.body for m in messages] == [b"before", b"after"]


@pytest.mark.accepts("003-43", "000-17")
async def test_a_written_batch_is_indexed_and_can_be_pulled(raw: RawConnection) -> None:
    outcome = await raw.send("orders", numbered(3))

    got = await raw.pull("orders")

    assert outcome.first_sequence == 0
    assert [(int(m.sequence), m.body) for run in got.runs for m in run.messages] == list(
        enumerate(numbered(3))
    )


@pytest.mark.accepts("004-09")
async def test_a_batch_that_is_sent_again_is_stored_once_over_connections_and_restarts(
    running: Running,
) -> None:
    mine = ProducedBy(producer_id=7, incarnation=1, sequence=0)
    first = await (await running.connect()).send("orders", [b"once"], produced_by=mine)
    second = await (await running.connect()).send("orders", [b"once"], produced_by=mine)
    again = await running.restarted()
    raw = await again.connect()
    third = await raw.send("orders", [b"once"], produced_by=mine)
    _, messages = await raw.read("orders")
    await again.close()

    assert [o.is_duplicate for o in (first, second, third)] == [False, True, True]
    assert {o.first_sequence for o in (first, second, third)} == {0}
    assert len(messages) == 1

"""When a send is answered, when its messages are seen, and what a failing disk does to it."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest

from pulque.broker.config import StorageSection
from pulque.errors import ErrorCode, StorageError, StorageFullError
from pulque.model.pack import ProducedBy
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.requests import Acks, Send, Status, encode_request
from pulque.wire.responses import Sent
from tests.unit.broker.disks import GatedDisk
from tests.unit.broker.running import Running, Start, eventually, numbered


def send_of(partition: str, *bodies: bytes, acks: Acks = Acks.DISK) -> Send:
    return Send(acks, 10_000, ((partition, pack_batch(partition, bodies)),))


@pytest.fixture
async def disk() -> AsyncIterator[GatedDisk]:
    found = GatedDisk()
    yield found
    found.open_gate()


@pytest.fixture
async def gated(start: Start, disk: GatedDisk) -> Running:
    """A broker whose syncs can be held up, and that syncs only when it must."""
    return await start(files=disk, storage={"sync_interval": "1m"})


async def is_syncing(disk: GatedDisk) -> bool:
    return disk.syncs_waiting > 0


@pytest.mark.accepts("004-51")
async def test_a_send_that_asks_for_the_disk_is_answered_after_the_sync(
    gated: Running, disk: GatedDisk
) -> None:
    raw, other = await gated.connect(), await gated.connect()
    disk.close_gate()
    request = await raw.put(send_of("orders", b"x"))
    await eventually(lambda: is_syncing(disk))

    assert not await raw.is_answered(request)
    disk.open_gate()

    assert expect(await raw.answer_to(request), Sent).outcomes[0].code is ErrorCode.NONE
    status = await other.status()
    assert status["message_log"]["synced"] == status["message_log"]["end"]


@pytest.mark.parametrize("is_at_once", [True, False], ids=["in one turn", "later"])
async def test_a_batch_that_is_sent_again_for_the_disk_is_answered_after_the_sync(
    gated: Running, disk: GatedDisk, *, is_at_once: bool
) -> None:
    raw = await gated.connect()
    batch = ("orders", pack_batch("orders", [b"x"], produced_by=ProducedBy(7, 0, 1)))
    requests = [Send(acks, 10_000, (batch,)) for acks in (Acks.MEMORY, Acks.DISK)]
    disk.close_gate()
    if is_at_once:
        frames = [b"".join(encode_request(each, 1000 + i, 0)) for i, each in enumerate(requests)]
        await raw.put_bytes(b"".join(frames))
        again = 1001
    else:
        assert not (await raw.ask(requests[0], Sent)).outcomes[0].code
        again = await raw.put(requests[1])
    await eventually(lambda: is_syncing(disk))

    assert not await raw.is_answered(again)
    disk.open_gate()
    outcome = expect(await raw.answer_to(again), Sent).outcomes[0]
    assert (outcome.code, outcome.is_duplicate) == (ErrorCode.NONE, True)


@pytest.mark.accepts("004-53")
async def test_a_disk_that_does_not_keep_up_holds_up_senders_and_fills_no_memory(
    start: Start, disk: GatedDisk
) -> None:
    limits = {"max_in_flight": "1MiB", "max_batch": "1MiB", "max_message": "1MiB"}
    running = await start(files=disk, storage={"sync_interval": "1m"}, limits=limits)
    raw, other = await running.connect(), await running.connect()
    disk.close_gate()
    waiting = {await raw.put(send_of("orders", b"x" * 100_000)) for _ in range(50)}
    later = await raw.put(Status())
    while (answered := await raw.get())[0] != later:
        assert expect(answered[1], Sent).outcomes[0].code is ErrorCode.OVERLOADED
        waiting.remove(answered[0])

    assert 10 <= len(waiting) <= 12, "a MiB is taken, and the batch that goes beyond it"
    assert (await other.status())["bytes_unconfirmed"] < 1_300_000
    disk.open_gate()
    for request_id in waiting:
        answer = expect(await raw.answer_to(request_id), Sent)
        assert answer.outcomes[0].code is ErrorCode.NONE
    assert (await raw.send("orders", [b"y"])).first_sequence == len(waiting)


@pytest.mark.accepts("003-43")
async def test_messages_are_seen_once_they_are_confirmed_and_not_before(
    gated: Running, disk: GatedDisk
) -> None:
    raw, other = await gated.connect(), await gated.connect()
    await other.send("orders", [b"old"])
    disk.close_gate()
    request = await raw.put(send_of("orders", b"new"))
    await eventually(lambda: is_syncing(disk))

    assert (await other.pull("orders")).bodies == [b"old"]
    assert (await other.read("orders"))[0].end == 1
    disk.open_gate()
    await raw.answer_to(request)

    assert (await other.pull("orders", expected=1)).bodies == [b"new"]


@pytest.mark.accepts("004-50", "000-16")
async def test_a_send_that_asks_for_memory_is_answered_and_seen_before_any_sync(
    gated: Running, disk: GatedDisk
) -> None:
    raw = await gated.connect()
    await raw.send("orders", [b"first"])
    disk.close_gate()
    synced = (await raw.status())["message_log"]["synced"]

    outcome = await raw.send("orders", [b"x"], acks=Acks.MEMORY)

    assert outcome.code is ErrorCode.NONE
    assert (await raw.pull("orders", expected=0)).bodies == [b"first", b"x"]
    status = await raw.status()
    assert status["message_log"]["synced"] == synced < status["message_log"]["end"]


async def test_behind_a_batch_that_waits_for_the_disk_all_of_its_partition_wait_to_be_seen(
    gated: Running, disk: GatedDisk
) -> None:
    raw, other = await gated.connect(), await gated.connect()
    disk.close_gate()
    request = await raw.put(send_of("orders", b"to disk"))
    await eventually(lambda: is_syncing(disk))

    assert (await other.send("orders", [b"to memory"])).code is ErrorCode.NONE
    assert (await other.pull("orders")).runs == ()
    disk.open_gate()
    await raw.answer_to(request)

    async def are_both_there() -> bool:
        return (await other.pull("orders")).bodies == [b"to disk", b"to memory"]

    await eventually(are_both_there)


@pytest.mark.accepts("004-51")
async def test_many_sends_that_wait_share_one_sync(gated: Running, disk: GatedDisk) -> None:
    first = await gated.connect()
    others = [await gated.connect() for _ in range(8)]
    before = (await first.status())["syncs"]
    disk.close_gate()
    opening = await first.put(send_of("orders", b"first"))
    await eventually(lambda: is_syncing(disk))

    requests = [
        [await raw.put(send_of(f"subject{n % 3}", b"x")) for n in range(10)] for raw in others
    ]
    await eventually(lambda: has_unconfirmed(first, 81))
    disk.open_gate()

    for raw, ids in zip(others, requests, strict=True):
        for request in ids:
            assert expect(await raw.answer_to(request), Sent).outcomes[0].code is ErrorCode.NONE
    expect(await first.answer_to(opening), Sent)
    assert (await first.status())["syncs"] == before + 2


async def has_unconfirmed(raw: RawConnection, sends: int) -> bool:
    size = len(pack_batch("orders", [b"x"]))
    return bool((await raw.status())["bytes_unconfirmed"] >= sends * size)


@pytest.mark.accepts("003-17", "003-16", "000-25")
async def test_both_logs_are_synced_every_so_often_without_being_asked(start: Start) -> None:
    assert StorageSection(directory="x").sync_interval.total_seconds() == 0.5
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "20ms"})
    raw = await running.connect()
    await raw.send("orders", numbered(4))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], last=1)

    async def survives() -> bool:
        left = files.after_power_cut(files.operations, Cut.LOST, Random(0))
        again = Running(running.directory, {}, None, left)
        await again.start()
        try:
            other = await again.connect()
            return (await other.pull("orders")).bodies == [b"2", b"3"]
        finally:
            await again.close()

    await eventually(survives)


async def test_sends_that_wait_are_answered_when_the_broker_stops(
    gated: Running, disk: GatedDisk
) -> None:
    raw = await gated.connect()
    disk.close_gate()
    request = await raw.put(send_of("orders", b"x"))
    await eventually(lambda: is_syncing(disk))
    gated.is_closed = True
    stopping = asyncio.create_task(gated.broker.close())
    disk.open_gate()

    assert expect(await raw.answer_to(request), Sent).outcomes[0].code is ErrorCode.NONE
    await stopping


# -- a disk in trouble --------------------------------------------------------------------------


@pytest.mark.accepts("003-42")
@pytest.mark.parametrize("acks", [Acks.MEMORY, Acks.DISK])
async def test_a_send_that_finds_no_room_gets_an_error_and_leaves_no_trace(
    start: Start, acks: Acks
) -> None:
    files = MemoryFileSystem()
    raw = await (await start(files=files)).connect()
    await raw.send("orders", [b"before"], acks=acks)
    files.fail_after(1, StorageFullError("no room"), part=17)

    failed = await raw.send("orders", [b"lost"], acks=acks)
    after = await raw.send("orders", [b"after"], acks=acks)

    assert failed.code is ErrorCode.STORAGE_FULL
    assert (after.code, after.first_sequence) == (ErrorCode.NONE, 1)
    assert (await raw.pull("orders")).bodies == [b"before", b"after"]


@pytest.mark.accepts("003-42")
async def test_a_send_that_fails_in_the_middle_fails_only_for_what_is_not_stored(
    start: Start,
) -> None:
    """Making partition B writes what was queued for A; when that fails, A's place is free."""
    files = MemoryFileSystem()
    raw = await (await start(files=files)).connect()
    await raw.send("a", [b"0"])
    batches = tuple((name, pack_batch(name, [b"x"])) for name in ("a", "b", "a", "c"))
    files.fail_after(1, StorageFullError("no room"))

    answer = await raw.ask(Send(Acks.DISK, 1000, batches), Sent)

    assert [o.code for o in answer.outcomes] == [
        ErrorCode.STORAGE_FULL,
        ErrorCode.STORAGE_FULL,
        ErrorCode.NONE,
        ErrorCode.NONE,
    ]
    assert answer.outcomes[2].first_sequence == 1
    assert (await raw.status())["bytes_unconfirmed"] == 0


@pytest.mark.accepts("003-42")
async def test_a_failed_sync_is_answered_as_unknown_and_the_broker_stops(start: Start) -> None:
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "1m"})
    raw = await running.connect()
    await raw.send("orders", [b"before"], acks=Acks.DISK)
    files.fail_sync_after(1, StorageError("the disk is gone"))

    outcome = await raw.send("orders", [b"unknown"], acks=Acks.DISK)

    assert outcome.code is ErrorCode.UNAVAILABLE
    async with asyncio.timeout(5):
        with pytest.raises(StorageError):
            await running.broker.stopped()


async def test_after_a_failed_sync_nothing_is_confirmed_any_more(start: Start) -> None:
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "1m"})
    raw = await running.connect()
    files.fail_sync_after(1, StorageError("the disk is gone"))
    await raw.send("orders", [b"unknown"], acks=Acks.DISK)

    for acks in (Acks.MEMORY, Acks.DISK):
        outcome = await raw.send("orders", [b"more"], acks=acks)
        assert outcome.code is not ErrorCode.NONE

    assert (await raw.read("orders"))[0].end == 0


@pytest.mark.parametrize("size", [1, 40_000], ids=["in the segment", "for a new segment"])
async def test_a_batch_that_found_no_room_may_be_sent_again(start: Start, size: int) -> None:
    files = MemoryFileSystem()
    raw = await (await start(files=files, storage={"segment_size": "64KiB"})).connect()
    await raw.send("orders", [b"0" * size], produced_by=ProducedBy(5, 1, 0))
    files.fail_after(1, StorageFullError("no room"))
    failed = await raw.send("orders", [b"1" * size], produced_by=ProducedBy(5, 1, 1))

    again = await raw.send("orders", [b"1" * size], produced_by=ProducedBy(5, 1, 1))

    assert failed.code is ErrorCode.STORAGE_FULL
    assert (again.code, again.is_duplicate, again.first_sequence) == (ErrorCode.NONE, False, 1)


async def test_a_full_disk_refuses_sends_and_serves_all_else(start: Start) -> None:
    files = MemoryFileSystem()
    running = await start(files=files)
    raw = await running.connect()
    await raw.send("orders", numbered(3))
    used = sum(map(len, files.contents().values()))
    files.room = used + 600 * 1024

    async def is_full() -> bool:
        return bool((await raw.status())["is_full"])

    await eventually(is_full)
    refused = await raw.send("orders", [b"no"])
    got = await raw.pull("orders")
    settled = await raw.settle(got.runs[0], nacked={1: "again"})
    retried = await raw.pull("%retry%orders%g", timeout_ms=5000)
    files.room = None

    assert refused.code is ErrorCode.STORAGE_FULL
    assert (got.bodies, settled.settled, retried.bodies) == (numbered(3), 3, [b"1"])

    async def is_taken() -> bool:
        return (await raw.send("orders", [b"yes"])).code is ErrorCode.NONE

    await eventually(is_taken)

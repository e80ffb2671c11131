"""What a delay server confirms, and what it remembers of what it refused."""

from random import Random

import pytest

from pulque.errors import ErrorCode, NotAllowedError, StorageFullError
from pulque.model.batch import seed_of
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import expect
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.malformed import lying
from tests.unit.broker.disks import GatedDisk
from tests.unit.delay.running import FakeBrokers, StartDelay, delayed_batch, eventually

DUE_IN_MS = 3_600_000


@pytest.mark.parametrize("batches", [1, 2])
async def test_a_send_that_waits_for_followers_is_refused_however_many_batches_it_has(
    start_delay: StartDelay, clock: ManualClock, batches: int
) -> None:
    delay = await start_delay()
    batch, _ = delayed_batch([(b"later", clock.now_ms() + DUE_IN_MS)])
    request = Send(Acks.REPLICA, 10_000, (("orders", batch),) * batches)

    with pytest.raises(NotAllowedError, match='acks is "replica", and this server has no foll'):
        await delay.raw.ask(request, Sent)

    assert delay.server.status()["received"]["batches"] == 0
    assert (await delay.send_batch(batch)).code is ErrorCode.NONE


@pytest.mark.parametrize("size", [1, 40_000], ids=["in the segment", "for a new segment"])
async def test_a_batch_that_found_no_room_may_be_sent_again_and_is_delivered(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, size: int
) -> None:
    files = MemoryFileSystem()
    delay = await start_delay(files=files, storage={"segment_size": "64KiB"})
    due_ms = clock.now_ms() + DUE_IN_MS
    bodies = [b"0" * size, b"1" * size]
    first, _ = delayed_batch([(bodies[0], due_ms)], produced_by=ProducedBy(5, 1, 0))
    second, _ = delayed_batch([(bodies[1], due_ms)], first_id=1, produced_by=ProducedBy(5, 1, 1))
    assert not (await delay.send_batch(first)).code
    await delay.caught_up()  # so that the next write is one of the message log
    files.fail_after(1, StorageFullError("no room"))
    failed = await delay.send_batch(second)

    again = await delay.send_batch(second)

    assert failed.code is ErrorCode.STORAGE_FULL
    assert (again.code, again.is_duplicate) == (ErrorCode.NONE, False)
    clock.set_now_ms(due_ms)
    await eventually(lambda: sorted(brokers.bodies) == bodies)


@pytest.mark.accepts("001-39")
async def test_a_batch_that_is_sent_twice_is_answered_twice_after_the_disk(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers
) -> None:
    disk = GatedDisk()
    delay = await start_delay(files=disk, storage={"sync_interval": "1m"})
    due_ms = clock.now_ms() + DUE_IN_MS
    batch, _ = delayed_batch([(b"later", due_ms)], produced_by=ProducedBy(5, 1, 0))
    request = Send(Acks.DISK, 10_000, (("orders", batch),))
    disk.close_gate()
    ids = [await delay.raw.put(request)]
    await eventually(lambda: disk.syncs_waiting > 0)
    ids.append(await delay.raw.put(request))

    assert not await delay.raw.is_answered(ids[1])
    assert not await delay.raw.is_answered(ids[0])
    disk.open_gate()
    answers = [expect(await delay.raw.answer_to(each), Sent).outcomes[0] for each in ids]
    left = disk.after_power_cut(disk.operations, Cut.LOST, Random(1))

    assert [each.code for each in answers] == [ErrorCode.NONE] * 2
    await start_delay(files=left)
    clock.set_now_ms(due_ms)
    await eventually(lambda: brokers.bodies == [b"later"])


@pytest.mark.parametrize("count", [1, 3])
async def test_headers_of_the_system_are_refused_but_for_what_is_deferred(
    start_delay: StartDelay, clock: ManualClock, count: int
) -> None:
    delay = await start_delay()
    codes = []
    for partition, headers in (
        ("orders", {"pulque.dead": "x"}),
        ("orders", {"mine": "x"}),
        ("%retry%orders%g", {"pulque.dead": "x"}),
    ):
        packer = BatchPacker()
        for _ in range(count):
            packer.add(b"x", headers=headers, due_at_ms=clock.now_ms() + DUE_IN_MS)
        batch = packer.encode(seed=seed_of(partition), ids=bytes(16 * count), created_at_ms=1)
        codes.append((await delay.send_batch(batch, partition)).code)

    assert codes == [ErrorCode.NOT_ALLOWED, ErrorCode.NONE, ErrorCode.NONE]


async def test_a_batch_that_is_sent_again_for_the_disk_is_answered_after_it(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    disk = GatedDisk()
    delay = await start_delay(files=disk, storage={"sync_interval": "1m"})
    due_ms = clock.now_ms() + DUE_IN_MS
    batch, _ = delayed_batch([(b"later", due_ms)], produced_by=ProducedBy(5, 1, 0))
    disk.close_gate()
    first = await delay.raw.ask(Send(Acks.MEMORY, 10_000, (("orders", batch),)), Sent)
    again = await delay.raw.put(Send(Acks.DISK, 10_000, (("orders", batch),)))

    await eventually(lambda: disk.syncs_waiting > 0)
    assert not await delay.raw.is_answered(again)
    disk.open_gate()
    answer = expect(await delay.raw.answer_to(again), Sent)
    assert first.outcomes[0].code is ErrorCode.NONE
    assert (answer.outcomes[0].code, answer.outcomes[0].is_duplicate) == (ErrorCode.NONE, True)


async def test_a_compressed_batch_whose_messages_brokers_would_refuse_is_refused(
    start_delay: StartDelay, clock: ManualClock
) -> None:
    """They leave uncompressed, and then each broker sees that their parts do not fit."""
    delay = await start_delay()
    batch = lying("orders", clock.now_ms() + DUE_IN_MS)

    assert (await delay.send_batch(batch)).code is ErrorCode.INVALID_BATCH

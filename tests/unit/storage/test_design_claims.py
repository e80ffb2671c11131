"""What the design claims about cost, shown on the engine: files, reads, copies and writes."""

from pathlib import Path

import pytest

from pulque.model.actions import Pulled, SubscriptionId
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.storage.action_log import encode_action
from pulque.storage.engine import Engine
from pulque.storage.files import Buffer, WouldBlockError
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import opened, store

ROOT = Path(__file__).parents[3]
ORDERS = PartitionName("orders")


def read(engine: Engine, name: PartitionName) -> list[Buffer]:
    partition = engine.partition(name)
    assert partition is not None
    span = engine.span(partition, ConsumeSequence(0), max_messages=10_000, max_bytes=1 << 30)
    return engine.read(partition, span)


@pytest.mark.accepts("000-24", "004-59", "004-05")
def test_a_new_batch_is_handed_out_as_the_very_bytes_that_arrived() -> None:
    engine = opened(MemoryFileSystem())
    batch = store(engine, ORDERS, b"one", b"two")

    buffers = read(engine, ORDERS)

    assert any(buffer is batch for buffer in buffers)


@pytest.mark.accepts("003-14", "004-59")
def test_batches_from_a_file_are_views_into_one_read() -> None:
    engine = opened(MemoryFileSystem(), tail_cache_bytes=0)
    batches = [store(engine, ORDERS, b"one"), store(engine, ORDERS, b"two")]

    buffers = read(engine, ORDERS)

    views = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert len(views) == len(buffers) == len(batches)
    assert len({id(view.obj) for view in views}) == 1


@pytest.mark.accepts("003-14")
def test_looking_up_where_messages_lie_reads_no_message() -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    store(engine, ORDERS, b"one")
    partition = engine.partition(ORDERS)
    assert partition is not None
    files.cold = True

    span = engine.span(
        partition, ConsumeSequence(0), max_messages=10, max_bytes=1000, may_block=False
    )

    assert span.length == 1
    with pytest.raises(WouldBlockError):
        engine.read(partition, span, may_block=False)


@pytest.mark.accepts("003-02")
def test_a_pull_costs_one_small_fact_however_many_messages_it_hands_out() -> None:
    def fact(count: int) -> bytes:
        tenure = Tenure(Epoch(0), StartCount(1))
        where = PullSequence(5), ConsumeSequence(7)
        return encode_action(Pulled(SubscriptionId(1), tenure, *where, count, 1))

    assert len(fact(1)) == len(fact(10_000)) <= 48


@pytest.mark.accepts("000-06", "000-15", "003-01", "004-54")
def test_files_grow_in_number_with_segments_and_not_with_subjects() -> None:
    def names_and_writes(subjects: int) -> tuple[set[str], int]:
        files = MemoryFileSystem()
        engine = opened(files)
        for number in range(subjects):
            engine.create_partition(PartitionName(f"subject{number}"), 1)
        before = files.operations
        for number in range(100):
            store(engine, PartitionName(f"subject{number % subjects}"), b"body")
        return set(files.contents()), files.operations - before

    one, many = names_and_writes(1), names_and_writes(1000)

    assert one == many


@pytest.mark.accepts("004-55")
def test_a_cold_pull_reads_the_index_and_then_the_log_once() -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    for number in range(50):
        store(engine, ORDERS, b"%d" % number)
    engine.roll(2)
    job = engine.begin_index()
    assert job is not None
    job.run()
    engine.finish_index(job)
    partition = engine.partition(ORDERS)
    assert partition is not None
    span = engine.span(partition, ConsumeSequence(0), max_messages=50, max_bytes=1 << 20)

    buffers = engine.read(partition, span)

    assert span.length == 50
    assert len({id(buffer.obj) for buffer in buffers if isinstance(buffer, memoryview)}) == 1


@pytest.mark.accepts("004-55", "003-18")
def test_two_files_cannot_disagree_as_one_is_made_from_the_other() -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    store(engine, ORDERS, b"one", b"two")
    engine.roll(2)
    job = engine.begin_index()
    assert job is not None
    job.run()
    engine.finish_index(job)
    checkpoint = engine.begin_checkpoint({})
    checkpoint.run()
    before = b"".join(map(bytes, read(engine, ORDERS)))
    engine.close()

    for name in [n for n in files.contents() if n.endswith(".index")]:
        files.remove(name)
    again = opened(files, tail_cache_bytes=0)

    assert b"".join(map(bytes, read(again, ORDERS))) == before


@pytest.mark.accepts("004-49", "004-53", "004-57", "004-58")
def test_the_facts_about_disks_are_written_down_with_a_measurement_beside_each() -> None:
    page = (ROOT / "docs/guide/disks.md").read_text(encoding="utf-8")
    bench = (ROOT / "bench/micro/disk.py").read_text(encoding="utf-8")

    for item in ("004-49", "004-53", "004-57", "004-58"):
        row = next(line for line in page.splitlines() if line.startswith(f"| {item} "))
        measured = row.split("|")[3].strip(" `")
        assert f'"{measured}"' in bench, f"{measured} is measured nowhere"

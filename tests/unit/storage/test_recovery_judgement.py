"""What recovery makes of bytes that are no record: a torn tail, or corruption; never a guess."""

from collections.abc import Callable

import pytest

from pulque.errors import CorruptionError, UsageError
from pulque.model.actions import ConsumerLost, NackedDelivery, Settled, SubscriptionId
from pulque.model.batch import read_header
from pulque.model.names import PartitionName
from pulque.model.positions import PullSequence
from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.checkpoint import MARK_KEY, Checkpoints, Mark
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.testing.files import MemoryFileSystem
from tests.crash.opening import Opened, open_engine
from tests.crash.workload import SMALL
from tests.unit.storage.storing import bodies_of, index_all, opened, packed, store

FIRST = "messages/00000000000000000000.log"
FACTS = "actions/00000000000000000000.log"
FACT = ConsumerLost(SubscriptionId(1), "silent", 5)


def reopened(files: MemoryFileSystem) -> Opened:
    return open_engine(files, SMALL, 1)


def change(files: MemoryFileSystem, path: str, offset: int, data: bytes) -> None:
    file = files.open(path)
    file.write([data], offset)
    file.close()


def sync(engine: Engine) -> None:
    job = engine.begin_sync(actions=True)
    assert job is not None
    job.run()
    engine.finish_sync(job)


def stored_twice(files: MemoryFileSystem) -> tuple[int, int]:
    """Store two batches, the first one synced; return where the second one lies, and its size."""
    engine = opened(files)
    store(engine, "orders", b"first")
    sync(engine)
    offset = engine.end
    store(engine, "orders", b"second")
    size = engine.end - offset
    engine.close()
    return offset, size


TORN: dict[str, Callable[[int, int], tuple[int, bytes]]] = {
    "the whole record": lambda offset, size: (offset, bytes(size)),
    "the batch": lambda offset, size: (offset + ENVELOPE_SIZE, bytes(size - ENVELOPE_SIZE)),
    "the last byte": lambda offset, size: (offset + size - 1, b"\0"),
    "the envelope": lambda offset, size: (offset, bytes(ENVELOPE_SIZE)),
}


@pytest.mark.parametrize("part", TORN)
def test_zeros_at_the_end_are_cut_and_the_log_goes_on(part: str) -> None:
    files = MemoryFileSystem()
    offset, size = stored_twice(files)
    change(files, FIRST, *TORN[part](offset, size))
    found = reopened(files)

    assert found.heard.cuts == [(FIRST, offset, size)]
    assert not found.heard.corruptions
    assert bodies_of(found.engine, "orders") == [b"first"]
    store(found.engine, "orders", b"third")
    found.engine.close()
    again = reopened(files)
    assert bodies_of(again.engine, "orders") == [b"first", b"third"]
    assert not again.heard.cuts


def test_a_short_end_is_cut() -> None:
    files = MemoryFileSystem()
    offset, size = stored_twice(files)
    files.open(FIRST).truncate(offset + size - 1)

    assert reopened(files).heard.cuts == [(FIRST, offset, size - 1)]


def test_noise_behind_the_last_record_is_cut() -> None:
    files = MemoryFileSystem()
    offset, size = stored_twice(files)
    change(files, FIRST, offset + size, b"PL\x01\x01 noise")
    found = reopened(files)

    assert [cut[1] for cut in found.heard.cuts] == [offset + size]
    assert bodies_of(found.engine, "orders") == [b"first", b"second"]


def test_a_batch_that_was_synced_is_not_cut_and_numbering_goes_on() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    engine.create_partition(PartitionName("orders"), 1)
    offset = engine.end
    store(engine, "orders", b"1", b"2")
    size = engine.end - offset
    sync(engine)
    store(engine, "orders", b"3")
    engine.close()
    change(files, FIRST, offset + size - 1, b"\xff")
    found = reopened(files)

    assert found.heard.corruptions == [(FIRST, offset, size, "the batch's crc does not match")]
    assert not found.heard.cuts
    assert bodies_of(found.engine, "orders") == [b"3"]
    assert found.engine.partitions.by_name["orders"].end == 3
    store(found.engine, "orders", b"4")
    assert bodies_of(found.engine, "orders") == [b"3", b"4"]


def test_an_envelope_behind_it_is_proof_enough_even_if_its_batch_is_torn() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    offset = engine.end
    store(engine, "orders", b"2")
    sync(engine)
    last = engine.end
    store(engine, "orders", b"3")
    engine.close()
    change(files, FIRST, offset, b"\0\0")
    files.open(FIRST).truncate(last + ENVELOPE_SIZE + 5)
    found = reopened(files)

    assert [c[1] for c in found.heard.corruptions] == [offset]
    assert [c[1] for c in found.heard.cuts] == [last]


def test_a_partition_whose_table_is_damaged_is_known_to_the_next_segment() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    offset = engine.end
    store(engine, "orders", b"1")
    store(engine, "others", b"2")
    engine.roll(1)
    sync(engine)
    store(engine, "others", b"3")
    engine.close()
    change(files, FIRST, offset + ENVELOPE_SIZE + 3, b"\xff")
    found = reopened(files)

    assert [c[3] for c in found.heard.corruptions] == ["the partition table's crc does not match"]
    assert bodies_of(found.engine, "orders") == [b"1"]
    assert bodies_of(found.engine, "others") == [b"2", b"3"]


def test_a_partition_that_no_table_knows_is_reported() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    offset = engine.end
    store(engine, "orders", b"1")
    sync(engine)
    store(engine, "others", b"2")
    engine.close()
    change(files, FIRST, offset + ENVELOPE_SIZE + 3, b"\xff")
    found = reopened(files)

    assert [c[3] for c in found.heard.corruptions][1] == "partition 1 is in no table"
    assert bodies_of(found.engine, "others") == [b"2"]


def test_a_segment_that_is_longer_than_it_may_be_is_reported() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.roll(1)
    store(engine, "orders", b"2")
    base = engine.segments[1].base
    engine.close()
    change(files, FIRST, base, b"more")
    found = reopened(files)

    assert found.heard.corruptions == [(FIRST, base, 4, "the next segment begins earlier")]
    assert bodies_of(found.engine, "orders") == [b"1", b"2"]


def test_a_new_segment_without_its_table_is_begun_again() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    sync(engine)
    engine.roll(1)
    path = engine.segments[1].path
    engine.close()
    files.open(path).truncate(0)
    found = reopened(files)

    assert found.engine.segments[-1].path == path
    assert found.engine.segments[-1].end > found.engine.segments[-1].base
    store(found.engine, "orders", b"2")
    index_all(found.engine)
    assert bodies_of(reopened(files).engine, "orders") == [b"1", b"2"]


class TestCheckpoints:
    @pytest.mark.parametrize(
        "state",
        [
            {MARK_KEY: b"short"},
            {MARK_KEY: Mark(message_offset=2**63).encode()},
            {b"p\1\0\0\0": b"short"},
            {b"p\1\0\0\0": b"\xff" * 16 + b"orders"},
            {b"p\1\0\0\0": bytes(16) + b"\xff\xff"},
        ],
    )
    def test_one_that_makes_no_sense_is_refused(self, state: dict[bytes, bytes | None]) -> None:
        files = MemoryFileSystem()
        opened(files).close()
        checkpoints = Checkpoints(files, SilentListener())
        checkpoints.update(state)
        checkpoints.write()

        with pytest.raises(CorruptionError, match="checkpoints"):
            opened(files)


class TestFacts:
    def test_zeros_at_the_end_are_cut_and_the_log_goes_on(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        engine.append_action(FACT)
        end = engine.actions.end
        engine.close()
        change(files, FACTS, end, bytes(100))
        found = reopened(files)

        assert found.heard.cuts == [(FACTS, end, 100)]
        assert found.facts == [FACT]
        found.engine.append_action(FACT)
        found.engine.close()
        assert reopened(files).facts == [FACT, FACT]

    def test_a_fact_that_was_synced_is_not_cut(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        engine.append_action(FACT)
        end = engine.actions.end
        sync(engine)
        engine.append_action(FACT)
        engine.append_action(FACT)
        engine.close()
        change(files, FACTS, end - 1, b"\xff")
        found = reopened(files)

        assert found.heard.corruptions == [(FACTS, 0, end, "facts cannot be read")]
        assert not found.heard.cuts
        assert found.facts == [FACT, FACT]

    def test_the_only_segment_may_be_torn_as_a_whole_twice(self) -> None:
        """Those before it went with the checkpoint, and nothing of its own was promised."""
        files = MemoryFileSystem()
        engine = opened(files)
        engine.append_action(FACT)
        engine.actions.start_segment(())
        for _ in range(2):  # the log is kept from the older of two checkpoints on
            job = engine.begin_checkpoint({})
            job.run()
            engine.finish_checkpoint(job)
        base = engine.actions.end
        engine.append_action(FACT)
        lost = engine.actions.end - base
        engine.close()
        (name,) = files.list("actions")
        change(files, f"actions/{name}", 0, bytes(lost))
        first, second = reopened(files), reopened(files)

        assert first.heard.cuts == [(f"actions/{name}", base, lost)]
        assert not first.heard.corruptions + second.heard.corruptions + second.heard.cuts
        second.engine.append_action(FACT)
        second.engine.close()
        assert reopened(files).facts == [FACT]

    @pytest.mark.parametrize("count", [20_000, 70_000])
    def test_one_that_is_too_large_is_refused_and_nothing_written(self, count: int) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        end = engine.actions.end
        nacked = NackedDelivery(PullSequence(1), 0, "x" * 1000)
        fact = Settled(SubscriptionId(1), PullSequence(1), PullSequence(2), (nacked,) * count, 1)

        with pytest.raises(UsageError, match="fact"):
            engine.append_action(fact)
        assert engine.actions.end == end
        engine.append_action(FACT)
        assert list(engine.actions.replay(end)) == [FACT]


def test_a_batch_larger_than_the_search_window_is_walked() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    body = b"PL\x01\x01" * (5 * 1024 * 1024 // 4)
    partition = engine.create_partition(PartitionName("orders"), 1)
    batch = packed("orders", body, b"small")
    engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=False)
    engine.write()
    sync(engine)
    store(engine, "orders", b"last")
    engine.close()

    assert bodies_of(opened(files), "orders") == [body, b"small", b"last"]

"""What the design claims about cost, shown on the engine: files, reads, copies and writes."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.micro.disk import measure
from pulque.model.actions import Pulled, SubscriptionId
from pulque.model.names import PartitionName
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    MessageOffset,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.storage.directory.layout import segment_path
from pulque.storage.engine import Engine
from pulque.storage.files import Buffer, File, WouldBlockError
from pulque.storage.indexes.segment_index import SealedIndex
from pulque.storage.logs.action_log import encode_action
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import bodies_of, index_all, opened, store

ROOT = Path(__file__).parents[3]
ORDERS = PartitionName("orders")


def read(engine: Engine, name: PartitionName) -> list[Buffer]:
    partition = engine.partition(name)
    assert partition is not None
    span = engine.span(partition, ConsumeSequence(0), max_messages=10_000, max_bytes=1 << 30)
    return engine.read(partition, span)


@pytest.mark.accepts("004-59", "004-05")
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


# -- what is asked of the disk --------------------------------------------------------------------


class Request(NamedTuple):
    """One read or write of a file."""

    kind: str
    path: str
    offset: int
    size: int


class WatchedFiles(MemoryFileSystem):
    """Writes down what is read and written, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return _WatchedFile(self, path, super().open(path, create=create, writable=writable))

    def seen(self, kind: str, suffix: str) -> list[Request]:
        return [each for each in self.requests if each.kind == kind and suffix in each.path]


class _WatchedFile:
    def __init__(self, files: WatchedFiles, path: str, file: File) -> None:
        self._files, self._path, self._file = files, path, file
        self.sync, self.truncate = file.sync, file.truncate
        self.size, self.close = file.size, file.close

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        self._files.requests.append(Request("read", self._path, offset, size))
        return self._file.read(size, offset, may_block=may_block)

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        self._files.requests.append(Request("read", self._path, offset, len(buffer)))
        return self._file.read_into(buffer, offset, is_cached=is_cached)

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        size = self._file.write(buffers, offset)
        self._files.requests.append(Request("write", self._path, offset, size))
        return size


@pytest.mark.accepts("004-49")
def test_the_newest_messages_are_read_from_memory_and_neighbours_in_one_read() -> None:
    files = WatchedFiles()
    engine = opened(files, tail_cache_bytes=4000)
    for number in range(20):
        store(engine, ORDERS, b"%d" % number * 500)
    files.requests.clear()

    newest = bodies_of(engine, ORDERS, 18)
    assert [body[:2] for body in newest] == [b"18", b"19"]
    assert files.requests == [], "these are in memory"

    oldest = bodies_of(engine, ORDERS, 0, step=10)[:10]
    assert [body[:1] for body in oldest] == [b"%d" % number for number in range(10)]
    first, *_ = files.seen("read", ".log")
    assert first.size > 10 * 500, "ten neighbours are one read"


@pytest.mark.accepts("004-57")
def test_scattered_messages_are_read_in_the_order_in_which_they_lie() -> None:
    files = WatchedFiles()
    engine = opened(files, tail_cache_bytes=0)
    for number in range(60):
        # Neighbours of others lie between: a reader of one subject skips forward.
        store(engine, ORDERS if number % 3 == 0 else f"other{number % 3}", b"x" * 100_000)
    files.requests.clear()

    assert len(bodies_of(engine, ORDERS)) == 20

    offsets = [each.offset for each in files.seen("read", ".log")]
    assert len(offsets) > 5
    assert offsets == sorted(set(offsets)), "a disk's head never goes back"


@pytest.mark.accepts("004-58")
def test_nothing_is_written_in_place_and_an_index_is_sorted_before_it_is_written() -> None:
    files = WatchedFiles()
    engine = opened(files, segment_bytes=10_000)
    for number in range(300):
        store(engine, f"subject{number % 7}", b"%d" % number * 50)
    index_all(engine)

    ends: dict[str, int] = defaultdict(int)
    for each in files.requests:
        if each.kind == "write" and each.path.startswith("messages/"):
            assert each.offset == ends[each.path], f"{each} does not follow what is there"
            ends[each.path] += each.size
    indexes = files.seen("write", ".index")
    assert len(indexes) == len(engine.segments) - 1 > 3, "each is written once, and in one go"
    for segment in engine.segments[:-1]:
        name = segment_path(segment.base, "index")
        entries = SealedIndex(files.open(name), name, MessageOffset(segment.base)).all_entries()
        places = list(zip(entries["partition"], entries["first_sequence"], strict=True))
        assert len(places) > 10
        assert places == sorted(places)


@pytest.mark.accepts("003-08")
def test_a_message_is_found_among_many_segments_by_halving() -> None:
    files = WatchedFiles()
    engine = opened(files, segment_bytes=2000, tail_cache_bytes=0)
    for number in range(1000):
        store(engine, ORDERS, b"<%d>" % number * 20)
    index_all(engine)
    segments = len(engine.segments)
    engine.close()
    assert segments >= 64

    looked = []
    for sequence in (0, 1, 333, 500, 750, 901):
        again = opened(files, tail_cache_bytes=0)
        contents = files.contents()
        files.requests.clear()
        assert bodies_of(again, ORDERS, sequence, step=1)[0] == b"<%d>" % sequence * 20
        read = files.seen("read", ".log")[0]
        assert b"<%d>" % sequence in contents[read.path], "another segment was read first"
        looked.append(len({each.path for each in files.requests[: files.requests.index(read)]}))
        again.close()
    # One after the other, it would be hundreds of them.
    assert max(looked) <= segments.bit_length() + 1


def test_the_facts_about_disks_are_written_down_and_measured(tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/disks.md").read_text(encoding="utf-8")
    figures = measure(tmp_path, megabytes=2)

    for item in ("004-49", "004-53", "004-57", "004-58"):
        row = next(line for line in page.splitlines() if line.startswith(f"| {item} "))
        measured = row.split("|")[3].strip(" `")
        assert figures.get(measured, 0) > 0, f"{measured} is measured nowhere"

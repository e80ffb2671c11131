"""Any byte that changes on disk is found, and looking changes nothing.

Left out are bytes that nothing depends on: the entries of an index that no checkpoint vouches
for, and files that the next start removes.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import DataDirectoryError
from pulque.model.actions import ConsumerLost, GroupOpened, Pulled, SubscriptionId
from pulque.model.batch import read_header, seed_of
from pulque.model.ids import IdSource
from pulque.model.names import Group, PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    MessageOffset,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import OsFileSystem
from pulque.storage.indexes.key_index import KeyIndex
from pulque.storage.indexes.segment_index import Entry, OpenIndex, write_sealed_index
from pulque.storage.inspection.data_files import (
    BatchRecord,
    DataFile,
    FactRecord,
    FileKind,
    TableRecord,
    UnreadableBytes,
    data_files,
    kind_of,
    read_facts,
    read_messages,
    refuse_if_locked,
)
from pulque.storage.inspection.verification import Verified, verify
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions
from pulque.testing.files import Cut, MemoryFileSystem

NOW_MS = 1_700_000_000_000
SEALED = "messages/00000000000000000000.log"


class _Nobody:
    def checkpoint_loaded(self, state: Mapping[bytes, bytes]) -> None:
        """See nothing."""

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """See nothing."""


def send(engine: Engine, name: str, *bodies: bytes) -> None:
    partition = engine.create_partition(PartitionName(name), NOW_MS)
    packer = BatchPacker()
    for body in bodies:
        packer.add(body)
    ids = IdSource(1).many(NOW_MS, len(bodies))
    batch = packer.encode(seed=seed_of(name), ids=ids, created_at_ms=NOW_MS)
    engine.append(partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=False)
    engine.write()


def act(engine: Engine) -> None:
    tenure = Tenure(Epoch(0), StartCount(1))
    engine.append_action(GroupOpened(PartitionId(1), Group("g"), ConsumeSequence(0)))
    engine.append_action(
        Pulled(SubscriptionId(1), tenure, PullSequence(0), ConsumeSequence(0), 2, NOW_MS)
    )
    engine.append_action(ConsumerLost(SubscriptionId(1), "silent", NOW_MS))


def filled() -> MemoryFileSystem:
    """Make a directory with a sealed segment, its indexes, an open one, facts, a checkpoint."""
    files = MemoryFileSystem()
    engine = Engine(files, StorageOptions(), SilentListener(), _Nobody(), NOW_MS)
    for number in range(3):
        send(engine, "orders", b"a" * number, b"b")
        send(engine, "invoices", b"c")
    act(engine)
    engine.roll(NOW_MS)
    index = engine.begin_index()
    assert index is not None
    index.run()
    engine.finish_index(index)
    names = engine.partitions.name_of
    keys = KeyIndex(files, lambda: engine.segments, names, SilentListener())
    assert keys.extend(engine.segments[0])
    send(engine, "orders", b"d", b"e")
    checkpoint = engine.begin_checkpoint({})
    checkpoint.run()
    engine.finish_checkpoint(checkpoint)
    send(engine, "orders", b"f")
    act(engine)
    sync = engine.begin_sync(actions=True)
    assert sync is not None
    sync.run()
    engine.finish_sync(sync)
    send(engine, "orders", b"says how far the log was synced")
    engine.close()
    return files


@pytest.fixture(scope="module")
def whole() -> MemoryFileSystem:
    return filled()


def copy_of(files: MemoryFileSystem) -> MemoryFileSystem:
    return files.after_power_cut(files.operations, Cut.KEPT, Random(0))


def damaged(files: MemoryFileSystem, path: str, at: int, content: bytes) -> MemoryFileSystem:
    """Return a copy in which some bytes of a file are others."""
    copy = copy_of(files)
    file = copy.open(path)
    file.write([content], at)
    file.close()
    return copy


def cut(files: MemoryFileSystem, path: str, size: int) -> MemoryFileSystem:
    """Return a copy in which a file is shorter."""
    copy = copy_of(files)
    file = copy.open(path)
    file.truncate(size)
    file.close()
    return copy


def verified(files: MemoryFileSystem) -> Verified:
    return verify(files, data_files(files))


def open_segment(files: MemoryFileSystem) -> str:
    return [each.path for each in data_files(files) if each.kind is FileKind.MESSAGES][-1]


def test_a_whole_directory_has_nothing_to_find(whole: MemoryFileSystem) -> None:
    found = verified(whole)

    assert found.findings == []
    assert (found.files, found.batches, found.messages, found.facts) == (7, 9, 13, 6)
    assert found.bytes == sum(
        len(content) for path, content in whole.contents().items() if "/" in path
    )


def test_all_kinds_of_files_are_walked(whole: MemoryFileSystem) -> None:
    assert {each.kind for each in data_files(whole)} == set(FileKind)


@given(data=st.data())
def test_a_changed_byte_is_found_where_it_is(whole: MemoryFileSystem, data: st.DataObject) -> None:
    each = data.draw(st.sampled_from(data_files(whole)))
    content = whole.contents()[each.path]
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))

    findings = verified(damaged(whole, each.path, at, bytes([other]))).findings
    assert findings
    assert all(finding.path == each.path for finding in findings) or each.kind in _VOUCHING
    assert min(finding.offset for finding in findings) <= at + each.base


_VOUCHING = {FileKind.CHECKPOINT}
"""Kinds whose loss makes other files look unfinished."""


@given(data=st.data())
def test_a_file_that_was_cut_is_found(whole: MemoryFileSystem, data: st.DataObject) -> None:
    each = data.draw(st.sampled_from(data_files(whole)))
    boundaries = {0, *record_ends(whole, each)}
    size = data.draw(
        st.integers(0, len(whole.contents()[each.path]) - 1).filter(
            lambda size: size not in boundaries
        )
    )

    assert verified(cut(whole, each.path, size)).findings


def record_ends(files: MemoryFileSystem, each: DataFile) -> set[int]:
    """Where the last file of a log may end without anybody knowing of more."""
    if each.kind is FileKind.MESSAGES and each.path == open_segment(files):
        return {
            record.envelope.offset + record.envelope.size - each.base
            for record in read_messages(files, each.path, each.base)
            if isinstance(record, BatchRecord | TableRecord)
        }
    if each.kind is FileKind.ACTIONS:
        return {
            record.offset + record.size - each.base
            for record in read_facts(files, each.path, each.base)
        }
    return set()


def test_damage_in_the_sealed_segment_is_damage(whole: MemoryFileSystem) -> None:
    found = verified(damaged(whole, SEALED, 200, b"\0\0\0\0"))

    assert [finding.path for finding in found.damages] == [SEALED]
    assert 0 < found.damages[0].offset <= 200
    assert found.messages == 11


def test_damage_at_the_synced_part_of_the_open_segment_is_damage(whole: MemoryFileSystem) -> None:
    path = open_segment(whole)
    found = verified(damaged(whole, path, 70, b"\xff"))

    assert [finding.path for finding in found.damages] == [path]


def test_an_unfinished_end_is_a_torn_tail_and_no_damage(whole: MemoryFileSystem) -> None:
    path = open_segment(whole)
    size = len(whole.contents()[path])
    for copy in (
        cut(whole, path, size - 5),
        damaged(whole, path, size - 5, b"\0" * 5),
        damaged(whole, path, size, b"\0" * 100),
        damaged(whole, path, size, b"noise"),
    ):
        found = verified(copy)
        assert found.damages == []
        assert [finding.is_torn_tail for finding in found.findings] == [True]


def test_an_unfinished_end_of_the_facts_is_a_torn_tail(whole: MemoryFileSystem) -> None:
    path = next(each.path for each in data_files(whole) if each.kind is FileKind.ACTIONS)
    found = verified(cut(whole, path, len(whole.contents()[path]) - 1))

    assert found.damages == []
    assert len(found.findings) == 1


def test_facts_from_before_the_checkpoint_are_never_a_torn_tail(whole: MemoryFileSystem) -> None:
    path = next(each.path for each in data_files(whole) if each.kind is FileKind.ACTIONS)

    assert verified(damaged(whole, path, 12, b"\xff")).damages


def test_a_segment_that_is_gone_from_the_middle_is_found() -> None:
    files = MemoryFileSystem()
    engine = Engine(files, StorageOptions(), SilentListener(), _Nobody(), NOW_MS)
    for _ in range(3):
        send(engine, "orders", b"a")
        engine.roll(NOW_MS)
    engine.close()
    first, middle, *_ = [e.path for e in data_files(files) if e.kind is FileKind.MESSAGES]
    files.remove(middle)

    damages = verified(files).damages
    assert (damages[0].path, "bytes at its end are missing" in damages[0].reason) == (first, True)


def test_an_index_that_is_whole_but_not_that_of_the_log_is_found() -> None:
    files = filled()
    each = next(each for each in data_files(files) if each.kind is FileKind.INDEX)
    entries = OpenIndex({})
    batches = [r for r in read_messages(files, SEALED, 0) if isinstance(r, BatchRecord)]
    for record in batches:
        envelope = record.envelope
        entries.add(
            Entry(
                envelope.partition,
                envelope.count,
                envelope.first_sequence,
                envelope.offset,
                envelope.size,
                envelope.stored_at_ms + (record is batches[-1]),
                0,
            )
        )
    end = MessageOffset(len(files.contents()[SEALED]))
    write_sealed_index(
        files,
        each.path,
        base=MessageOffset(0),
        end=end,
        index=entries,
    )

    (finding,) = verified(files).damages
    assert (finding.path, finding.reason) == (each.path, "an entry is not what the log says")


def test_looking_writes_nothing(whole: MemoryFileSystem) -> None:
    copy = damaged(whole, SEALED, 200, b"\0\0\0\0")
    before, contents = copy.operations, copy.contents()
    verified(copy)

    assert copy.operations == before
    assert copy.contents() == contents


def test_a_single_segment_explains_itself(whole: MemoryFileSystem) -> None:
    records = list(read_messages(whole, SEALED, 0))

    assert isinstance(records[0], TableRecord)
    batches = [record for record in records if isinstance(record, BatchRecord)]
    assert [(each.partition, each.envelope.first_sequence) for each in batches] == [
        ("orders", 0),
        ("invoices", 0),
        ("orders", 2),
        ("invoices", 1),
        ("orders", 4),
        ("invoices", 2),
    ]
    single = kind_of("messages", SEALED.rpartition("/")[2])
    assert single is not None
    assert verify(whole, [single]).messages == 9


def test_reading_goes_on_behind_damage(whole: MemoryFileSystem) -> None:
    first = next(r for r in read_messages(whole, SEALED, 0) if isinstance(r, BatchRecord))
    copy = damaged(whole, SEALED, first.envelope.offset + 80, b"\xff\xff\xff\xff")
    kinds = [type(record) for record in read_messages(copy, SEALED, 0)]

    assert kinds.count(UnreadableBytes) == 1
    assert kinds[-1] is BatchRecord


def test_facts_are_read_with_their_offsets(whole: MemoryFileSystem) -> None:
    each = next(each for each in data_files(whole) if each.kind is FileKind.ACTIONS)
    facts = [f for f in read_facts(whole, each.path, each.base) if isinstance(f, FactRecord)]

    assert [type(fact.action).__name__ for fact in facts[:3]] == [
        "GroupOpened",
        "Pulled",
        "ConsumerLost",
    ]
    assert facts[1].offset == facts[0].offset + facts[0].size


def test_a_foreign_directory_is_refused() -> None:
    with pytest.raises(DataDirectoryError, match="not a data directory"):
        data_files(MemoryFileSystem())


@pytest.mark.parametrize(
    ("directory", "name"),
    [("messages", "x.log"), ("messages", "1.tmp"), ("elsewhere", "1.log"), ("messages", "1")],
)
def test_a_foreign_file_is_nothing_of_ours(directory: str, name: str) -> None:
    assert kind_of(directory, name) is None


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    refuse_if_locked(str(tmp_path))
    files = OsFileSystem(str(tmp_path))
    files.lock()
    try:
        with pytest.raises(DataDirectoryError, match="in use by process"):
            refuse_if_locked(str(tmp_path))
    finally:
        files.unlock()
    refuse_if_locked(str(tmp_path))

"""An index finds what a walk over its entries finds, in memory, loaded, and in its file."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.indexes.segment_index import (
    ENTRY_SIZE,
    Entry,
    OpenIndex,
    SealedIndex,
    write_sealed_index,
)
from pulque.testing.files import MemoryFileSystem

PATH = "00000000000000001000.index"
BASE = MessageOffset(1000)


@st.composite
def indexes(draw: st.DrawFn) -> tuple[dict[PartitionId, ConsumeSequence], list[Entry]]:
    """Draw where partitions start, and entries in order of arrival, at times with holes."""
    starts = draw(
        st.dictionaries(
            st.integers(1, 9).map(PartitionId),
            st.integers(0, 50).map(ConsumeSequence),
            max_size=4,
        )
    )
    ends = dict(starts)
    entries: list[Entry] = []
    offset, now_ms = 1100, 5000
    steps = st.tuples(
        st.integers(1, 9), st.integers(1, 20), st.integers(0, 2), st.sampled_from([0, 0, 7])
    )
    for number, count, later_ms, hole in draw(st.lists(steps, max_size=150)):
        partition = PartitionId(number)
        first = ConsumeSequence(ends.get(partition, ConsumeSequence(0)) + hole)
        now_ms += later_ms
        entries.append(
            Entry(partition, count, first, MessageOffset(offset), 60 + count, now_ms, number * 3)
        )
        ends[partition] = ConsumeSequence(first + count)
        offset += 60 + count
    return starts, entries


def filled(starts: dict[PartitionId, ConsumeSequence], entries: list[Entry]) -> OpenIndex:
    index = OpenIndex(dict(starts))
    for entry in entries:
        index.add(entry)
    return index


def sealed(index: OpenIndex) -> SealedIndex:
    files = MemoryFileSystem()
    end = MessageOffset(99_999)
    write_sealed_index(files, PATH, base=BASE, end=end, index=index)
    return SealedIndex(files.open(PATH), PATH, BASE, end)


def walk(entries: list[Entry], partition: int, sequence: int, limit: int) -> list[Entry]:
    own = [e for e in entries if e.partition == partition]
    return [e for e in own if e.first_sequence + e.count > sequence][:limit]


@given(
    drawn=indexes(),
    partition=st.integers(1, 10).map(PartitionId),
    sequence=st.integers(0, 500).map(ConsumeSequence),
    limit=st.integers(1, 80),
)
def test_entries_are_found_by_sequence(
    drawn: tuple[dict[PartitionId, ConsumeSequence], list[Entry]],
    partition: PartitionId,
    sequence: ConsumeSequence,
    limit: int,
) -> None:
    starts, entries = drawn
    index = filled(starts, entries)
    expected = walk(entries, partition, sequence, limit)

    assert index.find(partition, sequence, limit) == expected
    assert sealed(index).find(partition, sequence, limit) == expected


@given(drawn=indexes(), partition=st.integers(1, 10).map(PartitionId), data=st.data())
def test_entries_are_found_by_time(
    drawn: tuple[dict[PartitionId, ConsumeSequence], list[Entry]],
    partition: PartitionId,
    data: st.DataObject,
) -> None:
    starts, entries = drawn
    times = [entry.stored_at_ms for entry in entries]
    at_ms = data.draw(st.sampled_from([0, 10**9, *times])) + data.draw(st.integers(-1, 1))
    index = filled(starts, entries)
    own = [e for e in entries if e.partition == partition and e.stored_at_ms >= at_ms]
    expected = own[0] if own else None

    assert index.find_time(partition, at_ms) == expected
    assert sealed(index).find_time(partition, at_ms) == expected


@given(drawn=indexes())
def test_starts_and_ends_are_those_of_the_entries(
    drawn: tuple[dict[PartitionId, ConsumeSequence], list[Entry]],
) -> None:
    starts, entries = drawn
    index = filled(starts, entries)
    file = sealed(index)
    for number in range(1, 11):
        partition = PartitionId(number)
        own = [e for e in entries if e.partition == partition]
        start = starts.get(partition, own[0].first_sequence if own else None)
        end = own[-1].first_sequence + own[-1].count if own else start

        assert index.start_of(partition) == start
        assert file.start_of(partition) == start
        assert file.end_of(partition) == end


@given(drawn=indexes(), cuts=st.lists(st.integers(0, 150), max_size=3))
def test_loaded_entries_are_like_added_ones(
    drawn: tuple[dict[PartitionId, ConsumeSequence], list[Entry]], cuts: list[int]
) -> None:
    starts, entries = drawn
    added = filled(starts, entries)
    loaded = OpenIndex(dict(starts))
    places = [0, *sorted(min(cut, len(entries)) for cut in cuts), len(entries)]
    for start, end in pairwise(places):
        loaded.load(bytes(added.entries[start * ENTRY_SIZE : end * ENTRY_SIZE]))

    assert loaded.entries == added.entries
    assert len(loaded) == len(entries)
    for number in range(1, 10):
        partition = PartitionId(number)
        for sequence in (0, 10, 100):
            where = ConsumeSequence(sequence)
            assert loaded.find(partition, where, 200) == added.find(partition, where, 200)


@given(drawn=indexes())
def test_all_entries_are_grouped_by_partition_in_order(
    drawn: tuple[dict[PartitionId, ConsumeSequence], list[Entry]],
) -> None:
    starts, entries = drawn
    found = sealed(filled(starts, entries)).all_entries()

    assert [tuple(row) for row in found.tolist()] == sorted(
        map(tuple, entries), key=lambda entry: entry[0]
    )

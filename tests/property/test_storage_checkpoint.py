"""A checkpoint holds exactly what was put and not removed, and a table exactly its rows."""

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.storage.checkpoint import MARK_KEY, Checkpoints, Mark
from pulque.storage.events import SilentListener
from pulque.storage.logs.partitions import Partitions, decode_table, encode_table
from pulque.testing.files import MemoryFileSystem

keys = st.binary(max_size=8)
changes = st.dictionaries(keys, st.none() | st.binary(max_size=50), max_size=8)
offsets = st.integers(0, 2**62)
names = st.text(min_size=1, max_size=40).map(PartitionName)
rows = st.lists(
    st.tuples(st.integers(0, 2**32 - 1).map(PartitionId), names, offsets.map(ConsumeSequence)),
    max_size=8,
)


@given(updates=st.lists(changes, max_size=6))
def test_a_state_is_loaded_as_it_was_written(updates: list[dict[bytes, bytes | None]]) -> None:
    files = MemoryFileSystem()
    checkpoints = Checkpoints(files, SilentListener())
    model: dict[bytes, bytes] = {}
    for update in updates:
        checkpoints.update(update)
        for key, value in update.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        checkpoints.write()

        assert Checkpoints(files, SilentListener()).load() == model
        assert len(files.list("checkpoints")) <= 2


@given(updates=st.lists(changes, min_size=2, max_size=4))
def test_an_update_without_a_write_is_in_the_next_one(
    updates: list[dict[bytes, bytes | None]],
) -> None:
    files = MemoryFileSystem()
    at_once, one_by_one = Checkpoints(files, SilentListener()), MemoryFileSystem()
    other = Checkpoints(one_by_one, SilentListener())
    for update in updates:
        at_once.update(update)
        other.update(update)
        other.write()
    at_once.write()

    assert (
        Checkpoints(files, SilentListener()).load()
        == Checkpoints(one_by_one, SilentListener()).load()
    )


@given(
    mark=st.builds(
        Mark,
        offsets,
        offsets,
        offsets,
        offsets,
        st.integers(0, 2**32 - 1),
        st.integers(-(2**63), 2**63 - 1),
    )
)
def test_a_mark_is_decoded_as_it_was(mark: Mark) -> None:
    assert Mark.decode({MARK_KEY: mark.encode()}) == mark


@given(rows=rows)
def test_a_table_is_decoded_as_it_was(
    rows: list[tuple[PartitionId, PartitionName, ConsumeSequence]],
) -> None:
    assert decode_table(encode_table(rows)) == rows


@given(rows=rows, starts=st.lists(offsets, min_size=8, max_size=8))
def test_partitions_are_loaded_as_they_were(
    rows: list[tuple[PartitionId, PartitionName, ConsumeSequence]], starts: list[int]
) -> None:
    unique = list({name: (number, name, end) for number, name, end in rows}.values())
    unique = list({row[0]: row for row in unique}.values())
    partitions = Partitions()
    partitions.take_rows(unique)
    partitions.raise_starts(
        (row[0], ConsumeSequence(start)) for row, start in zip(unique, starts, strict=False)
    )
    loaded = Partitions()
    loaded.load(partitions.encode_changed())

    assert {(p.id, p.name, p.start, p.end) for p in loaded.by_id.values()} == {
        (p.id, p.name, p.start, p.end) for p in partitions.by_id.values()
    }
    assert partitions.encode_changed() == {}
    new = loaded.make(PartitionName("new"))
    assert new.id not in loaded.by_id

"""What is known of damaged ranges: all of it, once, also when several threads find some."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.names import PartitionName
from pulque.serving.listener import LoggingListener
from pulque.storage.files import FileSystem, OsFileSystem
from pulque.storage.logs.partitions import Partition, Partitions
from pulque.storage.reading.damaged_batches import Damages, Hole
from pulque.testing.files import MemoryFileSystem


def damages_in(files: FileSystem) -> tuple[Damages, Partition]:
    """Return what is known of a directory with one partition."""
    partitions = Partitions()
    partition = partitions.make(PartitionName("orders"))
    partitions.put(partition)
    return Damages(files, partitions, LoggingListener(), has_copies=False), partition


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_ranges_that_touch_are_one_and_each_message_counts_once(
    found: list[tuple[int, int]],
) -> None:
    files = MemoryFileSystem()
    damages, partition = damages_in(files)
    model: set[int] = set()
    for first, length in found:
        damages.hole(partition, "path", Hole(first, first + length), may_block=True)
        model.update(range(first, first + length))
        damages.save()

    again, _ = damages_in(files)
    for each in (damages, again):
        rows = [hole for _, hole in each.rows()]
        assert {n for hole in rows for n in range(hole.first, hole.end)} == model
        assert each.count(partition) == len(model)
        assert all(a.end < b.first for a, b in pairwise(rows))


def test_threads_that_find_damage_at_once_lose_none_of_it(tmp_path: Path) -> None:
    files = OsFileSystem(str(tmp_path))
    damages, partition = damages_in(files)

    def find(first: int) -> None:
        for at in range(first, 200, 8):
            damages.hole(partition, "path", Hole(at, at + 1), may_block=True)
            damages.save()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(find, range(0, 8, 2))) == [None] * 4
    damages.save()

    again, _ = damages_in(files)
    assert again.count(partition) == damages.count(partition) == 100

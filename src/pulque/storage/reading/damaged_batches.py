"""Damaged messages: stored, but no longer readable.

If no other broker has a copy they are skipped: the ranges are recorded, and reported until
retention would have removed them. If other brokers have copies nothing is skipped: the read fails,
so that a broker with an intact copy can lead.

Recording takes a sync. A read that must not wait for the disk therefore raises
``WouldBlockError``, and a read of many damaged batches records them once, at its end.
"""

import contextlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter
from threading import Lock
from typing import NamedTuple

from pulque.errors import CorruptionError, StorageError
from pulque.model.positions import PartitionId
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem, WouldBlockError, replace
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition, Partitions

__all__ = ["Damages", "Hole"]

_first, _end = attrgetter("first"), attrgetter("end")
_FILE = "damaged.json"
_LARGEST = 1024 * 1024
_MOST_KEPT = 1000
"""The most ranges to record; the count includes all."""


class Hole(NamedTuple):
    """Sequences ``first..end`` of a partition that no batch has."""

    first: int
    end: int


class Damages:
    """The damaged ranges of one data directory. May be used from any thread.

    Args:
        files: The data directory.
        partitions: Its partitions.
        listener: Told of every damaged batch.
        has_copies: Whether other brokers have the same log: then only ranges that were skipped
            before they had it are skipped.
    """

    def __init__(
        self, files: FileSystem, partitions: Partitions, listener: Listener, *, has_copies: bool
    ) -> None:
        self._files = files
        self._partitions = partitions
        self._listener = listener
        self._has_copies = has_copies
        self._ranges = _read(files)
        self._lock = Lock()
        self._is_changed = False
        """Whether there are unrecorded ranges."""
        self._writing = Lock()

    def batch(
        self, partition: Partition, path: str, entry: Entry, reason: str, *, may_block: bool
    ) -> None:
        """Report a batch that cannot be read; ``save`` records it.

        Raises:
            CorruptionError: Other brokers have copies of it.
            WouldBlockError: Not ``may_block``, and it was not known before.
        """
        lost = Hole(entry.first_sequence, entry.first_sequence + entry.count)
        is_known = self._is_known(partition.id, lost)
        if not (is_known or self._has_copies or may_block):
            raise WouldBlockError
        self._listener.corruption_found(path, entry.offset, entry.size, reason)
        if is_known:
            return
        if self._has_copies:
            raise CorruptionError(path, entry.offset, reason)
        self._add(partition.id, lost)

    def hole(self, partition: Partition, path: str, hole: Hole, *, may_block: bool) -> None:
        """Record messages that no index names; recovery has reported the bytes.

        Raises:
            CorruptionError: Other brokers have copies of them.
            WouldBlockError: Not ``may_block``, and it was not known before.
        """
        # Retention may have taken them away meanwhile.
        lost = Hole(max(hole.first, partition.start), hole.end)
        if lost.first >= lost.end or self._is_known(partition.id, lost):
            return
        if self._has_copies:
            reason = f"messages {lost.first} to {lost.end - 1} of {partition.name} are missing"
            self._listener.corruption_found(path, 0, 0, reason)
            raise CorruptionError(path, 0, reason)
        if not may_block:
            raise WouldBlockError
        self._add(partition.id, lost)

    def save(self) -> None:
        """Record new ranges, if there are any; waits for the disk then."""
        if not self._is_changed:
            return
        with self._writing:
            self._is_changed = False
            # Without room it is known until the next start, and found again by whoever reads it.
            with contextlib.suppress(StorageError):
                self._write()

    def count(self, partition: Partition) -> int:
        """Return the number of known damaged messages of a partition."""
        with self._lock:
            found = self._ranges.get(partition.id, ())
            return sum(max(each.end - max(each.first, partition.start), 0) for each in found)

    def rows(self) -> Iterator[tuple[Partition, Hole]]:
        """Yield all damaged ranges that retention has not reached."""
        with self._lock:
            known = [(number, list(found)) for number, found in self._ranges.items()]
        for number, found in known:
            partition = self._partitions.by_id.get(number)
            if partition is not None:
                for each in found:
                    if each.end > partition.start:
                        yield partition, Hole(max(each.first, partition.start), each.end)

    def _is_known(self, partition: PartitionId, lost: Hole) -> bool:
        with self._lock:
            found = self._ranges.get(partition, [])
            at = bisect_right(found, lost.first, key=_first)
            return at > 0 and lost.end <= found[at - 1].end

    def _add(self, partition: PartitionId, lost: Hole) -> None:
        """Add a range, and merge it with adjacent ones."""
        with self._lock:
            found = self._ranges.setdefault(partition, [])
            at, stop = (
                bisect_left(found, lost.first, key=_end),
                bisect_right(found, lost.end, key=_first),
            )
            some = [lost, *found[at:stop]]
            found[at:stop] = [Hole(min(map(_first, some)), max(map(_end, some)))]
            self._is_changed = True

    def _write(self) -> None:
        rows = [
            [partition.id, each.first, each.end]
            for (partition, each), _ in zip(self.rows(), range(_MOST_KEPT), strict=False)
        ]
        replace(self._files, _FILE, [json.dumps(rows).encode()])
        self._files.sync_directory("")


def _read(files: FileSystem) -> dict[PartitionId, list[Hole]]:
    """Return the recorded ranges; none if the file is unreadable."""
    if not files.exists(_FILE):
        return {}
    file = files.open(_FILE, writable=False)
    try:
        text = file.read(_LARGEST, 0)
    finally:
        file.close()
    found: dict[PartitionId, list[Hole]] = {}
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        for partition, first, end in sorted(json.loads(text)):
            hole = Hole(int(first), int(end))
            found.setdefault(PartitionId(int(partition)), []).append(hole)
    return found

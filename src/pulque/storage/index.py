"""Entries of the consume logs, segment by segment.

A consume log is logical: it is all entries of one partition, over all segments. An entry stands
for one stored batch. For the open segment the entries are kept in memory in order of arrival,
with each partition's ordinals beside them; a sealed segment has one file in which they are
grouped by partition::

    +--------------------+----------------------------------+----------------------------+
    | header 48 bytes    | directory: one row per partition | entries, by partition      |
    | magic, version,    | that the segment knows: id,      | and sequence, 44 bytes     |
    | base, end, counts, | start sequence, end sequence,    | each                       |
    | crc of directory   | first entry, entries             |                            |
    +--------------------+----------------------------------+----------------------------+

So files grow in number with segments, never with subjects. Both are derived: ``rebuild`` makes
them from the segment.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

import google_crc32c
import numpy as np

from pulque.errors import CorruptionError
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.files import File, FileSystem

__all__ = ["ENTRY_SIZE", "Entry", "OpenIndex", "SealedIndex", "write_sealed_index"]

_ENTRY = Struct("<IIQQIqQ")
ENTRY_SIZE = _ENTRY.size
_ENTRY_TYPE = np.dtype(
    [
        ("partition", "<u4"),
        ("count", "<u4"),
        ("first_sequence", "<u8"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("stored_at_ms", "<i8"),
        ("tag_union", "<u8"),
    ]
)
_ROW_TYPE = np.dtype(
    [
        ("partition", "<u4"),
        ("entries", "<u4"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("first_entry", "<u8"),
    ]
)
_HEADER = Struct("<4sIQQQIIII")
_MAGIC = b"PLIX"
_VERSION = 1
_READ_AHEAD = 64


class Entry(NamedTuple):
    """One stored batch."""

    partition: PartitionId
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    first_sequence: ConsumeSequence
    offset: MessageOffset
    size: int
    """Of the whole record."""
    stored_at_ms: int
    tag_union: int


class OpenIndex:
    """The entries of a segment that is being written, in memory.

    ``starts`` gives the next sequence of each partition when the segment began.
    """

    def __init__(self, starts: dict[PartitionId, ConsumeSequence]) -> None:
        self.starts = starts
        self.entries = bytearray()
        self._ordinals: dict[PartitionId, array[int]] = {}

    def __len__(self) -> int:
        return len(self.entries) // ENTRY_SIZE

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        ordinals = self._ordinals.get(entry.partition)
        if ordinals is None:
            ordinals = self._ordinals[entry.partition] = array("I")
        ordinals.append(len(self.entries) // ENTRY_SIZE)
        self.entries += _ENTRY.pack(*entry)

    def load(self, entries: bytes) -> None:
        """Append entries as they were given out by ``entries``."""
        table = np.frombuffer(entries, _ENTRY_TYPE)
        base = len(self)
        order = np.argsort(table["partition"], kind="stable")
        partitions = table["partition"][order]
        cuts = np.flatnonzero(np.diff(partitions)) + 1
        for part in np.split(order, cuts):
            if len(part):
                partition = PartitionId(int(table["partition"][part[0]]))
                ordinals = self._ordinals.setdefault(partition, array("I"))
                ordinals.extend((part + base).tolist())
        self.entries += entries

    def start_of(self, partition: PartitionId) -> ConsumeSequence | None:
        """Return the first sequence that this segment has of a partition, if it has any."""
        ordinals = self._ordinals.get(partition)
        return None if ordinals is None else self._entry(ordinals[0]).first_sequence

    def find(self, partition: PartitionId, sequence: ConsumeSequence, limit: int) -> list[Entry]:
        """Return up to ``limit`` entries from the one that has ``sequence``, or follows it, on."""
        ordinals = self._ordinals.get(partition)
        if ordinals is None:
            return []
        entries = self.entries
        last = len(ordinals) - 1
        # A consumer at the tail wants the last entry: look there before searching.
        if self._first(ordinals[last]) <= sequence:
            at = last
        else:
            at = max(bisect_right(ordinals, int(sequence), key=self._first) - 1, 0)
        entry = Entry._make(_ENTRY.unpack_from(entries, ordinals[at] * ENTRY_SIZE))
        if entry.first_sequence + entry.count <= sequence:
            at += 1
        unpack = _ENTRY.unpack_from
        return [
            Entry._make(unpack(entries, ordinal * ENTRY_SIZE))
            for ordinal in ordinals[at : at + limit]
        ]

    def find_time(self, partition: PartitionId, at_ms: int) -> Entry | None:
        """Return the first entry stored at or after an instant."""
        ordinals = self._ordinals.get(partition, array("I"))
        at = bisect_right(ordinals, at_ms - 1, key=lambda o: self._entry(o).stored_at_ms)
        return self._entry(ordinals[at]) if at < len(ordinals) else None

    def _entry(self, ordinal: int) -> Entry:
        return Entry._make(_ENTRY.unpack_from(self.entries, ordinal * ENTRY_SIZE))

    def _first(self, ordinal: int) -> int:
        first: int = _ENTRY.unpack_from(self.entries, ordinal * ENTRY_SIZE)[2]
        return first


class SealedIndex:
    """The index file of a sealed segment. Reads may come from any thread.

    The directory is kept in memory as long as this object is; entries are read as needed.
    """

    def __init__(self, file: File, path: str, base: MessageOffset) -> None:
        self._file = file
        self.path = path
        head = file.read(_HEADER.size, 0)
        if len(head) < _HEADER.size:
            raise CorruptionError(path, 0, "the index has no header")
        magic, version, found, self.end, entries, rows, crc, head_crc, _ = _HEADER.unpack(head)
        if google_crc32c.value(head[:-8]) != head_crc or magic != _MAGIC:
            raise CorruptionError(path, 0, "the index's header is damaged")
        if version != _VERSION or found != base:
            raise CorruptionError(path, 0, f"version {version} and base {found} are not ours")
        directory = file.read(rows * _ROW_TYPE.itemsize, _HEADER.size)
        if google_crc32c.value(directory) != crc:
            raise CorruptionError(path, _HEADER.size, "the index's directory is damaged")
        self._directory = np.frombuffer(directory, _ROW_TYPE)
        self._entries_at = _HEADER.size + len(directory)
        if file.size() != self._entries_at + entries * ENTRY_SIZE:
            raise CorruptionError(path, self._entries_at, "the index has not its whole length")

    def close(self) -> None:
        self._file.close()

    def start_of(self, partition: PartitionId) -> ConsumeSequence | None:
        """Return the next sequence of a partition when the segment began, if it knew it."""
        row = self._row(partition)
        return None if row is None else ConsumeSequence(int(row["start"]))

    def end_of(self, partition: PartitionId) -> ConsumeSequence | None:
        """Return the next sequence of a partition when the segment ended, if it knew it."""
        row = self._row(partition)
        return None if row is None else ConsumeSequence(int(row["end"]))

    def find(
        self,
        partition: PartitionId,
        sequence: ConsumeSequence,
        limit: int,
        *,
        may_block: bool = True,
    ) -> list[Entry]:
        """Return up to ``limit`` entries from the one that has ``sequence``, or follows it, on."""
        row = self._row(partition)
        if row is None or not row["entries"]:
            return []
        first, count = int(row["first_entry"]), int(row["entries"])

        def sequence_at(i: int) -> int:
            return self._read(first + i, 1, may_block=may_block)[0].first_sequence

        at = max(bisect_right(range(count), int(sequence), key=sequence_at) - 1, 0)
        found = self._read(first + at, min(limit + 1, count - at), may_block=may_block)
        if found[0].first_sequence + found[0].count <= sequence:
            return found[1:]
        return found[:limit]

    def find_time(self, partition: PartitionId, at_ms: int) -> Entry | None:
        """Return the first entry stored at or after an instant."""
        row = self._row(partition)
        if row is None:
            return None
        first, count = int(row["first_entry"]), int(row["entries"])

        def time_at(i: int) -> int:
            return self._read(first + i, 1, may_block=True)[0].stored_at_ms

        at = bisect_right(range(count), at_ms - 1, key=time_at)
        return self._read(first + at, 1, may_block=True)[0] if at < count else None

    def all_entries(self) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        """Return every entry, for those who decode a whole segment."""
        size = self._file.size() - self._entries_at
        return np.frombuffer(self._file.read(size, self._entries_at), _ENTRY_TYPE)

    def _row(self, partition: PartitionId) -> np.void | None:
        at = int(np.searchsorted(self._directory["partition"], partition))
        if at == len(self._directory):
            return None
        row: np.void = self._directory[at]
        return row if row["partition"] == partition else None

    def _read(self, at: int, count: int, *, may_block: bool) -> list[Entry]:
        data = self._file.read(
            count * ENTRY_SIZE, self._entries_at + at * ENTRY_SIZE, may_block=may_block
        )
        return [Entry._make(fields) for fields in _ENTRY.iter_unpack(data)]


def write_sealed_index(
    files: FileSystem,
    path: str,
    *,
    base: MessageOffset,
    end: MessageOffset,
    starts: Iterable[tuple[PartitionId, ConsumeSequence]],
    entries: bytes,
) -> None:
    """Write the index file of a sealed segment out of its entries in order of arrival."""
    table = np.frombuffer(entries, _ENTRY_TYPE)
    grouped = table[np.argsort(table["partition"], kind="stable")]
    ids, firsts, counts = np.unique(grouped["partition"], return_index=True, return_counts=True)
    known = {int(i): int(s) for i, s in starts}
    lasts = grouped[firsts + counts - 1] if len(ids) else grouped[:0]
    rows = np.zeros(len(set(known) | set(ids.tolist())), _ROW_TYPE)
    rows["partition"] = sorted(set(known) | set(ids.tolist()))
    begins = {int(i): int(grouped["first_sequence"][f]) for i, f in zip(ids, firsts, strict=True)}
    start_of = [known.get(int(i), begins.get(int(i), 0)) for i in rows["partition"]]
    rows["start"] = start_of
    rows["end"] = start_of
    at = np.searchsorted(rows["partition"], ids)
    rows["first_entry"][at] = firsts
    rows["entries"][at] = counts
    rows["end"][at] = lasts["first_sequence"] + lasts["count"]
    directory = rows.tobytes()
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        base,
        end,
        len(table),
        len(rows),
        google_crc32c.value(directory),
        0,
        0,
    )[:-8]
    head += Struct("<II").pack(google_crc32c.value(head), 0)
    temporary = f"{path}.tmp"
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write([head, directory, grouped.tobytes()], 0)
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)

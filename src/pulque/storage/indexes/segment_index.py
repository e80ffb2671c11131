"""Entries of the consume logs, segment by segment.

A consume log is logical: it is all entries of one partition, over all segments. An entry stands
for one stored batch. For the open segment the entries are kept in memory in order of arrival,
with each partition's ordinals beside them; a sealed segment has one file in which they are
grouped by partition::

    +------------------+--------------------------+-----------------+------------------------+
    | header 48 bytes  | directory: one row per   | a crc for each  | entries, by partition  |
    | magic, version,  | partition that the       | 64 entries      | and sequence, 44 bytes |
    | base, end,       | segment knows: id, start |                 | each                   |
    | counts, flags,   | sequence, end sequence,  |                 |                        |
    | two crcs         | first entry, entries     |                 |                        |
    +------------------+--------------------------+-----------------+------------------------+

One crc is over the header, the other over the directory and the crcs of the entries: whatever
is read was checked. So files grow in number with segments, never with subjects. Both forms are
derived: ``pulque.storage.indexes.index_rebuild`` makes them from the segment.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

import google_crc32c
import numpy as np

from pulque.errors import CorruptionError
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.files import File, FileSystem, replace

__all__ = [
    "ENTRY_SIZE",
    "ENTRY_TYPE",
    "NO_ENTRIES",
    "Entry",
    "OpenIndex",
    "SealedIndex",
    "Table",
    "write_sealed_index",
]

_ENTRY = Struct("<IIQQIqQ")
ENTRY_SIZE = _ENTRY.size
ENTRY_TYPE = np.dtype(
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
_CRC = Struct("<I")
_MAGIC = b"PLIX"
_VERSION = 1
_IS_COMPLETE = 1
_BLOCK = 64
"""Entries that share a crc."""
_BLOCK_SIZE = _BLOCK * ENTRY_SIZE
_WIDEST = 32_768
"""Entries of all partitions that are copied to get at those of one."""
Table = np.ndarray[tuple[int], np.dtype[np.void]]
"""Entries, one after the other; the columns are the fields of ``Entry``."""
NO_ENTRIES: Table = np.empty(0, ENTRY_TYPE)


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

    One thread adds; reads may come from any thread.
    """

    def __init__(
        self, starts: dict[PartitionId, ConsumeSequence], *, is_complete: bool = True
    ) -> None:
        self.starts = starts
        """The next sequence of each partition when the segment began."""
        self.is_complete = is_complete
        """Whether ``starts`` has all partitions of that time: the segment's table is whole."""
        self.entries = bytearray()
        self._ordinals: dict[PartitionId, array[int]] = {}

    def __len__(self) -> int:
        return len(self.entries) // ENTRY_SIZE

    def add(self, *entries: Entry) -> None:
        """Append entries."""
        ordinal = len(self.entries) // ENTRY_SIZE
        pack, ordinals_of = _ENTRY.pack, self._ordinals
        # The entry comes before its ordinal: a reader in another thread must not miss it.
        self.entries += b"".join([pack(*entry) for entry in entries])
        for entry in entries:
            ordinals = ordinals_of.get(entry[0])
            if ordinals is None:
                ordinals_of[entry[0]] = array("I", (ordinal,))
            else:
                ordinals.append(ordinal)
            ordinal += 1

    def load(self, entries: bytes) -> None:
        """Append entries as returned by ``entries``."""
        table = np.frombuffer(entries, ENTRY_TYPE)
        base = len(self)
        self.entries += entries
        order = np.argsort(table["partition"], kind="stable")
        partitions = table["partition"][order]
        cuts = np.flatnonzero(np.diff(partitions)) + 1
        for part in np.split(order, cuts):
            if len(part):
                partition = PartitionId(int(table["partition"][part[0]]))
                ordinals = self._ordinals.setdefault(partition, array("I"))
                ordinals.extend((part + base).tolist())

    def first_of(self, partition: PartitionId) -> ConsumeSequence | None:
        """Return the first sequence of a partition in this segment, if there is one."""
        ordinals = self._ordinals.get(partition)
        return None if ordinals is None else self._entry(ordinals[0]).first_sequence

    def start_of(self, partition: PartitionId) -> ConsumeSequence | None:
        """Return the next sequence of a partition when the segment began, if it knew it."""
        start = self.starts.get(partition)
        return self.first_of(partition) if start is None else start

    def find(self, partition: PartitionId, sequence: ConsumeSequence, limit: int) -> list[Entry]:
        """Return up to ``limit`` entries from the one that has ``sequence``, or follows it, on."""
        ordinals = self._ordinals.get(partition)
        if ordinals is None:
            return []
        entries = self.entries
        at = self._place(ordinals, sequence)
        unpack = _ENTRY.unpack_from
        return [
            Entry._make(unpack(entries, ordinal * ENTRY_SIZE))
            for ordinal in ordinals[at : at + limit]
        ]

    def table(self, partition: PartitionId, sequence: ConsumeSequence, limit: int) -> Table:
        """Return what ``find`` returns, in columns; it may be less than the limit."""
        ordinals = self._ordinals.get(partition)
        if ordinals is None:
            return NO_ENTRIES
        at = self._place(ordinals, sequence)
        chosen = ordinals[at : at + limit]
        if not chosen:
            return NO_ENTRIES
        low = chosen[0]
        chosen = chosen[: bisect_right(chosen, low + _WIDEST)]
        # A copy: numpy's hold on the buffer would keep another thread from adding to it.
        data = bytes(self.entries[low * ENTRY_SIZE : (chosen[-1] + 1) * ENTRY_SIZE])
        table = np.frombuffer(data, ENTRY_TYPE)
        if len(table) == len(chosen):
            return table
        own: Table = table[np.array(chosen, np.uint32) - np.uint32(low)]
        return own

    def _place(self, ordinals: "array[int]", sequence: ConsumeSequence) -> int:
        """Return the index of the entry that has a sequence, among a partition's entries."""
        last = len(ordinals) - 1
        # A consumer at the tail wants the last entry: look there before searching.
        if self._first(ordinals[last]) <= sequence:
            at = last
        else:
            at = max(bisect_right(ordinals, int(sequence), key=self._first) - 1, 0)
        entry = self._entry(ordinals[at])
        return at + 1 if entry.first_sequence + entry.count <= sequence else at

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

    Args:
        file: The index file, which belongs to this object from now on.
        path: Its path, for errors.
        base: Where the segment begins.
        end: Where the segment ends, if that is to be checked.

    Raises:
        CorruptionError: This is no index of that segment; so do all methods that read entries.
    """

    def __init__(
        self, file: File, path: str, base: MessageOffset, end: MessageOffset | None = None
    ) -> None:
        self._file = file
        self.path = path
        head = file.read(_HEADER.size, 0)
        if len(head) < _HEADER.size:
            raise CorruptionError(path, 0, "the index has no header")
        magic, version, found, self.end, entries, rows, flags, crc, head_crc = _HEADER.unpack(head)
        if google_crc32c.value(head[: -_CRC.size]) != head_crc or magic != _MAGIC:
            raise CorruptionError(path, 0, "the index's header is damaged")
        if version != _VERSION or found != base:
            raise CorruptionError(path, 0, f"version {version} and base {found} are not ours")
        if end is not None and self.end != end:
            raise CorruptionError(path, 0, f"the segment ends at {end}, the index at {self.end}")
        self.is_complete = bool(flags & _IS_COMPLETE)
        """Whether it has a row for every partition that existed when the segment began."""
        size = rows * _ROW_TYPE.itemsize
        crcs = -(-entries // _BLOCK) * _CRC.size
        if file.size() != _HEADER.size + size + crcs + entries * ENTRY_SIZE:
            raise CorruptionError(path, _HEADER.size, "the index has not its whole length")
        body = file.read(size + crcs, _HEADER.size)
        if google_crc32c.value(body) != crc:
            raise CorruptionError(path, _HEADER.size, "the index's directory is damaged")
        self._directory = directory = np.frombuffer(body[:size], _ROW_TYPE)
        if (directory["first_entry"] > entries).any() or (
            directory["entries"] > entries - directory["first_entry"]
        ).any():
            raise CorruptionError(path, _HEADER.size, "the directory points behind the entries")
        self._crcs = body[size:]
        self._entries_at = _HEADER.size + len(body)
        self._count = entries

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

    def table(
        self,
        partition: PartitionId,
        sequence: ConsumeSequence,
        limit: int,
        *,
        may_block: bool = True,
    ) -> Table:
        """Return what ``find`` returns, in columns."""
        row = self._row(partition)
        found = self.find(partition, sequence, 1, may_block=may_block)
        if row is None or not found:
            return NO_ENTRIES
        first, count = int(row["first_entry"]), int(row["entries"])

        def sequence_at(i: int) -> int:
            return self._read(first + i, 1, may_block=may_block)[0].first_sequence

        at = bisect_right(range(count), int(found[0].first_sequence), key=sequence_at) - 1
        data = self._read_data(first + at, min(limit, count - at), may_block=may_block)
        table = np.frombuffer(data, ENTRY_TYPE)
        if not (table["count"].all() and table["size"].all()):
            raise CorruptionError(self.path, self._entries_at, "an entry of no messages")
        return table

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
        """Return every entry, to decode a whole segment."""
        data = self._read_blocks(0, len(self._crcs) // _CRC.size, may_block=True)
        return np.frombuffer(data, ENTRY_TYPE)

    def _row(self, partition: PartitionId) -> np.void | None:
        at = int(np.searchsorted(self._directory["partition"], partition))
        if at == len(self._directory):
            return None
        row: np.void = self._directory[at]
        return row if row["partition"] == partition else None

    def _read_data(self, at: int, count: int, *, may_block: bool) -> bytes:
        first = at // _BLOCK
        data = self._read_blocks(first, -(-(at + count) // _BLOCK), may_block=may_block)
        start = (at - first * _BLOCK) * ENTRY_SIZE
        return data[start : start + count * ENTRY_SIZE]

    def _read(self, at: int, count: int, *, may_block: bool) -> list[Entry]:
        wanted = self._read_data(at, count, may_block=may_block)
        entries = [Entry._make(fields) for fields in _ENTRY.iter_unpack(wanted)]
        if not all(entry.count and entry.size for entry in entries):
            raise CorruptionError(self.path, self._entries_at, "an entry of no messages")
        return entries

    def _read_blocks(self, first: int, end: int, *, may_block: bool) -> bytes:
        """Return the entries of blocks ``first..end``, checked."""
        size = (min(end * _BLOCK, self._count) - first * _BLOCK) * ENTRY_SIZE
        place = self._entries_at + first * _BLOCK_SIZE
        data = self._file.read(size, place, may_block=may_block)
        for block in range(first, end):
            at = (block - first) * _BLOCK_SIZE
            (crc,) = _CRC.unpack_from(self._crcs, block * _CRC.size)
            if google_crc32c.value(data[at : at + _BLOCK_SIZE]) != crc:
                raise CorruptionError(self.path, place + at, "entries of the index are damaged")
        return data


def write_sealed_index(
    files: FileSystem, path: str, *, base: MessageOffset, end: MessageOffset, index: OpenIndex
) -> None:
    """Write the index file of a sealed segment.

    Its name is not made durable: a derived file may be lost.
    """
    table = np.frombuffer(bytes(index.entries), ENTRY_TYPE)
    grouped = table[np.argsort(table["partition"], kind="stable")]
    rows = _directory_of(grouped, index.starts)
    directory = rows.tobytes()
    entries = grouped.tobytes()
    blocks = range(0, len(entries), _BLOCK_SIZE)
    crcs = [google_crc32c.value(entries[at : at + _BLOCK_SIZE]) for at in blocks]
    body = directory + Struct(f"<{len(crcs)}I").pack(*crcs)
    flags = _IS_COMPLETE if index.is_complete else 0
    crc = google_crc32c.value(body)
    counts = (len(grouped), len(rows))
    head = _HEADER.pack(_MAGIC, _VERSION, base, end, *counts, flags, crc, 0)[: -_CRC.size]
    replace(files, path, [head, _CRC.pack(google_crc32c.value(head)), body, entries])


def _directory_of(
    grouped: "np.ndarray[tuple[int], np.dtype[np.void]]",
    starts: Mapping[PartitionId, ConsumeSequence],
) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """Return a row for each partition, out of the entries and of what began without any."""
    ids, firsts, counts = np.unique(grouped["partition"], return_index=True, return_counts=True)
    begins = grouped["first_sequence"][firsts]
    start_of = {int(i): int(start) for i, start in zip(ids, begins, strict=True)}
    start_of.update((int(i), int(start)) for i, start in starts.items())
    rows = np.zeros(len(start_of), _ROW_TYPE)
    rows["partition"] = sorted(start_of)
    rows["start"] = [start_of[int(i)] for i in rows["partition"]]
    rows["end"] = rows["start"]
    if len(ids):
        at = np.searchsorted(rows["partition"], ids)
        lasts = grouped[firsts + counts - 1]
        rows["first_entry"][at] = firsts
        rows["entries"][at] = counts
        rows["end"][at] = lasts["first_sequence"] + lasts["count"]
    return rows

"""The hash index of a tick: the places of messages in its schedule log, by id.

Its file ``20261116T0900Z.index`` is beside the schedule log, and derived from it: if it is
missing, damaged or short, the schedule log is read instead, from where it ends.
Numbers are little-endian,
and rows count the messages of the schedule log::

    magic "DX" | version u16 | head size u32 | tick i64 | covered u64 | rows u64 | entries u32
    | pages u32 | names u32 | crc u32
    | (name size u16, name) of each partition
    | offset u64 of each entry | size u32 of each | messages u32 of each | partition u32 of each
    | the first digest u64 of each page

``covered`` is up to where it covers the schedule log, synced by then; ``crc`` covers the whole
head except itself. The pages follow, with 512 messages each, sorted by digest: their digests
u64, their rows u32, and a crc u32. A search reads the head and one page. Every hit is
checked against the entry.
"""

from collections.abc import Iterable
from struct import Struct
from struct import error as struct_error
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from pulque.model.names import PartitionName
from pulque.storage.events import Listener
from pulque.storage.files import File, FileSystem, replace
from pulque.storage.message_ids import ID_TYPE, digests_of
from pulque.storage.message_table import columns_before_data
from pulque.storage.schedule.schedule_log import ScheduleEntry, tick_name

__all__ = ["DigestHead", "TickDigests"]

_HEAD = Struct("<2sHIqQQIIII")
_NAME = Struct("<H")
_CRC = Struct("<I")
_MAGIC = b"DX"
_VERSION = 1
_PAGE_ROWS = 512
_ROW_BYTES = 12
_LARGEST_HEAD = 1 << 30
_Numbers = npt.NDArray[Any]


class DigestHead(NamedTuple):
    """An index without its pages."""

    covered: int
    """Up to where it covers the schedule log."""
    rows: int
    names: list[PartitionName]
    offsets: _Numbers
    """The offset of each entry; the following are per entry, too."""
    sizes: _Numbers
    counts: _Numbers
    owners: _Numbers
    """Numbers of partitions."""
    page_firsts: _Numbers
    """The first digest of each page."""
    pages_at: int = 0
    """Where the pages begin."""

    def entries_of(self, rows: _Numbers) -> list[tuple[int, int]]:
        """Return offset and size of the entries that hold rows."""
        ends = np.cumsum(self.counts)
        found = np.unique(np.searchsorted(ends, rows, "right"))
        return [(int(self.offsets[i]), int(self.sizes[i])) for i in found.tolist()]


_NOTHING = DigestHead(
    0,
    0,
    [],
    np.zeros(0, "<u8"),
    np.zeros(0, "<u4"),
    np.zeros(0, "<u4"),
    np.zeros(0, "<u4"),
    np.zeros(0, "<u8"),
)


class _SpoiltError(Exception):
    """The index is damaged."""


class TickDigests:
    """The hash index of one tick. Used by one thread at a time."""

    def __init__(self, files: FileSystem, tick: int, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self._tick = tick
        self.path = tick_name(tick, "index")

    def head(self) -> DigestHead | None:
        """Return the head, or None; remove a damaged index."""
        if not self._files.exists(self.path):
            return None
        file = self._files.open(self.path, writable=False)
        try:
            return self._head(file)
        except _SpoiltError as error:
            self._remove_spoilt(str(error))
            return None
        finally:
            file.close()

    def find(self, head: DigestHead, message_id: bytes) -> list[tuple[int, int]] | None:
        """Return offset and size of the entries that may have an id; None if it is damaged."""
        digest = digests_of(np.frombuffer(message_id, ID_TYPE).reshape(1, 2))[0]
        first = max(int(np.searchsorted(head.page_firsts, digest)) - 1, 0)
        last = int(np.searchsorted(head.page_firsts, digest, "right"))
        file = self._files.open(self.path, writable=False)
        try:
            found = [self._page(file, head, page) for page in range(first, last)]
        except _SpoiltError as error:
            self._remove_spoilt(str(error))
            return None
        finally:
            file.close()
        hits = [rows[digests == digest] for digests, rows in found]
        return head.entries_of(np.concatenate(hits)) if hits else []

    def extend(
        self, head: DigestHead | None, entries: Iterable[ScheduleEntry], covered: int
    ) -> None:
        """Rewrite the index with further entries.

        Args:
            head: The present head.
            entries: The entries of the schedule log beyond it.
            covered: Where these end.

        Raises:
            StorageFullError: The index is unchanged.
        """
        head = head or _NOTHING
        try:
            digests, rows = self._all_pages(head)
        except _SpoiltError as error:
            self._remove_spoilt(str(error))
            return
        added, more = _joined(head, entries)
        digests = np.concatenate([digests, *more])
        rows = np.concatenate([rows, np.arange(head.rows, len(digests), dtype="<u4")])
        order = np.argsort(digests)
        pages, firsts = _pages(digests[order], rows[order])
        made = added._replace(covered=covered, rows=len(digests), page_firsts=firsts)
        # Not synced: what a power cut spoils is found by its crc, and made again.
        replace(self._files, self.path, [_encoded(made, self._tick), *pages], is_synced=False)

    def remove(self) -> None:
        """Remove the index, if it exists."""
        if self._files.exists(self.path):
            self._files.remove(self.path)

    def _remove_spoilt(self, reason: str) -> None:
        self._listener.corruption_found(self.path, 0, 0, f"{reason}: it is made again")
        self.remove()

    def _head(self, file: File) -> DigestHead:
        fixed = file.read(_HEAD.size, 0)
        if len(fixed) < _HEAD.size:
            raise _SpoiltError("it has no head")
        magic, version, size, tick, covered, rows, entries, pages, names, crc = _HEAD.unpack(fixed)
        if magic != _MAGIC or version != _VERSION or not _HEAD.size <= size <= _LARGEST_HEAD:
            raise _SpoiltError("it has no head of ours")
        data = file.read(size - _HEAD.size, _HEAD.size)
        if google_crc32c.value(fixed[: -_CRC.size] + data) != crc:
            raise _SpoiltError("the crc of its head does not match")
        if tick != self._tick:
            raise _SpoiltError(f"it is the index of {tick_name(tick)}")
        try:
            found, at = _decoded_names(data, names)
            columns = []
            for kind, count in (
                ("<u8", entries),
                ("<u4", entries),
                ("<u4", entries),
                ("<u4", entries),
                ("<u8", pages),
            ):
                columns.append(np.frombuffer(data, kind, count, at))
                at += columns[-1].nbytes
        except (ValueError, struct_error) as error:
            raise _SpoiltError("its head does not add up") from error
        offsets, sizes, counts, owners, firsts = columns
        return DigestHead(covered, rows, found, offsets, sizes, counts, owners, firsts, size)

    def _all_pages(self, head: DigestHead) -> tuple[_Numbers, _Numbers]:
        """Return the digests of all rows, sorted, and the rows."""
        if not head.rows:
            return np.zeros(0, "<u8"), np.zeros(0, "<u4")
        file = self._files.open(self.path, writable=False)
        try:
            found = [self._page(file, head, page) for page in range(len(head.page_firsts))]
        finally:
            file.close()
        digests = np.concatenate([digests for digests, _ in found])
        return digests, np.concatenate([rows for _, rows in found])

    @staticmethod
    def _page(file: File, head: DigestHead, page: int) -> tuple[_Numbers, _Numbers]:
        count = min(_PAGE_ROWS, head.rows - page * _PAGE_ROWS)
        size = count * _ROW_BYTES
        at = head.pages_at + page * (_PAGE_ROWS * _ROW_BYTES + _CRC.size)
        data = file.read(size + _CRC.size, at)
        if len(data) < size + _CRC.size:
            raise _SpoiltError("a page is missing")
        if google_crc32c.value(data[:size]) != _CRC.unpack_from(data, size)[0]:
            raise _SpoiltError(f"the crc of page {page} does not match")
        digests = np.frombuffer(data, "<u8", count)
        return digests, np.frombuffer(data, "<u4", count, count * 8)


def _joined(
    head: DigestHead, entries: Iterable[ScheduleEntry]
) -> tuple[DigestHead, list[_Numbers]]:
    """Return the head with entries that follow, and the digests of their messages."""
    names = list(head.names)
    numbers = {name: i for i, name in enumerate(names)}
    rows: list[tuple[int, int, int, int]] = []
    digests: list[_Numbers] = []
    for entry in entries:
        owner = numbers.setdefault(entry.partition, len(numbers))
        if owner == len(names):
            names.append(entry.partition)
        rows.append((entry.offset, entry.size, entry.count, owner))
        digests.append(digests_of(columns_before_data(entry.batch)[1]["id"]))
    added = np.array(rows, "<u8").reshape(-1, 4)
    joined = head._replace(
        names=names,
        offsets=np.concatenate([head.offsets, added[:, 0]]),
        sizes=np.concatenate([head.sizes, added[:, 1].astype("<u4")]),
        counts=np.concatenate([head.counts, added[:, 2].astype("<u4")]),
        owners=np.concatenate([head.owners, added[:, 3].astype("<u4")]),
    )
    return joined, digests


def _pages(digests: _Numbers, rows: _Numbers) -> tuple[list[bytes], _Numbers]:
    pages = []
    for at in range(0, len(digests), _PAGE_ROWS):
        data = digests[at : at + _PAGE_ROWS].tobytes() + rows[at : at + _PAGE_ROWS].tobytes()
        pages.append(data + _CRC.pack(google_crc32c.value(data)))
    return pages, digests[::_PAGE_ROWS]


def _encoded(head: DigestHead, tick: int) -> bytes:
    names = [name.encode() for name in head.names]
    columns = (head.offsets, head.sizes, head.counts, head.owners, head.page_firsts)
    data = b"".join(
        [
            *(_NAME.pack(len(name)) + name for name in names),
            *(column.tobytes() for column in columns),
        ]
    )
    fields = (len(head.offsets), len(head.page_firsts), len(names))
    size = _HEAD.size + len(data)
    fixed = _HEAD.pack(_MAGIC, _VERSION, size, tick, head.covered, head.rows, *fields, 0)
    crc = google_crc32c.value(fixed[: -_CRC.size] + data)
    return fixed[: -_CRC.size] + _CRC.pack(crc) + data


def _decoded_names(data: bytes, count: int) -> tuple[list[PartitionName], int]:
    names = []
    at = 0
    for _ in range(count):
        (size,) = _NAME.unpack_from(data, at)
        at += _NAME.size
        names.append(PartitionName(data[at : at + size].decode()))
        at += size
    return names, at

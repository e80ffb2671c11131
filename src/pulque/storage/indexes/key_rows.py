"""Rows of the key index: one for each message's id, and one for its key.

Rows are computed from the log in large blocks and whole columns: the only work per
batch is to step over it. A key is hashed together with its subject, an id by itself.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from pulque.errors import InvalidBatchError, UsageError
from pulque.model.batch import HEADER_SIZE, MAX_COUNT, Codec, Flag, layout_of, read_header
from pulque.model.compression import decompress
from pulque.model.names import PartitionName, subject_of
from pulque.model.positions import MessageOffset, PartitionId
from pulque.model.record import ENVELOPE_SIZE, MAGIC, RecordType
from pulque.storage.logs.segment import Segment, next_record
from pulque.storage.message_ids import ID_TYPE, digests_of

__all__ = [
    "ID_ROW",
    "OLDEST_AGE",
    "PART_BYTES",
    "ROW_TYPE",
    "Collected",
    "NameOf",
    "Rows",
    "collect",
    "hash_of_id",
    "hash_of_key",
]

Rows = npt.NDArray[np.void]
NameOf = Callable[[PartitionId], PartitionName | None]
"""Returns the name of a partition; None if unknown."""
ROW_TYPE = np.dtype([("hash", "<u4"), ("place", "<u4"), ("index", "<u2"), ("age_ms", "<u4")])
"""The hash, where the batch begins (from the beginning of the part), which message of it, and how
long after the first batch of the part it was stored."""
ID_ROW = 0x8000
"""Beside the index of a message: the row is for its id. No batch has so many messages."""
OLDEST_AGE = 2**32 - 1
"""The largest age; older messages have it, too."""
PART_BYTES = 32 * 1024 * 1024
"""The bytes of the log in a part, or a little more."""
_PART_MESSAGES = 262_144
_STRETCH_BYTES = 2 * 1024 * 1024
_HEAD_SIZE = ENVELOPE_SIZE + HEADER_SIZE
_STEP = Struct("<HBxIQ")
_BATCH = int(RecordType.BATCH)
_KEYS = int(Flag.KEYS)
_ALL_FLAGS = sum(Flag)
_SPREAD = 0x9E3779B1
_Numbers = npt.NDArray[np.int64]
_HEAD_TYPE = np.dtype(
    {
        "names": ["size", "partition", "stored_at_ms", "flags", "codec", "count"],
        "formats": ["<u4", "<u4", "<i8", "<u2", "u1", "<u4"],
        "offsets": [4, 28, 40, *(ENVELOPE_SIZE + at for at in (4, 6, 8))],
        "itemsize": _HEAD_SIZE,
    }
)
"""The fields of envelope and header that determine the places of columns."""


class Collected(NamedTuple):
    """The rows of a part of the log."""

    begin: int
    end: int
    """Where the next part begins."""
    rows: Rows
    """In the order of the log, those of ids before those of keys."""
    messages: int
    begun_ms: int
    """When its first batch was stored; ages count from there."""
    last_ms: int
    first_offset: int
    last_offset: int
    """Of its batches; both are where it begins if it has none."""


def hash_of_key(subject: str, key: str) -> int:
    """Return the hash of a key within a subject."""
    return int(google_crc32c.value(key.encode())) ^ _salt(subject)


def hash_of_id(message_id: bytes) -> int:
    """Return the hash of an id."""
    return int(_id_hashes(np.frombuffer(message_id, ID_TYPE).reshape(1, 2))[0])


def collect(segment: Segment, begin: int, end: int, name_of: NameOf) -> Collected:
    """Return the rows of a part of the log: up to its largest size, or the log's end.

    Damaged batches have none. Thread-safe on written bytes.

    Args:
        segment: The segment.
        begin: Where a record begins.
        end: Where a record ends.
        name_of: Returns the names of partitions.
    """
    gathering = _Gathering(begin, name_of)
    at = begin
    while at < end and at - begin < PART_BYTES and gathering.messages < _PART_MESSAGES:
        data = segment.read(at, min(_STRETCH_BYTES, end - at))
        starts, step = _steps(data, at)
        if starts:
            gathering.add(data, at, np.array(starts, np.int64))
        if step < len(data) and (not step or not _is_cut_off(data, step, at, end)):
            step = _pass_over(segment, at, step, end, gathering)
        at += step
        time.sleep(0)  # a thread that waits for the interpreter gets it now
    return gathering.collected(min(at, end))


def _is_cut_off(data: bytes, at: int, offset: int, end: int) -> bool:
    """Return whether a whole record begins here that the stretch does not have to its end."""
    if len(data) - at < _STEP.size:
        return offset + len(data) < end
    magic, _, size, where = _STEP.unpack_from(data, at)
    is_ours: bool = magic == MAGIC and where == offset + at and size >= ENVELOPE_SIZE
    return is_ours and offset + at + size <= end


def _pass_over(segment: Segment, offset: int, at: int, end: int, to: "_Gathering") -> int:
    """Return how far to go on: behind a record that no stretch has room for, or behind damage."""
    place = offset + at
    head = segment.read(place, min(ENVELOPE_SIZE, end - place))
    if _is_cut_off(head + b"\0" * _STEP.size, 0, place, end) and len(head) == ENVELOPE_SIZE:
        _, kind, size, _ = _STEP.unpack_from(head)
        if kind == _BATCH:
            to.add(segment.read(place, size), place, np.zeros(1, np.int64))
        return at + int(size)
    following = next_record(segment, MessageOffset(place + 1))
    return (end if following is None else min(int(following.offset), end)) - offset


def _steps(data: bytes, offset: int) -> tuple[list[int], int]:
    """Step over the records at the beginning of some data.

    Returns:
        Where batches begin, and where the first record begins that is not whole.
    """
    starts = []
    at, size = 0, len(data)
    unpack = _STEP.unpack_from
    while at + ENVELOPE_SIZE <= size:
        magic, kind, length, where = unpack(data, at)
        following = at + length
        if magic != MAGIC or where != offset + at or length < ENVELOPE_SIZE or following > size:
            break
        if kind == _BATCH and length >= _HEAD_SIZE:
            starts.append(at)
        at = following
    return starts, at


class _Gathering:
    """Rows of a part, as its stretches come."""

    def __init__(self, begin: int, name_of: NameOf) -> None:
        self._begin = begin
        self._name_of = name_of
        self._salts: dict[int, int] = {}
        self._ids: list[Rows] = []
        self._keys: list[Rows] = []
        self.messages = 0
        self._is_mixed = False
        """Whether what was compressed comes behind what was not, in some stretch."""
        self._begun_ms: int | None = None
        self._last_ms = 0
        self._offsets: tuple[int, int] = (begin, begin)

    def add(self, data: bytes, offset: int, starts: _Numbers) -> None:
        """Add the batches that begin at some places of the data."""
        heads: Rows = _at_each_byte(data, _HEAD_SIZE)[starts].view(_HEAD_TYPE)
        stored = heads["stored_at_ms"]
        if self._begun_ms is None:
            self._begun_ms = int(stored[0])
            self._offsets = offset + int(starts[0]), 0
        self._last_ms = int(stored[-1])
        self._offsets = self._offsets[0], offset + int(starts[-1])
        is_packed = heads["codec"] != Codec.NONE
        plain = np.flatnonzero(~is_packed)
        places = starts + (offset - self._begin)
        if len(plain):
            ends = starts[plain] + heads["size"][plain]
            self._take(data, starts[plain], ends, heads[plain], places[plain])
        if len(plain) < len(starts):
            self._is_mixed = True
            self._add_packed(data, starts, heads, places)

    def _add_packed(self, data: bytes, starts: _Numbers, heads: Rows, places: _Numbers) -> None:
        """Add the batches that are compressed: their columns are taken together, many at once."""
        opened: list[bytes] = []
        chosen: list[int] = []
        size = 0
        for one in np.flatnonzero(heads["codec"] != Codec.NONE).tolist():
            start = int(starts[one])
            record = data[start : start + int(heads["size"][one])]
            columns = _columns_of(record)
            if columns is None:
                self._take_packed(record, heads[one : one + 1], places[one : one + 1])
                continue
            opened.append(columns)
            chosen.append(one)
            size += len(columns)
            if size > _STRETCH_BYTES:
                self._take_opened(opened, heads[chosen], places[chosen])
                opened, chosen, size = [], [], 0
        if opened:
            self._take_opened(opened, heads[chosen], places[chosen])

    def _take_opened(self, opened: list[bytes], heads: Rows, places: _Numbers) -> None:
        ends = np.cumsum(np.array([len(each) for each in opened], np.int64))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self._take(b"".join(opened), starts, ends, heads, places)

    def collected(self, end: int) -> Collected:
        """Return all of it, up to where the log was looked at."""
        # As plain bytes they are moved whole, and not field by field.
        kinds = [self._in_order(rows) for rows in (self._ids, self._keys) if rows]
        rows = np.concatenate(kinds).view(ROW_TYPE) if kinds else np.empty(0, ROW_TYPE)
        begun_ms = self._begun_ms or 0
        return Collected(
            self._begin, end, rows, self.messages, begun_ms, self._last_ms, *self._offsets
        )

    def _in_order(self, some: list[Rows]) -> Rows:
        rows = np.concatenate([each.view(f"V{ROW_TYPE.itemsize}") for each in some])
        if not self._is_mixed:
            return rows
        ordered: Rows = rows[np.argsort(rows.view(ROW_TYPE)["place"], kind="stable")]
        return ordered

    def _take(
        self, data: bytes, starts: _Numbers, ends: _Numbers, heads: Rows, places: _Numbers
    ) -> None:
        """Add the rows of batches whose columns can be read; each lies in ``starts..ends``."""
        counts = heads["count"].astype(np.int64)
        flags = heads["flags"].astype(np.int64)
        widths, ids_before, _, _ = _layouts()
        # Nobody looked at columns when it was stored: its producer may have packed nonsense.
        known = flags & _ALL_FLAGS
        columns = starts + _HEAD_SIZE
        is_good = (known == flags) & (counts > 0) & (counts <= MAX_COUNT)
        is_good &= columns + counts * widths[known] <= np.minimum(ends, len(data))
        if not is_good.all():
            counts, flags, columns = counts[is_good], flags[is_good], columns[is_good]
            heads, places = heads[is_good], places[is_good]
        if not len(counts):
            return
        which, index = _numbered(counts)
        rows = self._rows(heads, places, which, index | ID_ROW)
        at = (columns + counts * ids_before[flags])[which] + 16 * index
        ids = _at_each_byte(data, 16)[at].view(ID_TYPE).reshape(-1, 2)
        rows["hash"] = _id_hashes(ids)
        self._ids.append(rows)
        self.messages += len(rows)
        has_keys = flags & _KEYS != 0
        if has_keys.any():
            self._take_keys(data, columns[has_keys], heads[has_keys], places[has_keys])

    def _take_keys(self, data: bytes, columns: _Numbers, heads: Rows, places: _Numbers) -> None:
        """Add the rows of keys; a message of these batches need not have one."""
        counts, flags = heads["count"].astype(np.int64), heads["flags"].astype(np.int64)
        _, _, hashes_before, sizes_before = _layouts()
        which, index = _numbered(counts)
        at = (columns + counts * sizes_before[flags])[which] + 2 * index
        is_key = _at_each_byte(data, 2)[at].view("<u2") != 0
        which, index = which[is_key], index[is_key]
        at = (columns + counts * hashes_before[flags])[which] + 4 * index
        hashes = _at_each_byte(data, 4)[at].view("<u4")
        self._add_keys(hashes, heads, places, which, index)

    def _take_packed(self, record: bytes, heads: Rows, places: _Numbers) -> None:
        """Add the key hashes of a batch whose records cannot be decompressed."""
        flags, count = int(heads["flags"][0]), int(heads["count"][0])
        if flags & ~_ALL_FLAGS or not flags & _KEYS or not 0 < count <= MAX_COUNT:
            return
        at = _HEAD_SIZE + count * layout_of(flags).before["key_hash"]
        if at + 4 * count > len(record):
            return
        hashes = np.frombuffer(record, "<u4", count, at)
        which, index = _numbered(np.array([count]))
        self._add_keys(hashes, heads, places, which, index)

    def _add_keys(
        self, hashes: Any, heads: Rows, places: _Numbers, which: _Numbers, index: _Numbers
    ) -> None:
        rows = self._rows(heads, places, which, index)
        rows["hash"] = hashes ^ self._salts_of(heads["partition"])[which]
        self._keys.append(rows)

    def _rows(self, heads: Rows, places: _Numbers, which: _Numbers, index: _Numbers) -> Rows:
        """Return rows without their hashes."""
        ages = np.clip(heads["stored_at_ms"] - (self._begun_ms or 0), 0, OLDEST_AGE)
        rows: Rows = np.empty(len(which), ROW_TYPE)
        rows["place"], rows["index"], rows["age_ms"] = places[which], index, ages[which]
        return rows

    def _salts_of(self, partitions: Any) -> npt.NDArray[np.uint32]:
        unique, back = np.unique(partitions, return_inverse=True)
        return np.array([self._salt_of(each) for each in unique.tolist()], np.uint32)[back]

    def _salt_of(self, partition: int) -> int:
        found = self._salts.get(partition)
        if found is None:
            name = self._name_of(PartitionId(partition))
            found = self._salts[partition] = 0 if name is None else _salt(subject_of(name))
        return found


@lru_cache(maxsize=65536)
def _salt(subject: str) -> int:
    """Return a number by which keys of different subjects get different hashes."""
    return int(google_crc32c.value(subject.encode())) * _SPREAD & 0xFFFF_FFFF


def _id_hashes(ids: Any) -> npt.NDArray[np.uint32]:
    return digests_of(ids).astype(np.uint32)


def _numbered(counts: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return for each message of some batches which batch it is in, and its index there."""
    firsts = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - firsts[which]


def _at_each_byte(data: bytes, width: int) -> npt.NDArray[np.void]:
    """Return data as values of some width that begin at every byte."""
    length = max(len(data) - width + 1, 0)
    return np.ndarray((length,), np.dtype(f"V{width}"), data, strides=(1,))


def _columns_of(record: bytes) -> bytes | None:
    """Return a compressed record up to the end of its columns, opened; None if it cannot be."""
    batch = record[ENVELOPE_SIZE:]
    try:
        header = read_header(batch)
        layout = layout_of(header.flags)
        start = layout.records_start(header.count)
        plain = decompress(batch[start:], header.codec, header.records_size)
    except (InvalidBatchError, UsageError):
        return None
    return record[: ENVELOPE_SIZE + start] + plain[: header.count * layout.record_width]


@lru_cache(maxsize=1)
def _layouts() -> tuple[_Numbers, _Numbers, _Numbers, _Numbers]:
    """Return for each combination of flags how wide columns are, and what comes before some."""
    layouts = [layout_of(flags) for flags in range(_ALL_FLAGS + 1)]
    widths = np.array([each.visible_width + each.record_width for each in layouts], np.int64)
    befores = [
        np.array([each.before.get(name, 0) for each in layouts], np.int64)
        for name in ("id", "key_hash", "key_size")
    ]
    return widths, befores[0], befores[1], befores[2]

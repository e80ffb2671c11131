"""The key index of one segment: from the hash of a key or an id to the places of messages.

Its file ``<base>.keys`` is beside the segment, and derived from it. It grows by *parts* with the
segment; each part covers about 32 MiB of the log::

    +-----------------+------------------------------+---------------------------------------+
    | header          | slots: the newest row of the | rows: hash, place of the batch, index |
    | 84 bytes        | slot, how many, a crc        | of the message, age; 14 bytes each    |
    +-----------------+------------------------------+---------------------------------------+

A slot is the hash modulo the number of slots. It has the number of its newest row, counted from 1
so that 0 means none; its other rows follow that one, from newer to older. A search reads one slot
and its rows, about a hundred; the crc of a slot covers both. A part is
valid if its header is, if it begins where the one before it ends, and if the file has all of it.
Everything else is rebuilt.
"""

from struct import Struct
from typing import NamedTuple

import google_crc32c
import numpy as np

from pulque.errors import CorruptionError
from pulque.storage.directory.layout import segment_path
from pulque.storage.files import File, FileSystem
from pulque.storage.indexes.key_rows import ID_ROW, ROW_TYPE, Collected, Rows

__all__ = ["PartHead", "find_rows", "pack_part", "read_heads", "write_part"]

_HEADER = Struct("<4sHHQQQIIIIqqQQI")
_SLOT = Struct("<III")
_SLOT_SEED = Struct("<QIII")
_CRC = Struct("<I")
_MAGIC = b"PLKX"
_VERSION = 1
_ROWS_PER_SLOT = 128
"""More rows would be read in vain, fewer would need a longer table of slots."""


class PartHead(NamedTuple):
    """The header of a part, and its place."""

    place: int
    """Its offset in the file."""
    base: int
    """The base of the segment."""
    begin: int
    """The beginning of its range of the log …"""
    end: int
    rows: int
    slots: int
    used_slots: int
    messages: int
    begun_ms: int
    """When its first batch was stored; ages count from there."""
    last_ms: int
    """When its last batch was stored."""
    first_offset: int
    last_offset: int

    @property
    def size(self) -> int:
        """The size of the part in bytes."""
        return _HEADER.size + self.slots * _SLOT.size + self.rows * ROW_TYPE.itemsize


def pack_part(base: int, collected: Collected) -> list[bytes]:
    """Encode a part: header, slots, rows."""
    # Newest first; sorting keeps that order within a slot.
    rows = collected.rows[::-1]
    count = len(rows)
    slots = -(-count // _ROWS_PER_SLOT)
    table, used, ordered = b"", 0, b""
    if slots:
        # Sorting so few different numbers of 16 bits takes a fifth of the time.
        kind = np.uint16 if slots < 2**16 else np.uint32
        slot_of = (rows["hash"] % np.uint32(slots)).astype(kind)
        counts = np.bincount(slot_of, minlength=slots)
        used = int(np.count_nonzero(counts))
        # As plain bytes they are moved whole, and not field by field.
        ordered = rows.view(f"V{ROW_TYPE.itemsize}")[np.argsort(slot_of, kind="stable")].tobytes()
        table = _pack_slots(counts, ordered, collected.begin)
    _, _, _, messages, begun_ms, last_ms, first, last = collected
    head = _HEADER.pack(
        *(_MAGIC, _VERSION, 0, base, collected.begin, collected.end),
        *(count, slots, used, messages, begun_ms, last_ms, first, last, 0),
    )[: -_CRC.size]
    return [head + _CRC.pack(google_crc32c.value(head)), table, ordered]


def _pack_slots(
    counts: "np.ndarray[tuple[int], np.dtype[np.int64]]", rows: bytes, begin: int
) -> bytes:
    ends = np.cumsum(counts)
    packed = []
    width = ROW_TYPE.itemsize
    for slot, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        newest = end - count + 1 if count else 0
        content = rows[(end - count) * width : end * width]
        packed.append(_SLOT.pack(newest, count, _slot_crc(begin, slot, newest, count, content)))
    return b"".join(packed)


def _slot_crc(begin: int, slot: int, newest: int, count: int, content: bytes) -> int:
    seed = google_crc32c.value(_SLOT_SEED.pack(begin, slot, newest, count))
    return int(google_crc32c.extend(seed, content))


def read_heads(file: File, base: int) -> tuple[list[PartHead], str]:
    """Return the headers of all valid parts, and a text if bytes after them are damaged."""
    heads: list[PartHead] = []
    place, begin, size = 0, base, file.size()
    while place < size:
        found = _read_head(file, place, base, begin, size)
        if isinstance(found, str):
            return heads, found
        heads.append(found)
        place += found.size
        begin = found.end
    return heads, ""


def _read_head(file: File, place: int, base: int, begin: int, size: int) -> PartHead | str:
    data = file.read(_HEADER.size, place)
    if len(data) < _HEADER.size:
        return "a part has no header"
    magic, version, _, found, *fields, crc = _HEADER.unpack(data)
    if magic != _MAGIC or google_crc32c.value(data[: -_CRC.size]) != crc:
        return "the header of a part is damaged"
    if version != _VERSION or found != base:
        return f"version {version} and base {found} are not ours"
    head = PartHead(place, base, *fields)
    if head.begin != begin or head.end <= begin:
        return f"a part is of {head.begin}..{head.end} of the log, where {begin} should follow"
    if place + head.size > size:
        return "a part is not there to its end"
    return head


def find_rows(file: File, head: PartHead, wanted: int, *, is_id: bool) -> Rows:
    """Return the rows of a hash, newest first.

    Raises:
        CorruptionError: The part is damaged there.
    """
    if not head.slots:
        return np.empty(0, ROW_TYPE)
    rows = _read_slot(file, head, wanted % head.slots)
    is_hit = (rows["hash"] == wanted) & ((rows["index"] >= ID_ROW) == is_id)
    hits: Rows = rows[is_hit]
    return hits


def _read_slot(file: File, head: PartHead, slot: int) -> Rows:
    path = segment_path(head.base, "keys")
    place = head.place + _HEADER.size + slot * _SLOT.size
    data = file.read(_SLOT.size, place)
    if len(data) < _SLOT.size:
        raise CorruptionError(path, place, "a slot is missing")
    newest, count, crc = _SLOT.unpack(data)
    if count > head.rows or newest + count > head.rows + 1 or bool(newest) != bool(count):
        raise CorruptionError(path, place, "a slot points behind the rows")
    rows_at = head.place + _HEADER.size + head.slots * _SLOT.size
    width = ROW_TYPE.itemsize
    content = file.read(count * width, rows_at + max(newest - 1, 0) * width)
    if _slot_crc(head.begin, slot, newest, count, content) != crc:
        raise CorruptionError(path, place, "the crc of a slot does not match")
    return np.frombuffer(content, ROW_TYPE)


def write_part(files: FileSystem, place: int, base: int, collected: Collected) -> PartHead:
    """Write a part after the existing ones, over any other bytes there.

    Not synced: the crcs detect what a power cut damages, and it is rebuilt.

    Raises:
        StorageError: The part was not written.
    """
    packed = pack_part(base, collected)
    file = files.open(segment_path(base, "keys"), create=True)
    try:
        if file.size() != place:
            file.truncate(place)
        file.write(packed, place)
        found = _read_head(file, place, base, collected.begin, file.size())
    finally:
        file.close()
    if isinstance(found, str):
        raise CorruptionError(segment_path(base, "keys"), place, found)
    return found

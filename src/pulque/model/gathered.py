"""A gathered record: messages of many stored batches, served as one batch.

A filter that wants few messages finds one in a batch and the next one in another. The broker
gathers them in one batch, with two columns beside it: the place of each message in the
partition, and its store time. The record is made for one answer and is never
in a log, so it has a magic number of its own::

    +-------+---------+------+------+-------+----------------+-----+
    | magic | version | zero | size | count | first sequence | crc |
    | u16   | u8      | u8   | u32  | u32   | u64            | u32 |
    +-------+---------+------+------+-------+----------------+-----+
    | place u32 each | stored at ms i64 each | then the batch      |
    +----------------+-----------------------+---------------------+

``size`` counts the whole record. A *place* is how far a message is behind the first sequence;
places ascend from 0. ``crc`` is CRC-32C over the head before it and the two columns; the batch
has a crc of its own.
"""

from functools import lru_cache
from operator import lt
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.model.batch import HEADER_SIZE, MAX_COUNT

__all__ = ["GATHERED_MAGIC", "Gathered", "pack_gathered", "read_gathered"]

GATHERED_MAGIC = b"PG"
VERSION = 1
_HEAD = Struct("<2sBBIIQ")
_CRC = Struct("<I")
_BATCH_COUNT = Struct("<8xI")
HEAD_SIZE = _HEAD.size + _CRC.size
_WIDTH = 12


class Gathered(NamedTuple):
    """A parsed gathered record. Its batch is not checked."""

    size: int
    """The size of the whole record."""
    first_sequence: int
    places: tuple[int, ...]
    """How far each message is behind the first, ascending from 0."""
    stored_at_ms: tuple[int, ...]
    batch: bytes


def pack_gathered(
    first_sequence: int, count: int, places: bytes, stored_at_ms: bytes, batch: bytes
) -> bytes:
    """Return a record; the columns are given encoded."""
    size = HEAD_SIZE + len(places) + len(stored_at_ms) + len(batch)
    head = _HEAD.pack(GATHERED_MAGIC, VERSION, 0, size, count, first_sequence)
    crc = google_crc32c.value(b"".join((head, places, stored_at_ms)))
    return b"".join((head, _CRC.pack(crc), places, stored_at_ms, batch))


def read_gathered(data: bytes, at: int) -> Gathered | str:
    """Return the record at ``at``, or a text that describes what is wrong with it.

    The caller has to check the batch, its crc included.
    """
    if len(data) - at < HEAD_SIZE:
        return f"{len(data) - at} bytes left, the head has {HEAD_SIZE}"
    magic, version, zero, size, count, first_sequence = _HEAD.unpack_from(data, at)
    if magic != GATHERED_MAGIC or version != VERSION or zero:
        return f"magic {magic!r} or version {version} is unknown (this is version {VERSION})"
    columns_at = at + HEAD_SIZE
    batch_at = columns_at + _WIDTH * count
    is_count = 1 <= count <= MAX_COUNT
    if not is_count or size > len(data) - at or at + size < batch_at + HEADER_SIZE:
        return f"size {size} or count {count} does not fit the {len(data) - at} bytes there are"
    columns = data[columns_at:batch_at]
    (crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    if google_crc32c.value(data[at : at + _HEAD.size] + columns) != crc:
        return "the crc of the head does not match"
    numbers = _columns(count).unpack(columns)
    places = numbers[:count]
    batch = data[batch_at : at + size]
    if places[0] or not all(map(lt, places, places[1:])) or _count_of(batch) != count:
        return "the places do not ascend from 0, or are not as many as messages"
    return Gathered(size, first_sequence, places, numbers[count:], batch)


def _count_of(batch: bytes) -> int:
    count: int = _BATCH_COUNT.unpack_from(batch)[0]
    return count


@lru_cache(maxsize=256)
def _columns(count: int) -> Struct:
    return Struct(f"<{count}I{count}q")

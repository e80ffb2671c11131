"""The batch: the unit that is sent, stored, served, replicated and archived, byte for byte.

A producer packs messages of one partition and one priority::

    +----------+---------------------------+-------------------------------------------+
    | header   | columns, never compressed | records, may be compressed                |
    | 52 bytes | size, tag bits, key hash, | ids, more columns, then the data: per     |
    |          | due time                  | message key, order key, tags, headers,    |
    |          |                           | body                                      |
    +----------+---------------------------+-------------------------------------------+

A broker reads the header and the columns and nothing else, so its work per batch does not grow
with the messages in it. Every column but ``size`` and ``id`` is there only if a flag says so:
plain bodies cost 20 bytes each. All numbers are little-endian.

``crc`` is CRC-32C over the rest of the batch, seeded with the CRC-32C of the partition's name:
in another partition its crc does not match. The place of a column depends only on the
flags and the count, see ``Layout``. ``docs/reference/batch-format.md`` has every byte.
"""

from enum import IntEnum, IntFlag
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.errors import InvalidBatchError
from pulque.model.checksum import crc_after_crc

__all__ = [
    "HEADER",
    "HEADER_SIZE",
    "MAX_COUNT",
    "MAX_RECORDS_SIZE",
    "UNKNOWN_FLAGS",
    "BatchHeader",
    "Codec",
    "Column",
    "Flag",
    "Layout",
    "count_of",
    "layout_of",
    "read_header",
    "renumber",
    "seal",
    "seed_of",
    "slice_batch",
    "verify_crc",
]

MAX_COUNT = 10_000
MAX_RECORDS_SIZE = 64 * 1024 * 1024
"""The most bytes that records may decompress to, to bound the reader's memory."""
HEADER = Struct("<IHBBIIQIQqQ")
HEADER_SIZE = HEADER.size
_CRC = Struct("<I")
_COUNT = Struct("<I")
_COUNT_AT = 8
_COUNT_AND_SIZE = Struct("<II")
"""The header fields that differ in a part: the count and the size of the records."""


class Flag(IntFlag):
    """The optional columns of a batch."""

    TAGS = 1
    KEYS = 2
    DUE = 4
    CREATED = 8
    EXPIRES = 16
    ATTEMPTS = 32
    ORDER_KEYS = 64
    HEADERS = 128
    NAMED_PRODUCER = 256


class Codec(IntEnum):
    """How the records are compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class BatchHeader(NamedTuple):
    """The first 52 bytes of a batch, in order."""

    crc: int
    """CRC-32C of all that follows, seeded with the CRC-32C of the partition's name."""
    flags: int
    """Which columns there are: ``Flag``."""
    codec: int
    """How the records are compressed: ``Codec``."""
    priority: int
    """0 to 9, higher first."""
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    """How many messages: 1 to 10,000."""
    records_size: int
    """Bytes of the records once decompressed."""
    producer_id: int
    """The producer, for deduplication; 0 for none."""
    incarnation: int
    """Which run of that producer."""
    producer_sequence: int
    """Ordinal of the batch for this producer, incarnation and partition, from 0."""
    created_at_ms: int
    """When the first message was created."""
    tag_union: int
    """The tag bits of all messages, or-ed."""


class Column(NamedTuple):
    """One column: a number or a fixed run of bytes for each message."""

    name: str
    code: str
    width: int
    flag: int
    visible: bool


COLUMNS = (
    Column("size", "I", 4, 0, visible=True),
    Column("tag_bits", "Q", 8, Flag.TAGS, visible=True),
    Column("key_hash", "I", 4, Flag.KEYS, visible=True),
    Column("due_at_ms", "q", 8, Flag.DUE, visible=True),
    Column("id", "16s", 16, 0, visible=False),
    Column("created_at_ms", "q", 8, Flag.CREATED, visible=False),
    Column("expires_at_ms", "q", 8, Flag.EXPIRES, visible=False),
    Column("attempt", "H", 2, Flag.ATTEMPTS, visible=False),
    Column("key_size", "H", 2, Flag.KEYS, visible=False),
    Column("order_key_size", "H", 2, Flag.ORDER_KEYS, visible=False),
    Column("tags_size", "H", 2, Flag.TAGS, visible=False),
    Column("headers_size", "I", 4, Flag.HEADERS, visible=False),
)
UNKNOWN_FLAGS = ~int(sum(Flag))
_LAST_CODEC = int(Codec.ZSTD)
_new_header = tuple.__new__


class Layout(NamedTuple):
    """Where the columns of a batch lie, for one combination of flags.

    A column begins at ``HEADER_SIZE + count * before[name]``, in the decompressed form.
    """

    columns: tuple[Column, ...]
    before: dict[str, int]
    visible_width: int
    record_width: int

    def column_start(self, name: str, count: int) -> int:
        """Return where a column begins."""
        return HEADER_SIZE + count * self.before[name]

    def records_start(self, count: int) -> int:
        """Return where the records begin, compressed or not."""
        return HEADER_SIZE + count * self.visible_width

    def data_start(self, count: int) -> int:
        """Return where the data begins, in the decompressed form."""
        return HEADER_SIZE + count * (self.visible_width + self.record_width)


@lru_cache(maxsize=1024)
def layout_of(flags: int) -> Layout:
    """Return the layout for ``flags``."""
    columns = tuple(c for c in COLUMNS if not c.flag or flags & c.flag)
    before: dict[str, int] = {}
    width = 0
    for column in columns:
        before[column.name] = width
        width += column.width
    visible = sum(c.width for c in columns if c.visible)
    return Layout(columns, before, visible, width - visible)


@lru_cache(maxsize=65536)
def seed_of(partition: str) -> int:
    """Return the CRC seed of a partition."""
    return int(google_crc32c.value(partition.encode()))


def read_header(batch: bytes) -> BatchHeader:
    """Parse and check the header of a batch from the network or a file.

    Raises:
        InvalidBatchError: The header is invalid, or the size does not match it.
    """
    size = len(batch)
    if size < HEADER_SIZE:
        raise InvalidBatchError(
            f"a batch of {size} bytes is shorter than its header of {HEADER_SIZE}"
        )
    # Everything is taken apart once: this is done for every batch that comes.
    header = _new_header(BatchHeader, HEADER.unpack_from(batch))
    _, flags, codec, priority, count, records_size, *_ = header
    if not 1 <= count <= MAX_COUNT:
        raise InvalidBatchError(f"a batch of {count} messages; 1 to {MAX_COUNT} are allowed")
    if flags & UNKNOWN_FLAGS or codec > _LAST_CODEC or priority > 9:
        raise InvalidBatchError(
            f"flags {flags:#x}, codec {codec} or priority {priority} of a batch is unknown"
        )
    layout = layout_of(flags)
    if records_size < count * layout.record_width:
        raise InvalidBatchError("the records of a batch are shorter than their columns")
    if records_size > MAX_RECORDS_SIZE:
        raise InvalidBatchError(
            f"records of {records_size} bytes; at most {MAX_RECORDS_SIZE} are allowed"
        )
    records = size - HEADER_SIZE - count * layout.visible_width
    if records < 0 or (not codec and records != records_size):
        raise InvalidBatchError(
            f"a batch of {size} bytes does not fit its {count} messages "
            f"and records of {records_size} bytes"
        )
    return header


def count_of(batch: bytes) -> int:
    """Return the message count of a verified batch, without parsing its header."""
    count: int = _COUNT.unpack_from(batch, _COUNT_AT)[0]
    return count


def verify_crc(batch: bytes, seed: int) -> bool:
    """Return whether a batch is intact, and was packed for the partition of ``seed``."""
    if len(batch) < HEADER_SIZE:
        return False
    crc: int = _CRC.unpack_from(batch)[0]
    return crc_after_crc(batch, seed) == crc


def seal(rest: bytes, seed: int) -> bytes:
    """Prepend the crc of the given bytes."""
    return _CRC.pack(google_crc32c.extend(seed, rest)) + rest


def renumber(batch: bytes, seed: int, producer_id: int, producer_sequence: int) -> bytes:
    """Return a batch re-sealed for another partition, as its producer would have packed it."""
    header = BatchHeader._make(HEADER.unpack_from(batch))
    renumbered = header._replace(producer_id=producer_id, producer_sequence=producer_sequence)
    return seal(HEADER.pack(*renumbered)[4:] + batch[HEADER_SIZE:], seed)


@lru_cache(maxsize=1024)
def _sizes(count: int) -> Struct:
    return Struct(f"<{count}I")


def slice_batch(batch: bytes, start: int, end: int, seed: int) -> bytes:
    """Return messages ``start..end`` of an uncompressed batch as a batch of their own.

    The caller has verified the batch: the new crc would hide damage. The union of tag bits is
    kept: a superset only costs an extra test.
    """
    header = read_header(batch)
    if header.codec:
        raise InvalidBatchError("a compressed batch cannot be sliced")
    count = header.count
    if not 0 <= start < end <= count:
        raise InvalidBatchError(f"messages {start}..{end} of a batch of {count}")
    columns, data_start, record_width = _places(header.flags, count)
    sizes = _sizes(end).unpack_from(batch, HEADER_SIZE)
    data_start += sum(sizes[:start])
    data_end = data_start + sum(sizes[start:])
    if data_end > len(batch):
        raise InvalidBatchError("the sizes of a batch's messages do not add up to its data")
    kept = end - start
    records_size = kept * record_width + data_end - data_start
    rest = b"".join(
        [
            batch[4:_COUNT_AT],
            _COUNT_AND_SIZE.pack(kept, records_size),
            batch[_COUNT_AT + _COUNT_AND_SIZE.size : HEADER_SIZE],
            *[batch[at + start * width : at + end * width] for at, width in columns],
            batch[data_start:data_end],
        ]
    )
    return seal(rest, seed)


@lru_cache(maxsize=1024)
def _places(flags: int, count: int) -> tuple[list[tuple[int, int]], int, int]:
    """Return start and width of each column, the start of the data, and the total width."""
    layout = layout_of(flags)
    columns = [(layout.column_start(c.name, count), c.width) for c in layout.columns]
    return columns, layout.data_start(count), layout.record_width

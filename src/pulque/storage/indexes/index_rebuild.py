"""Rebuild the entries of a segment from the segment itself."""

from pulque.model.batch import HEADER, BatchHeader
from pulque.model.positions import MessageOffset
from pulque.model.record import Envelope, RecordType
from pulque.storage.events import Listener
from pulque.storage.indexes.segment_index import Entry, OpenIndex
from pulque.storage.logs.partitions import decode_table
from pulque.storage.logs.segment import DamagedBytes, Segment, walk

__all__ = ["BAD_TABLE", "entries_of", "entry_of"]

BAD_TABLE = "the partition table's crc does not match"


def entries_of(segment: Segment, end: int, listener: Listener) -> OpenIndex:
    """Return the entries of a segment up to ``end``.

    All of it was durable: damage is reported and left out. Batches are not verified here,
    only when they are read. Thread-safe on a sealed segment.
    """
    index = OpenIndex({}, is_complete=False)
    for item in walk(segment, MessageOffset(segment.base)):
        if isinstance(item, DamagedBytes):
            offset, size, problem = item.offset, item.end - item.offset, item.reason
        else:
            offset, size, problem = item[0].offset, item[0].size, ""
        if offset >= end:
            break
        if not isinstance(item, DamagedBytes):
            has_starts = offset == segment.base and segment.has_own_table
            problem = _take_in(*item, index, has_starts=has_starts)
        if problem:
            listener.corruption_found(segment.path, offset, min(size, end - offset), problem)
    return index


def _take_in(envelope: Envelope, content: bytes, index: OpenIndex, *, has_starts: bool) -> str:
    """Add the entry of a record; return a text if the record is damaged."""
    if envelope.type is RecordType.BATCH:
        if len(content) < HEADER.size or not envelope.count:
            return "the batch has no header, or no messages"
        index.add(entry_of(envelope, content))
        return ""
    rows = decode_table(content)
    if rows is None:
        return BAD_TABLE
    if has_starts:
        index.starts.update((partition, sequence) for partition, _, sequence in rows)
        index.is_complete = True
    return ""


def entry_of(envelope: Envelope, batch: bytes) -> Entry:
    """Return the entry of a stored batch."""
    return Entry(
        envelope.partition,
        envelope.count,
        envelope.first_sequence,
        envelope.offset,
        envelope.size,
        envelope.stored_at_ms,
        BatchHeader._make(HEADER.unpack_from(batch)).tag_union,
    )

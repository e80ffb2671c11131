"""One file of a log, and the walk over the records in it.

An earlier release let delay servers write new segments over the files of removed ones
(decision 0024). ``open_segment`` finds where such a segment ends.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from pulque.model.positions import Epoch, MessageOffset
from pulque.model.record import ENVELOPE_SIZE, MAGIC, VERSION, Envelope, RecordType, read_envelope
from pulque.storage.files import File

__all__ = [
    "DamagedBytes",
    "Segment",
    "next_record",
    "open_segment",
    "record_at",
    "walk",
]

_WINDOW = 4 * 1024 * 1024
_KINDS = b"".join(re.escape(bytes([kind])) for kind in RecordType)
_HEAD = re.escape(MAGIC.to_bytes(2, "little")) + b"[" + _KINDS + b"]" + re.escape(bytes([VERSION]))
_LOW_BITS = 24


class Segment:
    """One file of a log: the bytes from ``base`` to ``end`` of the whole log."""

    __slots__ = ("base", "end", "epoch", "file", "opened_at_ms", "path")

    def __init__(self, path: str, file: File, base: int, end: int, opened_at_ms: int = 0) -> None:
        self.path = path
        self.file = file
        self.base = base
        self.end = end
        self.opened_at_ms = opened_at_ms
        """When the first record was written; messages in it are not older, those before it
        not younger. 0 if the record is damaged."""
        self.epoch: Epoch | None = None
        """The epoch of all its records, if the file may hold records of another segment, too."""

    @property
    def has_own_table(self) -> bool:
        """Whether the table that it begins with is its own.

        In a file that was written twice, a power cut may have kept the new envelope and the older
        table: its crc matches, and its sequences are too low.
        """
        return self.epoch is None

    def read(self, offset: int, size: int, *, may_block: bool = True) -> bytes:
        """Return bytes of the log that lie in this segment."""
        return self.file.read(size, offset - self.base, may_block=may_block)


def open_segment(path: str, file: File, base: int) -> Segment:
    """Return the segment that lies in a file of the message log.

    A file that an earlier release used twice holds bytes of an older segment behind the end of
    the newer one, where nobody cut it off: after a kill, or where a power cut undid the cut. The
    table at the beginning of such a segment has a ``first_sequence``, which is 0 in all others,
    and all its records have the same random epoch. The segment ends with the last of them: what
    a message of the older segment holds may look like a record, but cannot know that epoch. If
    there is still a record of an earlier offset at the beginning, nothing of the segment was
    written.
    """
    segment = Segment(path, file, base, base + file.size())
    head = read_envelope(segment.read(base, ENVELOPE_SIZE))
    if not isinstance(head, Envelope):
        return segment
    if head.offset < base:
        segment.end = base
    elif head.offset == base:
        segment.opened_at_ms = head.stored_at_ms
        if head.first_sequence:
            segment.epoch = head.epoch
            segment.end = _end_of_epoch(segment)
    return segment


def _end_of_epoch(segment: Segment) -> int:
    """Return where the last record ends that has the segment's epoch, be it whole or not."""
    end = segment.base
    for item in walk(segment, MessageOffset(segment.base)):
        if not isinstance(item, DamagedBytes):
            end = item[0].offset + item[0].size
        elif record_at(segment, item.offset) is not None:
            end = item.end
    return end


class DamagedBytes:
    """Bytes that are not a record, as the walk met them."""

    __slots__ = ("end", "offset", "reason", "synced")

    def __init__(self, offset: int, end: int, reason: str, synced: int = 0) -> None:
        self.offset = MessageOffset(offset)
        self.end = MessageOffset(end)
        """Where the next record begins, or the segment ends."""
        self.reason = reason
        self.synced = synced
        """Up to where the log was on disk when this was written, if that is readable."""


def walk(
    segment: Segment, start: MessageOffset
) -> Iterator[tuple[Envelope, bytes] | DamagedBytes]:
    """Yield each record from ``start`` to the end of a segment as (envelope, contents).

    Damage is skipped: the walk continues with the next record whose envelope has its own
    offset. The contents are not checked here. The work is linear in the segment's size,
    whatever its bytes.
    """
    window = _Window(segment)
    offset = int(start)
    while offset < segment.end:
        found = _record_at(window, offset)
        if isinstance(found, DamagedBytes):
            found.end = MessageOffset(_next_record(window, offset + 1))
            yield found
            offset = found.end
        else:
            yield found
            offset += found[0].size


def next_record(segment: Segment, start: MessageOffset) -> Envelope | None:
    """Return the first record at or after ``start`` whose envelope has its own offset."""
    window = _Window(segment)
    offset = _next_record(window, int(start))
    if offset >= segment.end:
        return None
    envelope = read_envelope(*window.at(offset, ENVELOPE_SIZE))
    return envelope if isinstance(envelope, Envelope) else None


def record_at(segment: Segment, offset: int) -> Envelope | None:
    """Return the envelope at ``offset`` if it has that offset, even of an incomplete record."""
    found = read_envelope(segment.read(offset, ENVELOPE_SIZE))
    if isinstance(found, Envelope) and _is_of(segment, found, offset):
        return found
    return None


def _is_of(segment: Segment, envelope: Envelope, offset: int) -> bool:
    """Return whether the envelope at ``offset`` is one of the segment's records."""
    return envelope.offset == offset and segment.epoch in (None, envelope.epoch)


class _Window:
    """The part of a segment that is in memory. It moves when other bytes are needed."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.data = b""
        self.offset = 0

    def at(self, offset: int, size: int) -> tuple[bytes, int]:
        """Return a buffer and the place in it where ``size`` bytes from ``offset`` on lie.

        They are fewer only at the end of the file.
        """
        at = offset - self.offset
        if at < 0 or at + size > len(self.data):
            wanted = min(max(size, _WINDOW), self.segment.end - offset)
            self.data, self.offset, at = self.segment.read(offset, wanted), offset, 0
        return self.data, at


def _record_at(window: _Window, offset: int) -> tuple[Envelope, bytes] | DamagedBytes:
    end = window.segment.end
    data, at = window.at(offset, min(ENVELOPE_SIZE, end - offset))
    envelope = read_envelope(data, at)
    if isinstance(envelope, str):
        return DamagedBytes(offset, end, envelope)
    if not _is_of(window.segment, envelope, offset):
        return DamagedBytes(offset, end, f"a record of offset {envelope.offset} lies here")
    missing = offset + envelope.size - end
    if missing <= 0:
        data, at = window.at(offset, envelope.size)
        missing = envelope.size - (len(data) - at)
    if missing > 0:
        synced = envelope.synced if envelope.synced <= offset else 0
        return DamagedBytes(offset, end, f"{missing} bytes of the record are missing", synced)
    return envelope, data[at + ENVELOPE_SIZE : at + envelope.size]


def _next_record(window: _Window, offset: int) -> int:
    """Return where the first record at or after ``offset`` begins, or the segment's end."""
    end = window.segment.end
    while end - offset >= ENVELOPE_SIZE:
        data, at = window.at(offset, ENVELOPE_SIZE)
        last = len(data) - ENVELOPE_SIZE
        if last < 0:
            return end
        highs = range(window.offset >> _LOW_BITS, (window.offset + last >> _LOW_BITS) + 1)
        for match in _heads(highs).finditer(data, at):
            at = match.start()
            if at > last:
                break
            envelope = read_envelope(data, at)
            place = window.offset + at
            if isinstance(envelope, Envelope) and _is_of(window.segment, envelope, place):
                return place
        offset = window.offset + last + 1
    return end


@lru_cache(maxsize=16)
def _heads(highs: range) -> re.Pattern[bytes]:
    """Return what the head of a record looks like whose offset has one of these high bits.

    That sorts out nearly all that only looks like one, at the speed of a search for bytes.
    """
    offsets = b"|".join(re.escape(high.to_bytes(5, "little")) for high in highs)
    return re.compile(_HEAD + b"(?=.{7}(?:" + offsets + b"))", re.DOTALL)

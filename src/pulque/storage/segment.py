"""One file of a log, and the walk over the records in it.

A file may have been another segment's before (``pulque.storage.spares``): then bytes of older
records lie behind the end of the segment, until it is sealed and cut there. Its first record, a
partition table, says so: its ``first_sequence``, which tables have no other use for, is how long
the file was. The records of such a segment have an epoch that was drawn by lot, all the same one:
what a message of long ago holds, be it made to look like a record, is none of them.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from pulque.model.positions import Epoch, MessageOffset
from pulque.model.record import ENVELOPE_SIZE, MAGIC, VERSION, Envelope, RecordType, read_envelope
from pulque.storage.files import File

__all__ = [
    "Damage",
    "Segment",
    "drawn_epoch",
    "next_record",
    "record_at",
    "walk",
    "was_used_before",
]

_WINDOW = 4 * 1024 * 1024
_KINDS = b"".join(re.escape(bytes([kind])) for kind in RecordType)
_HEAD = re.escape(MAGIC.to_bytes(2, "little")) + b"[" + _KINDS + b"]" + re.escape(bytes([VERSION]))
_LOW_BITS = 24


class Segment:
    """One file of a log: the bytes from ``base`` to ``end`` of the whole log."""

    __slots__ = ("base", "end", "file", "opened_at_ms", "path")

    def __init__(self, path: str, file: File, base: int, end: int, opened_at_ms: int = 0) -> None:
        self.path = path
        self.file = file
        self.base = base
        self.end = end
        self.opened_at_ms = opened_at_ms
        """When the first record was written; messages in it are not older, those before it
        not younger. 0 if the record is damaged."""

    def read(self, offset: int, size: int, *, may_block: bool = True) -> bytes:
        """Return bytes of the log that lie in this segment."""
        return self.file.read(size, offset - self.base, may_block=may_block)


class Damage:
    """The walk met bytes that are no record."""

    __slots__ = ("end", "offset", "reason", "synced")

    def __init__(self, offset: int, end: int, reason: str, synced: int = 0) -> None:
        self.offset = MessageOffset(offset)
        self.end = MessageOffset(end)
        """Where the next record begins, or the segment ends."""
        self.reason = reason
        self.synced = synced
        """How far the log was on disk when this was written, if that much can be read."""


def walk(segment: Segment, start: MessageOffset) -> Iterator[tuple[Envelope, bytes] | Damage]:
    """Yield each record from ``start`` to the end of a segment as (envelope, what follows it).

    Damage is passed over: the walk goes on with the next record that stands where it says it
    does. What follows an envelope is not checked here. The work grows with the segment's size
    and with nothing else, whatever lies in it.
    """
    window = _Window(segment)
    offset = int(start)
    while offset < segment.end:
        found = _record_at(window, offset)
        if isinstance(found, Damage):
            found.end = MessageOffset(_next_record(window, offset + 1))
            yield found
            offset = found.end
        else:
            yield found
            offset += found[0].size


def next_record(segment: Segment, start: MessageOffset) -> Envelope | None:
    """Return the first record at or after ``start`` that stands where it says it does."""
    window = _Window(segment)
    offset = _next_record(window, int(start))
    if offset >= segment.end:
        return None
    envelope = read_envelope(*window.at(offset, ENVELOPE_SIZE))
    return envelope if isinstance(envelope, Envelope) else None


def record_at(segment: Segment, offset: int) -> Envelope | None:
    """Return the envelope that stands at ``offset`` and says so, be its record whole or not."""
    found = read_envelope(segment.read(offset, ENVELOPE_SIZE))
    return found if isinstance(found, Envelope) and found.offset == offset else None


def was_used_before(segment: Segment) -> bool:
    """Say whether older records may lie behind a segment's end, as its first record tells."""
    return drawn_epoch(segment) is not None


def drawn_epoch(segment: Segment) -> Epoch | None:
    """Return the epoch that all records of a segment have whose file was used before."""
    head = record_at(segment, segment.base)
    return head.epoch if head is not None and head.first_sequence else None


class _Window:
    """The part of a segment that is in memory. It moves on when bytes beyond it are asked for."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.epoch = drawn_epoch(segment)
        self.data = b""
        self.offset = 0

    def is_ours(self, envelope: Envelope) -> bool:
        """Say whether an envelope is of this segment, and not left by an older one."""
        return self.epoch is None or envelope.epoch == self.epoch

    def at(self, offset: int, size: int) -> tuple[bytes, int]:
        """Return a buffer and the place in it where ``size`` bytes from ``offset`` on lie.

        They are fewer only at the end of the file.
        """
        at = offset - self.offset
        if at < 0 or at + size > len(self.data):
            wanted = min(max(size, _WINDOW), self.segment.end - offset)
            self.data, self.offset, at = self.segment.read(offset, wanted), offset, 0
        return self.data, at


def _record_at(window: _Window, offset: int) -> tuple[Envelope, bytes] | Damage:
    end = window.segment.end
    data, at = window.at(offset, min(ENVELOPE_SIZE, end - offset))
    envelope = read_envelope(data, at)
    if isinstance(envelope, str):
        return Damage(offset, end, envelope)
    if envelope.offset != offset or not window.is_ours(envelope):
        return Damage(offset, end, f"a record of offset {envelope.offset} lies here")
    missing = offset + envelope.size - end
    if missing <= 0:
        data, at = window.at(offset, envelope.size)
        missing = envelope.size - (len(data) - at)
    if missing > 0:
        synced = envelope.synced if envelope.synced <= offset else 0
        return Damage(offset, end, f"{missing} bytes of the record are missing", synced)
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
            if not isinstance(envelope, Envelope) or not window.is_ours(envelope):
                continue
            if envelope.offset == window.offset + at:
                return window.offset + at
        offset = window.offset + last + 1
    return end


@lru_cache(maxsize=16)
def _heads(highs: range) -> re.Pattern[bytes]:
    """Return what the head of a record looks like whose offset has one of these high bits.

    That sorts out nearly all that only looks like one, at the speed of a search for bytes.
    """
    offsets = b"|".join(re.escape(high.to_bytes(5, "little")) for high in highs)
    return re.compile(_HEAD + b"(?=.{7}(?:" + offsets + b"))", re.DOTALL)

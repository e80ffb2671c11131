"""One file of a log, and the walk over the records in it."""

from collections.abc import Iterator

from pulque.model.positions import MessageOffset
from pulque.model.record import ENVELOPE_SIZE, MAGIC, Envelope, read_envelope
from pulque.storage.files import File

__all__ = ["Damage", "Segment", "next_record", "walk"]

_WINDOW = 4 * 1024 * 1024
_MAGIC_BYTES = MAGIC.to_bytes(2, "little")


class Segment:
    """One file of a log: the bytes from ``base`` to ``end`` of the whole log."""

    __slots__ = ("base", "end", "file", "opened_at_ms", "path")

    def __init__(self, path: str, file: File, base: int, end: int, opened_at_ms: int = 0) -> None:
        self.path = path
        self.file = file
        self.base = base
        self.end = end
        self.opened_at_ms = opened_at_ms
        """When the first record was written; messages in it are not older."""

    def read(self, offset: int, size: int, *, may_block: bool = True) -> bytes:
        """Return bytes of the log that lie in this segment."""
        return self.file.read(size, offset - self.base, may_block=may_block)


class Damage:
    """The walk met bytes that are no record."""

    __slots__ = ("offset", "reason")

    def __init__(self, offset: MessageOffset, reason: str) -> None:
        self.offset = offset
        self.reason = reason


def walk(segment: Segment, start: MessageOffset) -> Iterator[tuple[Envelope, bytes] | Damage]:
    """Yield each record from ``start`` to the end of a segment as (envelope, what follows it).

    Ends after the first damage. What follows the envelope is not checked here.
    """
    offset = int(start)
    window = b""
    window_at = offset
    while offset < segment.end:
        at = offset - window_at
        if len(window) - at < ENVELOPE_SIZE:
            window, window_at, at = segment.read(offset, _WINDOW), offset, 0
        envelope = read_envelope(window, at)
        if isinstance(envelope, str):
            yield Damage(MessageOffset(offset), envelope)
            return
        if envelope.offset != offset:
            yield Damage(MessageOffset(offset), f"a record of offset {envelope.offset} lies here")
            return
        if offset + envelope.size > segment.end:
            missing = offset + envelope.size - segment.end
            yield Damage(MessageOffset(offset), f"{missing} bytes of the record are missing")
            return
        if len(window) - at < envelope.size:
            window, window_at, at = segment.read(offset, max(envelope.size, _WINDOW)), offset, 0
        yield envelope, window[at + ENVELOPE_SIZE : at + envelope.size]
        offset += envelope.size


def next_record(segment: Segment, start: MessageOffset) -> Envelope | None:
    """Return the first record at or after ``start`` that stands where it says it does."""
    offset = int(start)
    while offset < segment.end:
        window = segment.read(offset, _WINDOW)
        at = window.find(_MAGIC_BYTES)
        while at >= 0:
            envelope = read_envelope(window, at)
            if not isinstance(envelope, str) and envelope.offset == offset + at:
                return envelope
            at = window.find(_MAGIC_BYTES, at + 1)
        if len(window) < _WINDOW:
            return None
        # An envelope may lie across two windows.
        offset += len(window) - ENVELOPE_SIZE
    return None

"""Read the bytes of a log from its segments, for followers.

All functions may be called from any thread while the log grows.
"""

from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

from pulque.errors import PositionLostError
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.checkpoint import checkpoint_path
from pulque.storage.files import FileSystem
from pulque.storage.logs.fact_codec import LARGEST_FACT
from pulque.storage.logs.segment import Segment

__all__ = ["LogBytes", "action_size", "bytes_from", "message_size", "part_of_checkpoint"]

_base = attrgetter("base")
_FACT_HEAD = Struct("<II")


class LogBytes(NamedTuple):
    """Bytes of one segment of a log."""

    base: int
    """The base of their segment …"""
    offset: int
    """… and their offset. At the base, a new segment begins with them."""
    data: bytes
    """They may end in the middle of a record; none at the end of the log."""


def bytes_from(
    segments: list[Segment],
    offset: int,
    max_bytes: int,
    size_of: Callable[[bytes], int],
    *,
    may_block: bool,
) -> LogBytes:
    """Return written bytes from ``offset`` on, within one segment.

    Args:
        segments: All segments of the log.
        offset: Where a record begins; after the end of a sealed segment, the next one follows.
        max_bytes: How much to return, but at least one whole record. With 0, nothing.
        size_of: Returns the size of the first record in some bytes.
        may_block: Whether to read from the disk.

    Raises:
        PositionLostError: The log begins after the offset, or ends before it.
        WouldBlockError: Not ``may_block``, and the disk would have to be asked.
    """
    segment, offset = _place(segments, offset)
    rest = segment.end - offset
    size = min(max(max_bytes, ENVELOPE_SIZE), rest) if max_bytes > 0 else 0
    data = segment.read(offset, size, may_block=may_block) if size else b""
    whole = size_of(data) if data else 0
    if size < whole <= rest:
        data = segment.read(offset, whole, may_block=may_block)
    return LogBytes(segment.base, offset, data[: max(max_bytes, whole)])


def _place(segments: list[Segment], offset: int) -> tuple[Segment, int]:
    """Return the segment to continue in, and the offset."""
    at = bisect_right(segments, offset, key=_base) - 1
    if at < 0:
        raise PositionLostError(
            f"offset {offset} is not in the log any more: it begins at {segments[0].base}"
        )
    segment = segments[at]
    if offset >= segment.end and at + 1 < len(segments):
        # Also over a hole, which damage left: what lies behind it is all that there is.
        return segments[at + 1], segments[at + 1].base
    if offset > segment.end:
        raise PositionLostError(f"offset {offset} is not in the log yet: it ends at {segment.end}")
    return segment, offset


def message_size(data: bytes) -> int:
    """Return the size of the record of the message log that bytes begin with; 0 if unknown."""
    envelope = read_envelope(data)
    return envelope.size if isinstance(envelope, Envelope) else 0


def action_size(data: bytes) -> int:
    """Return the size of the record of the action log that bytes begin with; 0 if unknown."""
    if len(data) < _FACT_HEAD.size:
        return 0
    size = int(_FACT_HEAD.unpack_from(data)[0])
    return _FACT_HEAD.size + size if size <= LARGEST_FACT else 0


def part_of_checkpoint(
    files: FileSystem, number: int, offset: int, max_bytes: int
) -> tuple[int, bytes]:
    """Return the size of a checkpoint, and a part of it.

    Raises:
        PositionLostError: The checkpoint was removed; there is a newer one.
    """
    try:
        file = files.open(checkpoint_path(number), writable=False)
    except FileNotFoundError:
        raise PositionLostError(f"checkpoint {number} is gone: ask for the newest") from None
    try:
        size = file.size()
        return size, file.read(max_bytes, offset) if offset < size else b""
    finally:
        file.close()

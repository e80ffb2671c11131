"""What an engine shows to those who copy its data directory. May be used from any thread.

Followers copy the bytes of both logs as they lie in their segments, and whole checkpoints.
"""

from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

from pulque.errors import PositionLostError
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.checkpoint import Checkpoints, checkpoint_path
from pulque.storage.files import FileSystem
from pulque.storage.logs.action_log import ActionLog
from pulque.storage.logs.fact_codec import LARGEST_FACT
from pulque.storage.logs.message_log import MessageLog
from pulque.storage.logs.segment import Segment

__all__ = ["Copyable", "LogBytes"]

_base = attrgetter("base")
_FACT_HEAD = Struct("<II")


class LogBytes(NamedTuple):
    """Bytes of one segment of a log."""

    base: int
    """The segment that they are of …"""
    offset: int
    """… and where they begin. At the base, a new segment begins with them."""
    data: bytes
    """They may end in the middle of a record; none at the end of the log."""


class Copyable:
    """The part of an engine that followers read: both logs as bytes, and checkpoints."""

    actions: ActionLog
    _checkpoints: Checkpoints
    _files: FileSystem
    _log: MessageLog

    def message_bytes(self, offset: int, max_bytes: int, *, may_block: bool = True) -> LogBytes:
        """Return bytes of the message log, synced or not; see ``_bytes_from``.

        May be called from any thread.
        """
        segments = self._log.segments
        return _bytes_from(segments, offset, max_bytes, _message_size, may_block=may_block)

    def action_bytes(self, offset: int, max_bytes: int, *, may_block: bool = True) -> LogBytes:
        """Return bytes of the action log, synced or not; see ``_bytes_from``.

        May be called from any thread.
        """
        segments = self.actions.segments
        return _bytes_from(segments, offset, max_bytes, _action_size, may_block=may_block)

    @property
    def newest_checkpoint(self) -> int:
        """The number of the newest checkpoint, 0 if there is none; from any thread."""
        return self._checkpoints.newest

    def checkpoint_part(self, number: int, offset: int, max_bytes: int) -> tuple[int, bytes]:
        """Return a checkpoint's size and a part of it; may be called from any thread.

        Raises:
            PositionLostError: The checkpoint was removed.
        """
        return _part_of_checkpoint(self._files, number, offset, max_bytes)


def _bytes_from(
    segments: list[Segment],
    offset: int,
    max_bytes: int,
    size_of: Callable[[bytes], int],
    *,
    may_block: bool,
) -> LogBytes:
    """Return what was written from ``offset`` on, within one segment.

    Args:
        segments: All of the log.
        offset: Where a record begins; behind the end of a sealed segment, the next one follows.
        max_bytes: How much to return, but one whole record in any case. With 0, nothing.
        size_of: Tells the size of the record that bytes begin with.
        may_block: Whether the disk may be asked.

    Raises:
        PositionLostError: The log begins behind the offset, or ends before it.
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
    """Return the segment to go on in, and where in the log."""
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


def _message_size(data: bytes) -> int:
    """Return the size of the record of the message log that bytes begin with; 0 if unknown."""
    envelope = read_envelope(data)
    return envelope.size if isinstance(envelope, Envelope) else 0


def _action_size(data: bytes) -> int:
    """Return the size of the record of the action log that bytes begin with; 0 if unknown."""
    if len(data) < _FACT_HEAD.size:
        return 0
    size = int(_FACT_HEAD.unpack_from(data)[0])
    return _FACT_HEAD.size + size if size <= LARGEST_FACT else 0


def _part_of_checkpoint(
    files: FileSystem, number: int, offset: int, max_bytes: int
) -> tuple[int, bytes]:
    """Return the size of a checkpoint, and a part of it.

    Raises:
        PositionLostError: It is gone; there is a newer one.
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

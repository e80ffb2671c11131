"""Which segments may be deleted: by age and by size, the oldest first, never the open one."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SegmentAge", "expired_segments"]


class SegmentAge(NamedTuple):
    """The age and size of a segment."""

    size: int
    ended_at_ms: int
    """The latest time at which its last batch was stored."""


def expired_segments(
    sealed: Sequence[SegmentAge], *, now_ms: int, retention_ms: int, retention_bytes: int | None
) -> int:
    """Return how many of the sealed segments may be deleted, counted from the oldest."""
    total = sum(segment.size for segment in sealed)
    expired = 0
    for segment in sealed:
        is_old = now_ms - segment.ended_at_ms > retention_ms
        is_too_much = retention_bytes is not None and total > retention_bytes
        if not is_old and not is_too_much:
            break
        total -= segment.size
        expired += 1
    return expired

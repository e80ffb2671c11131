"""Options of the storage engine."""

from dataclasses import dataclass

from pulque.model.positions import Epoch

__all__ = ["StorageOptions"]

_ALONE = Epoch(0)


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Sizes and limits of the engine."""

    segment_bytes: int = 1024**3
    """A segment of the message log is sealed at this size …"""
    segment_batches: int = 1_000_000
    """… or at this many batches …"""
    segment_age_ms: int = 3_600_000
    """… or this long after its first batch."""
    action_segment_bytes: int = 64 * 1024**2
    """The action log rolls to a new file at this size."""
    tail_cache_bytes: int = 16 * 1024**2
    """The newest batches that are kept in memory, so that a consumer at the tail reads no file."""
    reserve_bytes: int = 64 * 1024**2
    """Sends are refused when less space than this is free, so that settling can go on."""
    ballast_bytes: int = 0
    """Space occupied in advance, for settling when other programs filled the disk."""
    keeps_for_archive: bool = False
    """Whether unarchived segments are kept, whatever their age."""
    epoch: Epoch = _ALONE
    """The epoch of new records; 0 without meta servers."""
    is_replicated: bool = False
    """Whether followers copy the logs: then only ``Engine.confirm`` confirms messages."""

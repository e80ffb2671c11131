"""What is known of a tick that is on disk."""

from dataclasses import dataclass

__all__ = ["Tick"]


@dataclass(slots=True)
class Tick:
    """One tick that has a schedule log."""

    tick: int
    size: int = 0
    """Bytes of its schedule log."""
    messages: int = 0
    """How many came into it, as far as known."""
    replayed: int = 0
    """The message log is replayed into it up to here."""
    synced: int = 0
    """Bytes of its schedule log that are on disk."""
    noted_end: int = 0
    """Bytes of its dispatch log."""
    noted_synced: int = 0
    """Bytes of its dispatch log that are on disk."""
    last_number: int = 0
    """Of the batches in its dispatch log."""
    indexed: int = 0
    """Bytes of its schedule log that its hash index is known to have."""

"""The state of a tick on disk."""

from dataclasses import dataclass

__all__ = ["Tick"]


@dataclass(slots=True)
class Tick:
    """One tick that has a schedule log."""

    tick: int
    size: int = 0
    """Bytes of its schedule log."""
    messages: int = 0
    """The number of messages it got, as far as known."""
    replayed: int = 0
    """Up to where the message log is replayed into it."""
    synced: int = 0
    """Bytes of its schedule log that are on disk."""
    noted_end: int = 0
    """Bytes of its dispatch log."""
    noted_synced: int = 0
    """Bytes of its dispatch log that are on disk."""
    last_number: int = 0
    """The last batch number in its dispatch log."""
    indexed: int = 0
    """Bytes of its schedule log that its hash index covers."""

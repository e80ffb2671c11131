"""Who leads a broker group, and which of its brokers have all that was confirmed."""

from typing import NamedTuple

from pulque.model.positions import ActionOffset, Epoch, MessageOffset

__all__ = ["EpochStart", "Leadership"]


class EpochStart(NamedTuple):
    """Where the logs of a broker group were when a leadership began."""

    epoch: Epoch
    messages: MessageOffset
    """The first byte of the message log that was written under this epoch."""
    actions: ActionOffset
    """The same of the action log."""


class Leadership(NamedTuple):
    """The leadership of one broker group: a row in the meta servers' database.

    Brokers are named by the ids of their data directories: a disk that was lost, and is made anew
    under the old name, is another broker, which has nothing.
    """

    broker_group: str
    epoch: Epoch
    """Grows by one with every election."""
    version: int
    """Grows with every change, elections included: who changes it names the one it saw."""
    leader: str
    """The data directory that leads."""
    token: str
    """Of the process that was elected: one that was started later was not."""
    in_sync: tuple[str, ...]
    """The data directories that have all that was confirmed, the leader's among them; sorted."""
    min_in_sync: int
    """Messages are taken only while so many are in sync."""

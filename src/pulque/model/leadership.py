"""The leadership of a broker group: the leader, its epoch, the in-sync brokers."""

from typing import NamedTuple

from pulque.model.positions import ActionOffset, Epoch, MessageOffset

__all__ = ["EpochStart", "Leadership"]


class EpochStart(NamedTuple):
    """The ends of a broker group's logs when a leadership began."""

    epoch: Epoch
    messages: MessageOffset
    """The first byte of the message log that was written under this epoch."""
    actions: ActionOffset
    """The same of the action log."""


class Leadership(NamedTuple):
    """The leadership of one broker group: a row in the meta servers' database.

    Brokers are identified by the ids of their data directories: a broker with the old name and a
    new, empty disk is another broker.
    """

    broker_group: str
    epoch: Epoch
    """Grows by one with every election."""
    version: int
    """Grows with every change, elections included; a change names the version that it replaces."""
    leader: str
    """The id of the leader's data directory."""
    token: str
    """The token of the elected process: a later process on the same directory is not elected."""
    in_sync: tuple[str, ...]
    """The directory ids of the in-sync brokers, the leader included; sorted."""
    min_in_sync: int
    """The leader takes messages only while so many brokers are in sync."""

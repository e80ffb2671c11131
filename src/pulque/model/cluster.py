"""What a cluster consists of: servers that registered, and where subjects were placed."""

from enum import IntEnum
from typing import NamedTuple

from pulque.model.names import PartitionName
from pulque.model.routes import Role, Slots

__all__ = ["GroupMarks", "Placement", "Server", "ServerState", "Serving"]


class ServerState(IntEnum):
    """What a server says about itself."""

    READY = 0
    """It takes and serves messages."""
    FULL = 1
    """It has no room for new messages; consumption goes on."""
    LEAVING = 2
    """It stops now, on purpose."""
    FOLLOWING = 3
    """It copies the logs of its broker group's leader, and serves nobody."""


class Placement(NamedTuple):
    """One partition of a subject: who holds it, and which order keys belong there."""

    partition: PartitionName
    broker_group: str
    slots: Slots
    is_closed: bool = False
    """It was split or merged: it takes no more messages, and others have its order keys."""
    parents: tuple[int, ...] = ()
    """Whose order keys it took over, as their places in the list of the subject's partitions."""


class Server(NamedTuple):
    """A broker or a delay server, as it registered."""

    name: str
    broker_group: str
    """Whose partitions it holds; of a delay server, its own name."""
    role: Role
    host: str
    port: int
    directory: str
    """The id of its data directory."""
    incarnation: int
    """Grows with every start on the same directory."""
    state: ServerState
    is_removed: bool = False
    """By command; it may register anew."""

    @property
    def address(self) -> str:
        """Where clients reach it, as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class GroupMarks(NamedTuple):
    """What was commanded about a broker group."""

    is_read_only: bool = False
    is_draining: bool = False

    @property
    def takes_sends(self) -> bool:
        """Whether nothing speaks against sends."""
        return not (self.is_read_only or self.is_draining)


class Serving(NamedTuple):
    """A broker group, or a delay server, that clients can go to now."""

    broker_group: str
    host: str
    port: int
    is_writable: bool

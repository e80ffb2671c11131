"""The members of a cluster, and the placement of subjects."""

from enum import IntEnum
from typing import NamedTuple

from pulque.model.names import PartitionName
from pulque.model.routes import Role, Slots

__all__ = ["GroupMarks", "Placement", "Server", "ServerState", "Serving"]


class ServerState(IntEnum):
    """The state that a server reports."""

    READY = 0
    """It takes and serves messages."""
    FULL = 1
    """It has no room for new messages; consumption goes on."""
    LEAVING = 2
    """It stops now, on purpose."""
    FOLLOWING = 3
    """It copies the logs of its broker group's leader, and does not serve."""


class Placement(NamedTuple):
    """One partition of a subject: its broker group and its range of slots."""

    partition: PartitionName
    broker_group: str
    slots: Slots
    is_closed: bool = False
    """It was split or merged: it takes no more messages, and others have its order keys."""
    parents: tuple[int, ...] = ()
    """The partitions whose order keys it took over, as indexes in the subject's list."""


class Server(NamedTuple):
    """A broker or a delay server, as it registered."""

    name: str
    broker_group: str
    """Its broker group; of a delay server, its own name."""
    role: Role
    host: str
    port: int
    directory: str
    """The id of its data directory."""
    incarnation: int
    """Grows with every start on the same directory."""
    state: ServerState
    is_removed: bool = False
    """Removed by command; it may register again."""

    @property
    def address(self) -> str:
        """Its address as ``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class GroupMarks(NamedTuple):
    """Marks of a broker group, set by command."""

    is_read_only: bool = False
    is_draining: bool = False

    @property
    def takes_sends(self) -> bool:
        """Whether the marks allow sends."""
        return not (self.is_read_only or self.is_draining)


class Serving(NamedTuple):
    """A broker group, or a delay server, that clients can reach now."""

    broker_group: str
    host: str
    port: int
    is_writable: bool

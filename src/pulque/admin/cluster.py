"""What the administration API needs to know of a cluster: the port that a meta server implements.

The API asks the brokers themselves about groups, lag and dead letters. Which brokers there are,
where subjects are placed and what was set for them comes from here.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import Role, Slots

__all__ = [
    "Cluster",
    "ClusterPolicies",
    "Creation",
    "KnownServer",
    "PlacedPartition",
    "PlacedSubject",
    "Standing",
    "StateName",
    "WatchingClient",
]

StateName = Literal["ready", "full", "leaving", "silent", "following"]
Standing = Literal["leader", "follower", "alone"]
Creation = Literal["first-send", "beforehand"]


class KnownServer(NamedTuple):
    """A broker or a delay server that registered itself."""

    name: str
    broker_group: str
    role: Role
    host: str
    port: int
    state: StateName
    silent_ms: int | None
    """For how long nothing was heard of it; None if it is gone."""
    is_read_only: bool
    """Its broker group takes no sends, by command."""
    is_draining: bool
    """Its broker group takes no sends, and is to be removed when everything is consumed."""
    incarnation: int
    partitions: int
    """How many were placed on its broker group."""
    standing: Standing = "alone"
    """Whether it leads its broker group, follows, or has no others beside it."""
    epoch: int = 0
    """Of its group's leadership; 0 if there is none."""
    is_in_sync: bool | None = None
    """Whether it has all that was confirmed; None if its group has no leadership."""
    min_in_sync: int = 0
    """Its group takes messages only while so many are in sync."""
    directory: str = ""
    """The id of its data directory: by it, brokers of a group know each other."""

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self.state in {"ready", "full", "following"}


class PlacedPartition(NamedTuple):
    """A partition of a subject, and who holds it."""

    partition: PartitionName
    broker_group: str
    slots: Slots
    is_closed: bool = False
    """It was split or merged: it takes no more messages."""
    parents: tuple[int, ...] = ()
    """Whose order keys it took over, as their places in the list of the subject's partitions."""


class PlacedSubject(NamedTuple):
    """A subject, and where it lies."""

    subject: Subject
    is_read_only: bool
    partitions: tuple[PlacedPartition, ...]
    """Also those that were split or merged."""
    order: OrderStrategy = OrderStrategy.BEST_EFFORT

    @property
    def taking(self) -> int:
        """How many partitions take messages."""
        return sum(not each.is_closed for each in self.partitions)


class WatchingClient(NamedTuple):
    """A client that watches routes at this meta server now."""

    client: str
    """Its id: the same as long as its process lives."""
    application: str
    address: str
    online_since_ms: int
    silent_ms: int
    routes: int
    """How many it follows."""


class ClusterPolicies(NamedTuple):
    """What holds for the whole cluster, and may be changed while it runs."""

    create: Creation = "first-send"
    """When a subject is created."""
    allowed: tuple[Pattern, ...] = ()
    """Only these subjects may be created; all, if there are none."""
    spread: int = 2
    """On how many broker groups a new subject is placed; all, if there are fewer."""


class Cluster(Protocol):
    """What is known of a cluster, and what can be decided about it."""

    @property
    def id(self) -> str:
        """The id of the cluster."""

    async def check_ready(self) -> None:
        """Check that changes can be stored, and read those of other meta servers.

        Raises:
            UnavailableError: The database does not answer.
        """

    async def servers(self) -> Sequence[KnownServer]:
        """Return all that ever registered and were not removed."""

    async def mark_server(
        self, name: str, *, is_read_only: bool | None = None, is_draining: bool | None = None
    ) -> KnownServer:
        """Set whether a server's broker group takes sends; what is None stays as it is.

        Raises:
            UnknownServerError: There is none of that name.
        """

    async def remove_server(self, name: str) -> None:
        """Remove a server.

        Raises:
            UnknownServerError: There is none of that name.
            NotAllowedError: It is alive.
        """

    async def subjects(self, after: str = "", limit: int = 100) -> Sequence[PlacedSubject]:
        """Return subjects in the order of their names, beginning after one."""

    async def subject(self, name: Subject) -> PlacedSubject | None:
        """Return one subject."""

    async def create_subject(
        self, name: Subject, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        """Place a subject ahead of its first send; one that exists is returned as it is.

        Args:
            name: Which one.
            broker_groups: Where each of its partitions goes; else as at a first send.

        Raises:
            InvalidRequestError: There is no such broker group.
            UnavailableError: There is no broker to place it on.
            NotAllowedError: It is none of those that are allowed, or there are too many.
        """

    async def extend_subject(
        self, name: Subject, partitions: int, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        """Split partitions, so that more take messages; never fewer.

        Args:
            name: Which subject.
            partitions: How many are to take messages.
            broker_groups: Where those go that are added; to where the subject is, if left out.

        Raises:
            UnknownSubjectError: There is no such subject.
            NotAllowedError: It has more than so many.
            InvalidRequestError: It cannot have so many, or not there.
        """

    async def merge_subject(self, name: Subject, partitions: int) -> PlacedSubject:
        """Merge partitions, so that fewer take messages; never more.

        Raises:
            UnknownSubjectError: There is no such subject.
            NotAllowedError: It has fewer than so many.
            InvalidRequestError: It cannot have so many.
        """

    async def order_subject(self, name: Subject, order: OrderStrategy) -> PlacedSubject:
        """Set what a failure may do to the order of a subject's messages.

        Raises:
            UnknownSubjectError: There is no such subject.
        """

    async def mark_subject(self, name: Pattern, *, is_read_only: bool) -> None:
        """Refuse sends to a subject, or to all of a pattern, or accept them again."""

    async def read_only_marks(self) -> Sequence[Pattern]:
        """Return the subjects and patterns that take no sends, by name."""

    async def clients(self, after: str = "", limit: int = 100) -> Sequence[WatchingClient]:
        """Return clients that are online, in the order of their ids, beginning after one."""

    async def policies(self) -> ClusterPolicies:
        """Return what holds for the whole cluster."""

    async def set_policies(self, policies: ClusterPolicies) -> ClusterPolicies:
        """Set what holds for the whole cluster from now on."""

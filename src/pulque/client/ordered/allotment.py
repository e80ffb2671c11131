"""Which partitions are an ordered consumer's, as its meta server says; without I/O.

The consumer asks again and again: that is its heartbeat, and each answer says how long it may go
on. A shell brings the connection::

    answer = connection.request(attendance.next_request(), attendance.patience)
    if attendance.attended(answer):
        ...  # follow attendance.partitions
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pulque.client.ordered.partition_core import Permit
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.targets import HOME
from pulque.errors import RemoteProtocolError, UsageError
from pulque.model.names import Group, PartitionName, Subject, retry_partition
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.wire.ordered import Attend, Attended
from pulque.wire.responses import Response

__all__ = [
    "HAND_OVER",
    "ROUTE_LIMIT",
    "TURN",
    "AllottedPartitions",
    "Leaf",
    "difference",
    "leaf_of",
    "leaves_of",
]

HAND_OVER = 10.0
"""How long what runs may take to end when its partition goes to another consumer, in seconds."""
TURN = 100
"""So many messages in a row come from one partition, where others have some, too."""
ROUTE_LIMIT = 1.0
"""How long the route may be asked for, in seconds: the consumer must not be silent for long."""
_ANSWER_LIMIT = 5.0
"""How much longer than it was asked to wait a server may take, in seconds."""


class Leaf(NamedTuple):
    """One pull client: the part of a consumer that deals with one partition."""

    place: str
    """A broker group, or ``HOME``."""
    partition: PartitionName


def leaf_of(allotted: Allotted) -> Leaf:
    """Return which pull client a partition needs."""
    return Leaf(allotted.broker_group if allotted.host else HOME, allotted.partition)


def leaves_of(
    partitions: Iterable[Allotted], subject: str, group: Group, order: OrderStrategy
) -> dict[Leaf, Allotted]:
    """Return all pull clients that a consumer needs.

    Where failed messages come again later, each broker that it has a partition of has another one
    for them.
    """
    found = {leaf_of(each): each for each in partitions}
    if order is OrderStrategy.BEST_EFFORT:
        name = retry_partition(Subject(subject), group)
        for each in list(found.values()):
            retry = each._replace(partition=name)
            found.setdefault(leaf_of(retry), retry)
    return found


def difference(
    current: Iterable[Leaf], wanted: Iterable[Leaf], leaving: Iterable[Leaf] = ()
) -> tuple[list[Leaf], list[Leaf]]:
    """Return which pull clients to start, and which to stop; the rest stays as it is.

    Args:
        current: Those that are there.
        wanted: Those that there should be.
        leaving: Those that are being stopped: they can start again only after that.
    """
    have, want, ending = set(current), list(dict.fromkeys(wanted)), set(leaving)
    started = [leaf for leaf in want if leaf not in have and leaf not in ending]
    return started, sorted(have.difference(want))


class AllottedPartitions:
    """What one ordered consumer was told last.

    Args:
        options: Who it is.
        permit: Is made to last longer with each answer.
        monotonic: The clock, in seconds.
    """

    def __init__(
        self, options: PullOptions, permit: Permit, monotonic: Callable[[], float]
    ) -> None:
        self.partitions: tuple[Allotted, ...] = ()
        self.order = OrderStrategy.BEST_EFFORT
        self.is_known = False
        """Whether there was an answer yet."""
        self._options = options
        self._permit = permit
        self._monotonic = monotonic
        self._version = 0
        self._wait = 0.0
        self._sent_at = 0.0

    def leaves(self) -> dict[Leaf, Allotted]:
        """Return the pull clients that there should be."""
        who = self._options
        return leaves_of(self.partitions, who.subject, who.group, self.order)

    @property
    def patience(self) -> float:
        """How long to wait for the answer to the next request, in seconds."""
        return self._wait + _ANSWER_LIMIT

    def next_request(self) -> Attend:
        """Return what to ask now."""
        self._sent_at = self._monotonic()
        return self._request(is_online=True)

    def farewell(self) -> Attend:
        """Return what says that the consumer stops: its partitions go to others at once."""
        self._wait = 0.0
        return self._request(is_online=False)

    def attended(self, answer: Response) -> bool:
        """Take in the answer; say whether there is anything new.

        Raises:
            UsageError: The group is not an ordered one.
            RemoteProtocolError: It is no answer to that.
        """
        if not isinstance(answer, Attended):
            raise RemoteProtocolError(f"an attend got {answer!r}")
        who = self._options
        if answer.strategy is not ConsumeStrategy.EXCLUSIVE:
            raise UsageError(
                f"group {who.group} shares the messages of {who.subject}, so they cannot come in "
                "order; give the ordered consumers a group of their own, or stop all consumers of "
                f"this one and change it: pulque group change {who.subject} {who.group} "
                "--mode ordered"
            )
        self._permit.until = max(self._permit.until, self._sent_at + answer.authorised_ms / 1000)
        self._wait = answer.heartbeat_ms / 1000
        is_new = not self.is_known or answer.version != self._version
        self.is_known = True
        self._version = answer.version
        self.order = answer.order
        self.partitions = answer.partitions
        return is_new

    def _request(self, *, is_online: bool) -> Attend:
        who = self._options
        return Attend(
            who.consumer,
            who.incarnation,
            who.subject,
            who.group,
            is_online,
            self._version,
            int(self._wait * 1000),
        )

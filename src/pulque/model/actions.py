"""The facts of the action log: what consumers did, in order.

A fact is in the log before the rules see it, so that recovery is a replay of the log through
the code that runs live. Facts that come often name their subscription by a number; the fact
``SubscriptionOpened`` gives the number its meaning, and every segment of the log begins with
those that are open.
"""

from dataclasses import dataclass
from typing import NewType

from pulque.model.groups import GroupSettings
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.model.positions import ConsumeSequence, PartitionId, PullSequence, Tenure

__all__ = [
    "ALL_OF_THEM",
    "EXPIRED",
    "GROUP_DECIDES",
    "NO_RETRY",
    "Action",
    "ConsumerLost",
    "DeadPurged",
    "GroupConfigured",
    "GroupOpened",
    "GroupReset",
    "LockGranted",
    "LockReleased",
    "NackedDelivery",
    "PartitionClosed",
    "PassedOver",
    "Pulled",
    "Settled",
    "Skipped",
    "SubscriptionId",
    "SubscriptionOpened",
]

ALL_OF_THEM = 2**32 - 1
"""As a count of messages that are wanted: whatever there is."""
SubscriptionId = NewType("SubscriptionId", int)
"""The number of one consumer of one group in one partition, in one broker's logs."""


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """A group pulled from a partition for the first time, and starts at a sequence."""

    partition: PartitionId
    group: Group
    next_sequence: ConsumeSequence


@dataclass(frozen=True, slots=True)
class SubscriptionOpened:
    """A consumer of a group came to a partition, or came back as another incarnation.

    It goes on with what it held: a restarted consumer gets its unsettled deliveries again.
    """

    subscription: SubscriptionId
    partition: PartitionId
    group: Group
    consumer: ConsumerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The consumer was handed ``count`` new messages.

    They are ``first_sequence..`` of the partition, and its deliveries ``first_pull..``.
    """

    subscription: SubscriptionId
    tenure: Tenure
    first_pull: PullSequence
    first_sequence: ConsumeSequence
    count: int
    at_ms: int
    matched: int = ALL_OF_THEM
    """How many of them the group's filter may want."""

    @property
    def wanted(self) -> int:
        """How many of them count as held."""
        return self.count if self.matched == ALL_OF_THEM else self.matched


GROUP_DECIDES = -1
"""As the delay of a nack: what the group's settings say."""
NO_RETRY = -2
"""As the delay of a nack: there is no other attempt, the message is a dead letter at once."""


@dataclass(frozen=True, slots=True)
class NackedDelivery:
    """One delivery that the consumer could not process."""

    sequence: PullSequence
    delay_ms: int
    """How long to wait before the next attempt, or one of those below 0."""
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The consumer is done with deliveries ``first..last``, except for the nacked ones."""

    subscription: SubscriptionId
    first: PullSequence
    last: PullSequence
    nacked: tuple[NackedDelivery, ...]
    at_ms: int


@dataclass(frozen=True, slots=True)
class ConsumerLost:
    """The consumer was silent for its lease, or left: what it held goes to others."""

    subscription: SubscriptionId
    reason: str
    at_ms: int
    is_leaving: bool = False
    """It handed back what it held: that is no failed attempt, and nobody has to wait."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """There is nothing in a partition that a group wants, up to a sequence."""

    partition: PartitionId
    group: Group
    next_sequence: ConsumeSequence


@dataclass(frozen=True, slots=True)
class GroupConfigured:
    """A group told how it wants a subject, or all subjects of a pattern; the last word counts."""

    group: Group
    subject: Pattern
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class DeadPurged:
    """Somebody gave up dead letters ``first..last`` of a partition, those of before included."""

    partition: PartitionId
    first: ConsumeSequence
    last: ConsumeSequence
    at_ms: int


@dataclass(frozen=True, slots=True)
class GroupReset:
    """Somebody set a group to another sequence of a partition: it goes on from there.

    What its consumers held of the partition is not theirs any more, and is not retried.
    """

    partition: PartitionId
    group: Group
    next_sequence: ConsumeSequence
    at_ms: int


@dataclass(frozen=True, slots=True)
class LockGranted:
    """A partition belongs to one consumer of an ordered group, and to nobody else of it.

    What the one before it did not settle comes to this one, in order.
    """

    partition: PartitionId
    group: Group
    consumer: ConsumerId
    incarnation: int
    token: int
    """Higher than any before: only pulls and settles with it count."""
    is_strict: bool
    """Nothing that failed is retried later."""
    at_ms: int


@dataclass(frozen=True, slots=True)
class LockReleased:
    """A consumer of an ordered group gave a partition up."""

    partition: PartitionId
    group: Group
    token: int
    at_ms: int
    is_end: bool = False
    """The group is no ordered one any more."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Somebody gave up the message that an ordered group waited for: it is a dead letter.

    Whoever had the lock has it no more, as it holds a message that is not the group's any more.
    """

    partition: PartitionId
    group: Group
    sequence: ConsumeSequence
    at_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionClosed:
    """A partition takes no sends any more: it was split or merged."""

    partition: PartitionId
    at_ms: int


Action = (
    GroupOpened
    | SubscriptionOpened
    | Pulled
    | Settled
    | ConsumerLost
    | GroupConfigured
    | PassedOver
    | DeadPurged
    | GroupReset
    | LockGranted
    | LockReleased
    | Skipped
    | PartitionClosed
)
EXPIRED = "expired"
"""The reason, with ``NO_RETRY``, of what expired before it was handed out."""

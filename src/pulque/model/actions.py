"""The facts of the action log: what consumers did, in order.

A fact is in the log before the rules see it, so recovery is a replay of the log through
the live code. Frequent facts name their subscription by a number; the fact
``SubscriptionOpened`` defines the number, and every segment of the log begins with these facts
for all open subscriptions.
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
"""As a count of wanted messages: all of them."""
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

    A restarted consumer gets its unsettled deliveries again.
    """

    subscription: SubscriptionId
    partition: PartitionId
    group: Group
    consumer: ConsumerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """``count`` new messages were delivered to the consumer.

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
"""As the delay of a nack: the back-off of the group's settings."""
NO_RETRY = -2
"""As the delay of a nack: no other attempt, a dead letter at once."""


@dataclass(frozen=True, slots=True)
class NackedDelivery:
    """One nacked delivery."""

    sequence: PullSequence
    delay_ms: int
    """The back-off before the next attempt, or ``GROUP_DECIDES`` or ``NO_RETRY``."""
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The consumer settled deliveries ``first..last``: acked, except for the nacked ones."""

    subscription: SubscriptionId
    first: PullSequence
    last: PullSequence
    nacked: tuple[NackedDelivery, ...]
    at_ms: int


@dataclass(frozen=True, slots=True)
class ConsumerLost:
    """The consumer was silent for its lease, or left: its deliveries go to others."""

    subscription: SubscriptionId
    reason: str
    at_ms: int
    is_leaving: bool = False
    """It handed its deliveries back: no failed attempt, and no back-off."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A group's filter wants no message of a partition up to a sequence."""

    partition: PartitionId
    group: Group
    next_sequence: ConsumeSequence


@dataclass(frozen=True, slots=True)
class GroupConfigured:
    """The settings of a group for a subject or a pattern; the last fact counts."""

    group: Group
    subject: Pattern
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class DeadPurged:
    """Dead letters ``first..last`` of a partition were purged; earlier purges may be included."""

    partition: PartitionId
    first: ConsumeSequence
    last: ConsumeSequence
    at_ms: int


@dataclass(frozen=True, slots=True)
class GroupReset:
    """A group was reset to another sequence of a partition.

    Its consumers lose their deliveries of the partition, which are not retried.
    """

    partition: PartitionId
    group: Group
    next_sequence: ConsumeSequence
    at_ms: int


@dataclass(frozen=True, slots=True)
class LockGranted:
    """A partition belongs to one consumer of an ordered group from now on.

    It gets the unsettled messages of the consumer before it, in order.
    """

    partition: PartitionId
    group: Group
    consumer: ConsumerId
    incarnation: int
    token: int
    """Higher than any before; only pulls and settles with it count."""
    is_strict: bool
    """Failed messages are retried in place, not later."""
    at_ms: int


@dataclass(frozen=True, slots=True)
class LockReleased:
    """A consumer of an ordered group released a partition."""

    partition: PartitionId
    group: Group
    token: int
    at_ms: int
    is_end: bool = False
    """The group is no longer ordered."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The message that blocked an ordered group was skipped by command: it is a dead letter.

    The holder of the lock loses it, as it holds a message that no longer belongs to the group.
    """

    partition: PartitionId
    group: Group
    sequence: ConsumeSequence
    at_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionClosed:
    """A partition takes no more sends: it was split or merged."""

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
"""The reason, with ``NO_RETRY``, of a message that expired before delivery."""

"""Consumption as a state machine: facts in, effects out.

A fact is in the action log before ``Consumption.handle`` sees it, so that live running and
recovery are the same code on the same input. Each group has one next sequence per partition and
no ack position of its own; each consumer has its subscription.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from pulque.errors import FencedError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    GroupOpened,
    Pulled,
    Settled,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.subscription import Subscription

__all__ = ["Consumption", "Effect", "GroupKey", "GroupState", "Redeliver", "Redelivery"]

GroupKey = tuple[PartitionId, Group]
"""One group in one partition."""


@dataclass(frozen=True, slots=True)
class Redelivery:
    """One message that must come to its group again."""

    sequence: ConsumeSequence
    delay_ms: int
    """How long to wait before; -1 leaves it to the group's policy."""
    reason: str


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Append these messages to the group's retry partition, each once."""

    partition: PartitionId
    group: Group
    redeliveries: tuple[Redelivery, ...]


Effect = Redeliver


class GroupState:
    """One group in one partition: the next message that nobody was handed, and what waits."""

    __slots__ = ("next_sequence", "pending")

    def __init__(self, next_sequence: ConsumeSequence) -> None:
        self.next_sequence = next_sequence
        self.pending: dict[ConsumeSequence, Redelivery] = {}
        """Messages to be redelivered that are not yet in the retry partition."""


class Consumption:
    """Who was handed what, for all groups of one broker."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey, GroupState] = {}
        self.subscriptions: dict[SubscriptionId, Subscription] = {}
        self.changed_groups: set[GroupKey] = set()
        self.changed_subscriptions: set[SubscriptionId] = set()
        """What differs from the last checkpoint."""
        self._by_consumer: dict[tuple[PartitionId, Group, ConsumerId], Subscription] = {}
        self._of_consumer: dict[tuple[Group, ConsumerId], list[Subscription]] = {}
        self._redelivered: set[tuple[PartitionId, Group, ConsumeSequence]] = set()
        self._next_id = 1

    # -- questions ---------------------------------------------------------------------------

    def subscription(
        self, partition: PartitionId, group: Group, consumer: ConsumerId
    ) -> Subscription | None:
        """Return what a consumer holds of a partition."""
        return self._by_consumer.get((partition, group, consumer))

    def subscriptions_of(self, group: Group, consumer: ConsumerId) -> list[Subscription]:
        """Return what a consumer holds, over all partitions."""
        return self._of_consumer.get((group, consumer), [])

    def opened(
        self, partition: PartitionId, group: Group, consumer: ConsumerId, incarnation: int
    ) -> SubscriptionOpened | None:
        """Return the fact to be recorded before this consumer may act, if any.

        Raises:
            FencedError: A newer incarnation of the consumer was here.
        """
        found = self._by_consumer.get((partition, group, consumer))
        if found is None:
            number = SubscriptionId(self._next_id)
            return SubscriptionOpened(number, partition, group, consumer, incarnation)
        check_incarnation(found, incarnation)
        if found.incarnation == incarnation:
            return None
        return SubscriptionOpened(found.id, partition, group, consumer, incarnation)

    def open_facts(self) -> Iterator[Action]:
        """Yield the facts that a new segment of the action log begins with."""
        for each in self.subscriptions.values():
            yield SubscriptionOpened(
                each.id, each.partition, each.group, each.consumer, each.incarnation
            )

    # -- facts -------------------------------------------------------------------------------

    def handle(self, action: Action) -> list[Effect]:
        """Take in one fact; return the effects it calls for, in order."""
        match action:
            case Pulled():
                return self._pulled(action)
            case Settled():
                return self._settled(action)
            case ConsumerLost():
                return self._lost(action)
            case SubscriptionOpened():
                return self._subscription_opened(action)
            case GroupOpened():
                key = (action.partition, action.group)
                self.groups.setdefault(key, GroupState(action.next_sequence))
                self.changed_groups.add(key)
                return []
            case _:
                assert_never(action)

    def redelivered(
        self, partition: PartitionId, group: Group, sequences: Iterable[ConsumeSequence]
    ) -> None:
        """Take note that messages are in the retry partition."""
        state = self.groups.get((partition, group))
        if state is not None:
            for sequence in sequences:
                state.pending.pop(sequence, None)
            self.changed_groups.add((partition, group))

    def remember_redelivered(
        self, partition: PartitionId, group: Group, sequences: Iterable[ConsumeSequence]
    ) -> None:
        """Take note, before a replay, of messages that the log shows in the retry partition."""
        self._redelivered.update((partition, group, s) for s in sequences)
        self.redelivered(partition, group, self.pending_of(partition, group) & set(sequences))

    def pending_of(self, partition: PartitionId, group: Group) -> set[ConsumeSequence]:
        """Return the messages that must yet be put into the retry partition."""
        state = self.groups.get((partition, group))
        return set() if state is None else set(state.pending)

    def pending(self) -> list[Redeliver]:
        """Return all redeliveries that were called for and not performed, after a replay."""
        return [
            Redeliver(partition, group, tuple(state.pending.values()))
            for (partition, group), state in self.groups.items()
            if state.pending
        ]

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> None:
        """Set every position beyond a partition's recovered end back to that end."""
        for key, state in self.groups.items():
            end = ends.get(key[0], ConsumeSequence(0))
            if state.next_sequence > end:
                state.next_sequence = end
                self.changed_groups.add(key)
        for subscription in self.subscriptions.values():
            end = ends.get(subscription.partition, ConsumeSequence(0))
            if any(h.first_sequence + h.length > end for h in subscription.held):
                subscription.clip(end)
                self.changed_subscriptions.add(subscription.id)

    def put(self, subscription: Subscription) -> None:
        """Add a subscription, as from a checkpoint."""
        self.subscriptions[subscription.id] = subscription
        key = (subscription.partition, subscription.group, subscription.consumer)
        self._by_consumer[key] = subscription
        self._of_consumer.setdefault(key[1:], []).append(subscription)
        self._next_id = max(self._next_id, subscription.id + 1)

    # -- one method per fact -----------------------------------------------------------------

    def _subscription_opened(self, action: SubscriptionOpened) -> list[Effect]:
        found = self.subscriptions.get(action.subscription)
        if found is None:
            self.put(
                Subscription(
                    action.subscription,
                    action.partition,
                    action.group,
                    action.consumer,
                    action.incarnation,
                )
            )
        else:
            found.incarnation = action.incarnation
        self.changed_subscriptions.add(action.subscription)
        return []

    def _pulled(self, action: Pulled) -> list[Effect]:
        subscription = self.subscriptions[action.subscription]
        if action.first_pull < subscription.next_pull:
            # A recovery in between set the consumer back; the log has that only in this fact.
            subscription.rewind(action.first_pull)
        subscription.pulled(action.tenure, action.first_sequence, action.count)
        key = (subscription.partition, subscription.group)
        state = self.groups.setdefault(key, GroupState(action.first_sequence))
        state.next_sequence = max(
            state.next_sequence, ConsumeSequence(action.first_sequence + action.count)
        )
        self.changed_groups.add(key)
        self.changed_subscriptions.add(subscription.id)
        return []

    def _settled(self, action: Settled) -> list[Effect]:
        subscription = self.subscriptions[action.subscription]
        if action.last < subscription.settled:
            return []
        redeliveries = [
            Redelivery(sequence, nacked.delay_ms, nacked.reason)
            for sequence, nacked in subscription.sequences_of(action.nacked)
        ]
        subscription.settle(action.last)
        self.changed_subscriptions.add(subscription.id)
        return self._redeliver(subscription, redeliveries)

    def _lost(self, action: ConsumerLost) -> list[Effect]:
        subscription = self.subscriptions[action.subscription]
        redeliveries = [
            Redelivery(ConsumeSequence(held.first_sequence + i), -1, action.reason)
            for held in subscription.held
            for i in range(held.length)
        ]
        subscription.lost_start, subscription.lost_end = (
            subscription.settled,
            subscription.next_pull,
        )
        subscription.held.clear()
        subscription.settled = subscription.next_pull
        self.changed_subscriptions.add(subscription.id)
        return self._redeliver(subscription, redeliveries)

    def _redeliver(
        self, subscription: Subscription, redeliveries: list[Redelivery]
    ) -> list[Effect]:
        partition, group = subscription.partition, subscription.group
        wanted = tuple(
            r for r in redeliveries if (partition, group, r.sequence) not in self._redelivered
        )
        if not wanted:
            return []
        state = self.groups[partition, group]
        state.pending.update((r.sequence, r) for r in wanted)
        self.changed_groups.add((partition, group))
        return [Redeliver(partition, group, wanted)]


def check_incarnation(subscription: Subscription, incarnation: int) -> None:
    """Refuse a consumer whose successor was here.

    Raises:
        FencedError: A newer incarnation was here.
    """
    if incarnation < subscription.incarnation:
        raise FencedError(
            f"consumer {subscription.consumer} was started again (incarnation "
            f"{subscription.incarnation}); this is incarnation {incarnation} and must stop"
        )

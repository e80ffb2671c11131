"""Consumption as a state machine: facts in, effects out.

A fact is in the action log before ``Consumption.handle`` sees it, so live operation and
recovery run the same code on the same input. Each group has one next sequence per partition and
no ack position of its own; each consumer has its subscription.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from pulque.errors import FencedError
from pulque.model.actions import (
    NO_RETRY,
    Action,
    ConsumerLost,
    DeadPurged,
    GroupConfigured,
    GroupOpened,
    GroupReset,
    LockGranted,
    LockReleased,
    PartitionClosed,
    PassedOver,
    Pulled,
    Settled,
    Skipped,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group, is_broadcast
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.groups import GroupsSettings
from pulque.rules.locks import Locks
from pulque.rules.redelivery import Redeliver, Redelivery, RedeliveryState
from pulque.rules.subscription import Subscription

__all__ = ["Consumption", "Effect", "GroupKey", "Redeliver", "Redelivery", "RedeliveryState"]

GroupKey = tuple[PartitionId, Group]
"""One group in one partition."""
Effect = Redeliver


class Consumption:
    """The deliveries of all groups of one broker."""

    def __init__(self) -> None:
        self.settings = GroupsSettings()
        """The settings of groups: mode, filter, start, retries."""
        self.locks = Locks()
        """The pull locks of ordered groups."""
        self.groups: dict[GroupKey, RedeliveryState] = {}
        self.subscriptions: dict[SubscriptionId, Subscription] = {}
        self.changed_groups: set[GroupKey] = set()
        self.changed_subscriptions: set[SubscriptionId] = set()
        """Subscriptions that differ from the last checkpoint."""
        self._by_consumer: dict[tuple[PartitionId, Group, ConsumerId], Subscription] = {}
        self._of_consumer: dict[tuple[Group, ConsumerId], list[Subscription]] = {}
        self._of_group: dict[GroupKey, dict[SubscriptionId, Subscription]] = {}
        self._redelivered: dict[tuple[PartitionId, Group, ConsumeSequence], int] = {}
        """Redeliveries in the log whose facts are not replayed yet, with their number."""
        self._next_id = 1

    # -- questions ---------------------------------------------------------------------------

    def subscription(
        self, partition: PartitionId, group: Group, consumer: ConsumerId
    ) -> Subscription | None:
        """Return a consumer's subscription to a partition."""
        return self._by_consumer.get((partition, group, consumer))

    def subscriptions_of(self, group: Group, consumer: ConsumerId) -> list[Subscription]:
        """Return all subscriptions of a consumer."""
        return self._of_consumer.get((group, consumer), [])

    def consumers_of(self, partition: PartitionId, group: Group) -> list[Subscription]:
        """Return the subscriptions of a group to a partition."""
        return list(self._of_group.get((partition, group), {}).values())

    @property
    def next_id(self) -> SubscriptionId:
        """The id of the next new subscription."""
        return SubscriptionId(self._next_id)

    def opened(
        self,
        partition: PartitionId,
        group: Group,
        consumer: ConsumerId,
        incarnation: int,
        *,
        ahead: int = 0,
    ) -> SubscriptionOpened | None:
        """Return the fact to be recorded before this consumer may act, if any.

        Args:
            partition: The partition that it pulls from.
            group: Its group.
            consumer: Its id.
            incarnation: Its run.
            ahead: How many new subscriptions the caller will record before this one.

        Raises:
            FencedError: A newer incarnation of the consumer is known.
        """
        found = self._by_consumer.get((partition, group, consumer))
        if found is None:
            number = SubscriptionId(self._next_id + ahead)
            return SubscriptionOpened(number, partition, group, consumer, incarnation)
        check_incarnation(found, incarnation)
        if found.incarnation == incarnation:
            return None
        return SubscriptionOpened(found.id, partition, group, consumer, incarnation)

    def open_facts(self) -> Iterator[Action]:
        """Return the facts that a new segment of the action log begins with."""
        return map(self.open_fact, self.subscriptions.values())

    @staticmethod
    def open_fact(each: Subscription) -> Action:
        """Return the fact that describes a subscription as it is."""
        return SubscriptionOpened(
            each.id, each.partition, each.group, each.consumer, each.incarnation
        )

    # -- facts -------------------------------------------------------------------------------

    def handle(self, action: Action) -> list[Effect]:  # noqa: C901, PLR0911  # one case per fact
        """Apply one fact; return its effects, in order."""
        match action:
            case Pulled():
                return self._pulled(action)
            case Settled():
                return self._settled(action)
            case ConsumerLost():
                return self._lost(action)
            case SubscriptionOpened():
                return self._subscription_opened(action)
            case GroupOpened() | PassedOver() | GroupConfigured():
                self._group_told(action)
                return []
            case GroupReset():
                return self._reset(action)
            case LockGranted() | LockReleased():
                self._lock_changed(action)
                return []
            case Skipped():
                return self._skipped(action)
            case PartitionClosed():
                self.locks.close(action.partition)
                return []
            case DeadPurged():
                return []  # no group's business: DeadLetters takes it
            case _:
                assert_never(action)

    def redelivered(
        self, partition: PartitionId, group: Group, sequences: Iterable[ConsumeSequence]
    ) -> None:
        """Record that the retries or dead letters of messages are in the log."""
        state = self.groups.get((partition, group))
        if state is not None:
            for sequence in sequences:
                state.pending.pop(sequence, None)
            self.changed_groups.add((partition, group))

    def narrowed(
        self,
        partition: PartitionId,
        group: Group,
        redelivery: Redelivery,
        examined: ConsumeSequence,
        wanted: Iterable[ConsumeSequence],
    ) -> list[Redelivery]:
        """Record which messages of a range the group's filter wants, up to where it was examined.

        No fact records this: a replay examines the range again.

        Returns:
            One redelivery for each, and then one for the rest of the range, if there is one.
        """
        singles = [replace(redelivery, sequence=each, length=1, matched=1) for each in wanted]
        rest = [redelivery.part(examined, redelivery.end)] if examined < redelivery.end else []
        state = self.groups.get((partition, group))
        if state is not None and redelivery in state.ranges:
            state.ranges.remove(redelivery)
            state.add([*singles, *rest])
            self.changed_groups.add((partition, group))
        return [*singles, *rest]

    def remember_redelivered(
        self, partition: PartitionId, group: Group, sequences: Iterable[ConsumeSequence]
    ) -> None:
        """Take note, before a replay, of messages that the log shows to be redelivered.

        One that the checkpoint has pending was called for before it. Any other is called for by
        a fact of the replay, and one such fact is done with it: a group that was reset may be
        handed a message again, and then nack it again.
        """
        pending = self.pending_of(partition, group)
        self.redelivered(partition, group, pending.intersection(sequences))
        for sequence in sequences:
            if sequence in pending:
                pending.discard(sequence)
            elif not self._cut_out(partition, group, sequence):
                key = (partition, group, sequence)
                self._redelivered[key] = self._redelivered.get(key, 0) + 1

    def _cut_out(self, partition: PartitionId, group: Group, sequence: ConsumeSequence) -> bool:
        """Take a message out of the range that it is in, if it is in one."""
        state = self.groups.get((partition, group))
        for each in () if state is None else state.ranges:
            if state is not None and each.sequence <= sequence < each.end:
                state.ranges.remove(each)
                state.add(each.without([sequence]))
                self.changed_groups.add((partition, group))
                return True
        return False

    def end_replay(self) -> bool:
        """Finish a replay, after all facts were applied.

        Redeliveries that are left belong to facts that a power cut lost: the consumers still hold
        these messages, and another failure of them counts.

        Returns:
            Whether any are left. No fact records it, so a checkpoint must: a replay from before
            would take them for the redeliveries of later failures.
        """
        left, self._redelivered = self._redelivered, {}
        return bool(left)

    def pending_of(self, partition: PartitionId, group: Group) -> set[ConsumeSequence]:
        """Return the messages that must yet be redelivered."""
        state = self.groups.get((partition, group))
        return set() if state is None else set(state.pending)

    def pending(self) -> list[Redeliver]:
        """Return all redeliveries that facts require and the log does not have, after a replay."""
        return [
            Redeliver(partition, group, (*state.pending.values(), *state.ranges))
            for (partition, group), state in self.groups.items()
            if state.pending or state.ranges
        ]

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> bool:
        """Set every position beyond a partition's recovered end back to that end.

        State of a partition that is gone as a whole is dropped: another partition will get its
        number.

        Returns:
            Whether anything changed. No fact records it, so a checkpoint must.
        """
        groups = {key for key in list(self.groups) if self._clip_group(key, ends.get(key[0]))}
        subscriptions = {
            each.id
            for each in list(self.subscriptions.values())
            if self._clip_subscription(each, ends.get(each.partition))
        }
        self.changed_groups |= groups
        self.changed_subscriptions |= subscriptions
        return self.locks.clip(ends) or bool(groups or subscriptions)

    def put(self, subscription: Subscription) -> None:
        """Add a subscription, from a checkpoint."""
        self.subscriptions[subscription.id] = subscription
        key = (subscription.partition, subscription.group, subscription.consumer)
        self._by_consumer[key] = subscription
        self._of_consumer.setdefault(key[1:], []).append(subscription)
        self._of_group.setdefault(key[:2], {})[subscription.id] = subscription
        self._next_id = max(self._next_id, subscription.id + 1)

    def set_direct(self, subscription: Subscription) -> None:
        """Set ``is_direct``: there is no pull log if one consumer has the whole partition."""
        key = (subscription.partition, subscription.group)
        subscription.is_direct = is_broadcast(subscription.group) or self.locks.is_exclusive(key)

    def _clip_group(self, key: GroupKey, end: ConsumeSequence | None) -> bool:
        if end is None:
            del self.groups[key]
            return True
        state = self.groups[key]
        beyond = [sequence for sequence in state.pending if sequence >= end]
        for sequence in beyond:
            del state.pending[sequence]
        is_beyond = bool(beyond) or any(each.end > end for each in state.ranges)
        ranges, state.ranges = state.ranges, []
        state.add(each.part(0, end) for each in ranges if each.sequence < end)
        is_ahead = state.next_sequence > end
        if is_ahead:
            state.next_sequence = end
        return is_ahead or is_beyond

    def _clip_subscription(self, each: Subscription, end: ConsumeSequence | None) -> bool:
        if end is None:
            self._drop(each)
            return True
        if all(held.first_sequence + held.length <= end for held in each.held):
            return False
        each.clip(end)
        return True

    def _drop(self, subscription: Subscription) -> None:
        del self.subscriptions[subscription.id]
        key = (subscription.partition, subscription.group, subscription.consumer)
        del self._by_consumer[key]
        del self._of_group[key[:2]][subscription.id]
        if not self._of_group[key[:2]]:
            del self._of_group[key[:2]]
        self._of_consumer[key[1:]].remove(subscription)
        if not self._of_consumer[key[1:]]:
            del self._of_consumer[key[1:]]

    # -- one method per fact -----------------------------------------------------------------
    #
    # A fact about a number that nobody opened is passed over: the opening lay in a damaged range
    # of the log, which has been reported.

    def _group_told(self, action: GroupOpened | PassedOver | GroupConfigured) -> None:
        if isinstance(action, GroupConfigured):
            self.settings.put(action.group, action.subject, action.settings)
            return
        key = (action.partition, action.group)
        state = self.groups.setdefault(key, RedeliveryState(action.next_sequence))
        if isinstance(action, PassedOver):
            state.next_sequence = action.next_sequence
        self.changed_groups.add(key)

    def _subscription_opened(self, action: SubscriptionOpened) -> list[Effect]:
        found = self.subscriptions.get(action.subscription)
        if found is not None and not _is_about(action, found):
            # A recovery in between forgot it, with its partition, and gave its number away.
            self._drop(found)
            found = None
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
        self.set_direct(self.subscriptions[action.subscription])
        self.changed_subscriptions.add(action.subscription)
        return []

    def _pulled(self, action: Pulled) -> list[Effect]:
        subscription = self.subscriptions.get(action.subscription)
        if subscription is None:
            return []
        subscription.align(action.first_pull)
        if not subscription.held:
            subscription.since_ms = action.at_ms
        subscription.pulled(action.tenure, action.first_sequence, action.count, action.wanted)
        key = (subscription.partition, subscription.group)
        state = self.groups.setdefault(key, RedeliveryState(action.first_sequence))
        # The last pull alone tells what comes next: a recovery in between may have set the group
        # back, and the log has that only in this fact.
        state.next_sequence = ConsumeSequence(action.first_sequence + action.count)
        self.changed_groups.add(key)
        self.changed_subscriptions.add(subscription.id)
        return []

    def _settled(self, action: Settled) -> list[Effect]:
        subscription = self.subscriptions.get(action.subscription)
        if subscription is None or action.last < subscription.settled:
            return []
        redeliveries = [
            Redelivery(sequence, nacked.delay_ms, nacked.reason, action.at_ms)
            for sequence, nacked in subscription.sequences_of(action.nacked)
        ]
        subscription.settle(action.last)
        subscription.since_ms = action.at_ms
        self.changed_subscriptions.add(subscription.id)
        return self._redeliver((subscription.partition, subscription.group), redeliveries)

    def _lost(self, action: ConsumerLost) -> list[Effect]:
        subscription = self.subscriptions.get(action.subscription)
        if subscription is None:
            return []
        like = Redelivery(
            ConsumeSequence(0), -1, action.reason, action.at_ms, not action.is_leaving
        )
        redeliveries: list[Redelivery] = []
        for held in subscription.held:
            first, length = held.first_sequence, held.length
            if held.matched < length:
                ranged = replace(like, sequence=first, length=length, matched=held.matched)
                redeliveries.append(ranged)
            else:
                redeliveries += (
                    replace(like, sequence=ConsumeSequence(first + i)) for i in range(length)
                )
        subscription.lose()
        self.changed_subscriptions.add(subscription.id)
        return self._redeliver((subscription.partition, subscription.group), redeliveries)

    def _reset(self, action: GroupReset) -> list[Effect]:
        """Set the group to another sequence; drop what its consumers hold of the partition.

        Pending redeliveries still come: those messages failed before the reset.
        """
        key = (action.partition, action.group)
        state = self.groups.setdefault(key, RedeliveryState(action.next_sequence))
        state.next_sequence = action.next_sequence
        self.changed_groups.add(key)
        for each in self.consumers_of(*key):
            if each.held_count:
                each.lose()
                self.changed_subscriptions.add(each.id)
        return []

    def _lock_changed(self, action: LockGranted | LockReleased) -> None:
        """Give a partition to another consumer or none; it continues after settled messages."""
        key = (action.partition, action.group)
        self._give_back(key)
        if isinstance(action, LockGranted):
            self.locks.granted(action)
        else:
            self.locks.released(action)
        for each in self.consumers_of(*key):
            self.set_direct(each)

    def _skipped(self, action: Skipped) -> list[Effect]:
        key = (action.partition, action.group)
        self._give_back(key)
        self.locks.vacate(key)
        state = self.groups.setdefault(key, RedeliveryState(action.sequence))
        state.next_sequence = ConsumeSequence(action.sequence + 1)
        self.changed_groups.add(key)
        dead = Redelivery(action.sequence, NO_RETRY, action.reason, action.at_ms)
        return self._redeliver(key, [dead])

    def _give_back(self, key: GroupKey) -> None:
        """Take back what consumers hold; the first of it is delivered next."""
        for each in self.consumers_of(*key):
            if each.held:
                state = self.groups.setdefault(key, RedeliveryState(each.held[0].first_sequence))
                first = min(state.next_sequence, each.held[0].first_sequence)
                state.next_sequence = first
                each.lose()
                self.changed_groups.add(key)
                self.changed_subscriptions.add(each.id)

    def _redeliver(self, key: GroupKey, redeliveries: list[Redelivery]) -> list[Effect]:
        partition, group = key
        wanted = [
            each
            for called in redeliveries
            for each in self._not_redelivered(partition, group, called)
        ]
        if not wanted:
            return []
        state = self.groups.setdefault((partition, group), RedeliveryState(ConsumeSequence(0)))
        state.add(wanted)
        self.changed_groups.add((partition, group))
        return [Redeliver(partition, group, tuple(wanted))]

    def _not_redelivered(
        self, partition: PartitionId, group: Group, called: Redelivery
    ) -> Iterable[Redelivery]:
        """Return the redeliveries of this fact that the log does not have yet."""
        if not self._redelivered:
            return (called,)
        if called.length == 1:
            return () if self._is_redelivered((partition, group, called.sequence)) else (called,)
        found = sorted(
            sequence
            for whose, whom, sequence in self._redelivered
            if (whose, whom) == (partition, group) and called.sequence <= sequence < called.end
        )
        for sequence in found:
            self._is_redelivered((partition, group, sequence))
        return called.without(found)

    def _is_redelivered(self, key: tuple[PartitionId, Group, ConsumeSequence]) -> bool:
        """Return whether the log already has the redelivery of this fact."""
        times = self._redelivered.pop(key, 0)
        if times > 1:
            self._redelivered[key] = times - 1
        return bool(times)


def _is_about(action: SubscriptionOpened, found: Subscription) -> bool:
    return (action.partition, action.group, action.consumer) == (
        found.partition,
        found.group,
        found.consumer,
    )


def check_incarnation(subscription: Subscription, incarnation: int) -> None:
    """Refuse a consumer that a newer incarnation replaced.

    Raises:
        FencedError: A newer incarnation is known.
    """
    if incarnation < subscription.incarnation:
        raise FencedError(
            f"consumer {subscription.consumer} was started again (incarnation "
            f"{subscription.incarnation}); this is incarnation {incarnation} and must stop"
        )

"""Settled → subscription → retries, and what else a consumer tells: that it lives, or leaves."""

from collections.abc import Callable

from pulque.broker.state import BrokerState
from pulque.clock import Clock
from pulque.errors import (
    InvalidRequestError,
    LockLostError,
    NotAllowedError,
    StaleSettleError,
)
from pulque.model.actions import (
    GROUP_DECIDES,
    NO_RETRY,
    Action,
    ConsumerLost,
    NackedDelivery,
    Settled,
)
from pulque.model.names import (
    ConsumerId,
    Group,
    PartitionName,
    effective_group,
    is_broadcast,
    parse_consumer_id,
)
from pulque.model.positions import PullSequence
from pulque.rules.consumption import Effect, check_incarnation
from pulque.rules.subscription import Subscription
from pulque.wire.requests import Heartbeat, Settle
from pulque.wire.responses import Beaten
from pulque.wire.responses import Settled as SettledAnswer

__all__ = ["Settler", "check_delay"]

_LONGEST_REASON = 1000


class Settler:
    """Takes in what consumers are done with."""

    def __init__(
        self,
        state: BrokerState,
        clock: Clock,
        *,
        perform: Callable[[Effect], None],
        longest_delay_ms: int,
    ) -> None:
        self._state = state
        self._engine = state.engine
        self._consumption = state.consumption
        self._leases = state.leases
        self._clock = clock
        self._perform = perform
        self._longest_delay_ms = longest_delay_ms
        self.settled = 0
        self.nacked = 0
        self.lost = 0

    def settle(self, request: Settle) -> SettledAnswer:
        """Settle a range of deliveries.

        Raises:
            RejectedError: The consumer does not hold them.
        """
        consumer = parse_consumer_id(request.consumer)
        group = effective_group(request.group, consumer)
        partition = self._engine.partition(request.partition)
        found = (
            None
            if partition is None
            else self._consumption.subscription(partition.id, group, consumer)
        )
        if found is None:
            raise StaleSettleError(
                f"consumer {consumer} of group {group} was handed nothing of {request.partition}"
            )
        check_incarnation(found, request.incarnation)
        self._check_lock(request, found)
        self._check_delays(request)
        self._leases.renew(group, consumer, self._clock.monotonic_ms())
        sequences = tuple(n.sequence for n in request.nacked)
        first = found.check_settle(request.tenure, request.first, request.last, sequences)
        if first is None:
            return SettledAnswer(found.settled)
        nacked = tuple(
            NackedDelivery(PullSequence(n.sequence), n.delay_ms, n.reason[:_LONGEST_REASON])
            for n in request.nacked
            if n.sequence >= first
        )
        self._record(
            Settled(found.id, first, PullSequence(request.last), nacked, self._clock.now_ms())
        )
        self.settled += request.last - first + 1
        self.nacked += len(nacked)
        return SettledAnswer(found.settled)

    def _check_lock(self, request: Settle, found: Subscription) -> None:
        """Refuse who has not the lock of an ordered group, and what a strict one does not do.

        Raises:
            LockLostError: The token is not that of the newest lock.
            NotAllowedError: Something is to be retried later, and order is strict.
        """
        group = found.group
        if not request.token and group not in self._consumption.settings.ordered:
            return
        key = (found.partition, group)
        must_lock = self._state.must_lock(PartitionName(request.partition), group)
        if not must_lock and not request.token:
            return
        lock = self._consumption.locks.by_key.get(key)
        is_held = self._consumption.locks.is_held_by(key, found.consumer, request.token)
        if lock is None or not must_lock or not is_held:
            newest = "there is no lock" if lock is None else f"the newest is {lock.token}"
            raise LockLostError(
                f"token {request.token} of consumer {found.consumer} counts nothing in "
                f"{request.partition} for group {group}: {newest}"
            )
        self._state.lock_times.renew(key, self._clock.monotonic_ms())
        if lock.is_strict and any(each.delay_ms != NO_RETRY for each in request.nacked):
            raise NotAllowedError(
                f"{request.partition} is consumed in strict order by group {group}: what failed "
                f"is tried again where it is, or given up ({NO_RETRY}), but not retried later"
            )

    def _check_delays(self, request: Settle) -> None:
        for nacked in request.nacked:
            check_delay(
                nacked.delay_ms, self._longest_delay_ms, f" for delivery {nacked.sequence}"
            )

    def heartbeat(self, request: Heartbeat) -> Beaten:
        """Renew a lease, or take back what a leaving consumer holds.

        Raises:
            FencedError: A newer incarnation of the consumer was here.
        """
        consumer = parse_consumer_id(request.consumer)
        group = effective_group(request.group, consumer)
        for subscription in self._consumption.subscriptions_of(group, consumer):
            check_incarnation(subscription, request.incarnation)
        if request.is_leaving:
            self._lose(group, consumer, "the consumer left", is_leaving=True)
            return Beaten(self._leases.lease_ms)
        self._leases.renew(group, consumer, self._clock.monotonic_ms())
        return Beaten(self._leases.lease_ms)

    def lose_silent(self) -> dict[tuple[Group, ConsumerId], int]:
        """Take back what consumers hold whose lease ran out.

        Returns:
            Who they were, and how many messages each of them held.
        """
        expired = self._leases.expired(self._clock.monotonic_ms())
        reason = f"silent for {self._leases.lease_ms} ms"
        return {key: self._lose(*key, reason) for key in expired}

    def _lose(
        self, group: Group, consumer: ConsumerId, reason: str, *, is_leaving: bool = False
    ) -> int:
        lost = 0
        if is_broadcast(group):
            # There is nobody else for what it holds, and it goes on where it was.
            self._leases.end(group, consumer)
            return 0
        for subscription in self._consumption.subscriptions_of(group, consumer):
            if self._consumption.locks.is_exclusive((subscription.partition, group)):
                continue  # it stays in order: whoever has the lock next goes on with it
            if subscription.held_count:
                lost += subscription.held_count
                now_ms = self._clock.now_ms()
                self._record(ConsumerLost(subscription.id, reason, now_ms, is_leaving))
        self._leases.end(group, consumer)
        self.lost += lost
        return lost

    def _record(self, fact: Action) -> None:
        for effect in self._state.record(fact):
            self._perform(effect)


def check_delay(delay_ms: int, longest_ms: int, of_what: str = "") -> None:
    """Refuse a delay before the next attempt that cannot be.

    Raises:
        InvalidRequestError: It is none that is allowed.
    """
    if not NO_RETRY <= delay_ms <= longest_ms:
        raise InvalidRequestError(
            f"a delay of {delay_ms} ms{of_what}; 0 to {longest_ms} are allowed, {GROUP_DECIDES} "
            f"leaves it to the group, and {NO_RETRY} makes it a dead letter at once"
        )

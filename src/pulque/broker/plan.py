"""What a pull would hand out: first what the consumer holds already, then what nobody has.

A plan changes nothing. It may be made in a thread to warm the page cache, thrown away and made
again; only whoever carries it out writes facts.
"""

from dataclasses import dataclass, field
from typing import Protocol

from pulque.broker.state import BrokerState, PullLimits
from pulque.errors import ErrorCode, NotAllowedError
from pulque.model.actions import Action, GroupOpened, SubscriptionOpened
from pulque.model.names import ConsumerId, Group, owner_of
from pulque.model.positions import ConsumeSequence, PullSequence
from pulque.rules.subscription import HeldRange, Subscription
from pulque.storage.consume_log import Span
from pulque.storage.files import Buffer
from pulque.storage.partitions import Partition
from pulque.wire.requests import FROM_SETTLED, Pull

__all__ = ["PullPlan", "PullPlanner", "Pulling"]


class Pulling(Protocol):
    """A request, and who makes it."""

    @property
    def request(self) -> Pull: ...

    @property
    def group(self) -> Group: ...

    @property
    def consumer(self) -> ConsumerId: ...


@dataclass(slots=True)
class PullPlan:
    """What one pull would hand out; nothing has happened yet."""

    messages: int
    room: int
    facts: list[Action] = field(default_factory=list)
    states: list[ErrorCode] = field(default_factory=list)
    """Per partition: what is wrong with its position, if anything."""
    deliveries: list[tuple[int, HeldRange, tuple[Buffer, ...]]] = field(default_factory=list)
    new: list[tuple[int, SubscriptionOpened | Subscription, Span, tuple[Buffer, ...]]] = field(
        default_factory=list
    )
    openings: int = 0
    """How many of the facts give a number to a new subscription."""
    is_lost: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.deliveries and not self.new and not self.is_lost

    def expect(self, expected: int, next_pull: PullSequence) -> bool:
        """Note the state of the next partition; say whether the consumer is not ahead of it."""
        is_ahead = expected > next_pull
        self.is_lost = self.is_lost or is_ahead
        self.states.append(ErrorCode.POSITION_LOST if is_ahead else ErrorCode.NONE)
        return not is_ahead

    def take(self, messages: int, buffers: tuple[Buffer, ...]) -> None:
        """Use up some of what was asked for."""
        self.messages -= messages
        self.room -= sum(map(len, buffers))


class PullPlanner:
    """Makes plans. May be used from any thread, as it changes nothing."""

    def __init__(self, state: BrokerState, limits: PullLimits) -> None:
        self._engine = state.engine
        self._consumption = state.consumption
        self._max_subscriptions = state.max_subscriptions
        self._limits = limits

    def plan(self, puller: Pulling, *, may_block: bool) -> PullPlan:
        """Say what a pull would hand out now.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            FencedError: A newer incarnation of the consumer was here.
            NotAllowedError: There are too many consumers to remember one more.
        """
        request = puller.request
        plan = PullPlan(
            min(request.max_messages, self._limits.max_messages),
            min(request.max_bytes, self._limits.max_bytes),
        )
        for index, wanted in enumerate(request.wanted):
            partition = self._engine.partition(wanted.partition)
            if partition is None:
                plan.expect(wanted.expected, PullSequence(0))
                continue
            opening = self._consumption.opened(
                partition.id,
                puller.group,
                puller.consumer,
                request.incarnation,
                ahead=plan.openings,
            )
            found = self._consumption.subscription(partition.id, puller.group, puller.consumer)
            if opening is not None:
                plan.facts.append(opening)
            if found is None:
                plan.openings += 1
                self._check_room(plan.openings, puller, partition)
            held, next_pull = (
                (0, PullSequence(0)) if found is None else (found.held_count, found.next_pull)
            )
            if not plan.expect(wanted.expected, next_pull):
                continue
            is_all_there = found is None or self._plan_held(
                plan, index, partition, found, wanted.expected, may_block=may_block
            )
            room = self._limits.max_held - held
            if is_all_there and plan.messages > 0 and plan.room > 0 and room > 0:
                self._plan_new(
                    plan, puller, partition, opening or found, room, may_block=may_block
                )
        return plan

    def _check_room(self, openings: int, puller: Pulling, partition: Partition) -> None:
        if len(self._consumption.subscriptions) + openings <= self._max_subscriptions:
            return
        is_known = self._consumption.subscriptions_of(puller.group, puller.consumer)
        if is_known and owner_of(partition.name) is not None:
            return  # it gets the retries of what it may pull
        raise NotAllowedError(
            f"there are {self._max_subscriptions} subscriptions already, one for each consumer "
            "and partition: raise limits.max_subscriptions, or keep consumer ids over restarts"
        )

    def _plan_held(
        self,
        plan: PullPlan,
        index: int,
        partition: Partition,
        subscription: Subscription,
        expected: int,
        *,
        may_block: bool,
    ) -> bool:
        """Plan to hand out again what the consumer holds; say whether that is all of it.

        If not, nothing may follow: deliveries come without gaps.
        """
        start = subscription.settled if expected == FROM_SETTLED else expected
        for held in subscription.held_from(max(start, subscription.settled)):
            if plan.messages <= 0 or plan.room <= 0:
                return False
            end = ConsumeSequence(held.first_sequence + min(held.length, plan.messages))
            span = self._engine.span(
                partition,
                held.first_sequence,
                max_messages=plan.messages,
                max_bytes=plan.room,
                end=end,
                may_block=may_block,
            )
            # What retention took away cannot be handed out: the run has a hole there.
            length = (span.end if span.pieces else end) - held.first_sequence
            part = held._replace(length=length)
            buffers = tuple(self._engine.read(partition, span, may_block=may_block))
            plan.deliveries.append((index, part, buffers))
            plan.take(length, buffers)
            if length < held.length:
                return False
        return True

    def _plan_new(
        self,
        plan: PullPlan,
        puller: Pulling,
        partition: Partition,
        subscription: SubscriptionOpened | Subscription | None,
        most: int,
        *,
        may_block: bool,
    ) -> None:
        """Plan to hand out messages that nobody of the group was handed yet."""
        group = self._consumption.groups.get((partition.id, puller.group))
        if group is None:
            start = _start_of(puller.request.start_at, partition)
            plan.facts.append(GroupOpened(partition.id, puller.group, start))
        else:
            start = group.next_sequence
        if start >= partition.confirmed or subscription is None:
            return
        span = self._engine.span(
            partition,
            start,
            max_messages=min(plan.messages, most),
            max_bytes=plan.room,
            may_block=may_block,
        )
        if not span.pieces:
            return
        buffers = tuple(self._engine.read(partition, span, may_block=may_block))
        plan.new.append((len(plan.states) - 1, subscription, span, buffers))
        plan.take(span.length, buffers)


def _start_of(start_at: int, partition: Partition) -> ConsumeSequence:
    if owner_of(partition.name) is not None:
        return partition.start
    return ConsumeSequence(min(max(start_at, partition.start), partition.confirmed))

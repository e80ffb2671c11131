"""What a pull would hand out: first what the consumer holds already, then what nobody has.

A group with a filter is handed only batches that may have a match. What has none is passed over:
the plan says how far, and whether there is more to look through than could be done at once.

Partitions are looked at in the order of ``rules/turns.py``: higher priorities first, and among
equals the one that was served longest ago.

A plan changes nothing. It may be made in a thread that reads from the disk, thrown away and made
again; only whoever carries it out writes facts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from pulque.broker.pulling.waiting_pulls import WholePull
from pulque.broker.state import BrokerState, PullLimits
from pulque.errors import ErrorCode, NotAllowedError
from pulque.model.actions import (
    ALL_OF_THEM,
    Action,
    GroupOpened,
    PassedOver,
    SubscriptionOpened,
)
from pulque.model.groups import Filter
from pulque.model.names import ConsumerId, Group, level_of, owner_of, subject_of
from pulque.model.positions import ConsumeSequence, PullSequence
from pulque.rules.subscription import HeldRange, Subscription
from pulque.rules.turns import PullCandidate, Turns
from pulque.storage.files import Buffer, WouldBlockError
from pulque.storage.logs.partitions import Partition
from pulque.storage.reading.tag_search import Budget, TagTest
from pulque.wire.requests import FROM_SETTLED, Pull

__all__ = ["NewRun", "PullPlan", "PullPlanner", "Pulling"]

_HOT_MESSAGES = 10_000
_HOT_ENTRIES, _HOT_READ = 128, 256 * 1024
"""What may be looked through on the event loop; a thread is given more, but not for ever."""
_COLD_ENTRIES, _COLD_READ = 65_536, 32 * 1024 * 1024


@lru_cache(maxsize=4096)
def _test_of(wanted: Filter) -> TagTest:
    return TagTest(wanted.any_bits, wanted.all_bits)


class Pulling(Protocol):
    """A request, and who makes it."""

    @property
    def request(self) -> Pull: ...

    @property
    def group(self) -> Group: ...

    @property
    def consumer(self) -> ConsumerId: ...

    @property
    def whole(self) -> WholePull | None: ...


class _Wanted(NamedTuple):
    """One partition of a pull, and what the consumer has of it."""

    partition: Partition
    expected: int
    opening: SubscriptionOpened | None
    found: Subscription | None


class NewRun(NamedTuple):
    """Messages that nobody of the group was handed yet."""

    place: int
    """Which of the wanted partitions."""
    subscription: SubscriptionOpened | Subscription
    first_sequence: ConsumeSequence
    length: int
    matched: int
    """How many of them the group's filter may want."""
    buffers: tuple[Buffer, ...]


@dataclass(slots=True)
class PullPlan:
    """What one pull would hand out; nothing has happened yet."""

    messages: int
    room: int
    facts: list[Action] = field(default_factory=list)
    states: list[ErrorCode] = field(default_factory=list)
    """Per partition: what is wrong with its position, if anything."""
    deliveries: list[tuple[int, HeldRange, tuple[Buffer, ...]]] = field(default_factory=list)
    new: list[NewRun] = field(default_factory=list)
    passed: list[PassedOver] = field(default_factory=list)
    """What the group does not want, to be noted after all else."""
    is_unfinished: bool = False
    """There is more to look through before one can say that there is nothing."""
    openings: int = 0
    """How many of the facts give a number to a new subscription."""
    is_lost: bool = False
    is_at_limit: bool = False
    """The consumer holds as much as it may: it gets no more before it settles."""
    favoured: int | None = None
    """The level that it begins with, where that is not the highest."""

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

    def lack_lock(self) -> None:
        """Note that the next partition does not belong to the consumer."""
        self.is_lost = True
        self.states.append(ErrorCode.LOCK_LOST)

    def take(self, messages: int, buffers: tuple[Buffer, ...]) -> None:
        """Use up some of what was asked for."""
        self.messages -= messages
        self.room -= sum(map(len, buffers))


class PullPlanner:
    """Makes plans. May be used from any thread, as it changes nothing."""

    def __init__(self, state: BrokerState, limits: PullLimits, turns: Turns) -> None:
        self._engine = state.engine
        self._state = state
        self._consumption = state.consumption
        self._max_subscriptions = state.max_subscriptions
        self._limits = limits
        self._turns = turns

    def plan(self, puller: Pulling, *, may_block: bool) -> PullPlan:
        """Say what a pull would hand out now.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            CorruptionError: Some of it is damaged, and other brokers have copies: nothing is
                passed over.
            FencedError: A newer incarnation of the consumer was here.
            NotAllowedError: There are too many consumers to remember one more.
        """
        request = puller.request
        plan = PullPlan(
            min(request.max_messages, self._limits.max_messages),
            min(request.max_bytes, self._limits.max_bytes),
        )
        found = self._look(plan, puller)
        room = self._limits.max_held - self._held(puller, found.values())
        plan.is_at_limit = room <= 0
        complete = [
            index
            for index in self._in_turn(plan, puller.group, found)
            if self._plan_held(plan, puller.group, index, found[index], may_block=may_block)
        ]
        for index in complete:
            if plan.messages <= 0 or plan.room <= 0 or room <= 0:
                break
            each = found[index]
            room -= self._plan_new(plan, puller, index, each, room, may_block=may_block)
        return plan

    def basis(self, puller: Pulling) -> tuple[object, ...]:
        """Return what a plan is made from: while that stays as it is, so does the plan."""
        consumption = self._consumption
        parts: list[object] = [consumption.next_id, consumption.settings.version]
        for wanted in puller.request.wanted:
            partition = self._engine.partition(wanted.partition)
            if partition is not None:
                found = consumption.subscription(partition.id, puller.group, puller.consumer)
                group = consumption.groups.get((partition.id, puller.group))
                # What is settled meanwhile and lies before what is wanted changes nothing.
                parts += (
                    partition.id,
                    found
                    and (
                        found.incarnation,
                        max(found.settled, wanted.expected),
                        found.next_pull,
                    ),
                    group and group.next_sequence,
                    consumption.locks.next_token((partition.id, puller.group)),
                )
        return tuple(parts)

    def _look(self, plan: PullPlan, puller: Pulling) -> dict[int, _Wanted]:
        """Find what the consumer has of each partition, and note its states.

        Returns:
            Those that can be handed out, by their place in the request.
        """
        found: dict[int, _Wanted] = {}
        for index, wanted in enumerate(puller.request.wanted):
            partition = self._engine.partition(wanted.partition)
            if partition is None:
                plan.expect(wanted.expected, PullSequence(0))
                continue
            if not self._may_pull(partition, puller, wanted.token):
                plan.lack_lock()
                continue
            opening = self._consumption.opened(
                partition.id,
                puller.group,
                puller.consumer,
                puller.request.incarnation,
                ahead=plan.openings,
            )
            subscription = self._consumption.subscription(
                partition.id, puller.group, puller.consumer
            )
            if opening is not None:
                plan.facts.append(opening)
            if subscription is None:
                plan.openings += 1
                self._check_room(plan.openings, puller, partition)
            next_pull = PullSequence(0) if subscription is None else subscription.next_pull
            if plan.expect(wanted.expected, next_pull):
                found[index] = _Wanted(partition, wanted.expected, opening, subscription)
        return found

    def _held(self, puller: Pulling, found: Iterable[_Wanted]) -> int:
        """Return how much the consumer holds of all that its pull names."""
        if puller.whole is None:
            return sum(each.found.held_count for each in found if each.found is not None)
        named, partitions = puller.whole.named, self._engine.partitions.by_id
        return sum(
            each.held_count
            for each in self._consumption.subscriptions_of(puller.group, puller.consumer)
            if partitions[each.partition].name in named
        )

    def _may_pull(self, partition: Partition, puller: Pulling, token: int) -> bool:
        """Whether a partition of an ordered group belongs to the consumer now."""
        if not token and puller.group not in self._consumption.settings.ordered:
            return True
        if not self._state.must_lock(partition.name, puller.group):
            return not token
        key = (partition.id, puller.group)
        return self._consumption.locks.is_held_by(key, puller.consumer, token)

    def _in_turn(self, plan: PullPlan, group: Group, found: dict[int, _Wanted]) -> Iterable[int]:
        if len(found) < 2:
            return found
        candidates = [
            PullCandidate(index, each.partition.id, level_of(each.partition.name))
            for index, each in found.items()
        ]
        if any(each.level != candidates[0].level for each in candidates):
            plan.favoured = self._turns.favoured(
                group,
                lambda: {
                    each.level
                    for each in candidates
                    if self.has_new(found[each.place].partition, group)
                },
            )
        return [each.place for each in self._turns.in_order(group, candidates, plan.favoured)]

    def has_new(self, partition: Partition, group: Group) -> bool:
        """Whether a partition has messages that nobody of a group was handed yet."""
        state = self._consumption.groups.get((partition.id, group))
        start = partition.start if state is None else state.next_sequence
        return start < partition.confirmed

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
        group: Group,
        index: int,
        wanted: _Wanted,
        *,
        may_block: bool,
    ) -> bool:
        """Plan to hand out again what the consumer holds; say whether that is all of it.

        If not, nothing may follow: deliveries come without gaps.
        """
        partition, expected, _, subscription = wanted
        if subscription is None:
            return True
        start = subscription.settled if expected == FROM_SETTLED else expected
        test = self._test(group, partition)
        for held in subscription.held_from(max(start, subscription.settled)):
            if plan.messages <= 0 or plan.room <= 0:
                return False
            if test is not None:
                if not self._plan_found(plan, index, partition, held, test, may_block=may_block):
                    return False
                continue
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

    def _plan_found(
        self,
        plan: PullPlan,
        index: int,
        partition: Partition,
        held: HeldRange,
        test: TagTest,
        *,
        may_block: bool,
    ) -> bool:
        """Plan to hand out again what a filter wants of a range; say whether that is all."""
        end = ConsumeSequence(held.first_sequence + held.length)
        budget = Budget(plan.messages, plan.room, held.length, _COLD_READ)
        found = self._engine.search.find(
            partition, held.first_sequence, test, budget, end=end, may_block=may_block
        )
        is_all = found.examined >= min(end, partition.confirmed)
        length = (end if is_all else found.examined) - held.first_sequence
        if length:
            plan.deliveries.append((index, held._replace(length=length), found.buffers))
            plan.take(found.matched, found.buffers)
        return is_all

    def _test(self, group: Group, partition: Partition) -> TagTest | None:
        """Return what a group's filter wants of a partition, or None for everything."""
        settings = self._consumption.settings
        # What is in a partition of its own was wanted already.
        if group not in settings.filtering or owner_of(partition.name) is not None:
            return None
        wanted = settings.of(group, subject_of(partition.name)).filter
        return _test_of(wanted) if wanted.kind else None

    def _plan_new(
        self,
        plan: PullPlan,
        puller: Pulling,
        index: int,
        wanted: _Wanted,
        most: int,
        *,
        may_block: bool,
    ) -> int:
        """Plan to hand out messages that nobody of the group was handed yet; say how many."""
        partition = wanted.partition
        subscription = wanted.opening or wanted.found
        group = self._consumption.groups.get((partition.id, puller.group))
        if group is None:
            start = _start_of(puller.request.start_at, partition)
            plan.facts.append(GroupOpened(partition.id, puller.group, start))
        else:
            start = group.next_sequence
        if start >= partition.confirmed or subscription is None:
            return 0
        test = self._test(puller.group, partition)
        if test is not None:
            budget = _budget(plan, partition.confirmed - start, most, may_block=may_block)
            found = self._engine.search.find(partition, start, test, budget, may_block=may_block)
            if found.matched:
                run = (found.first_sequence, found.length, found.matched, found.buffers)
                plan.new.append(NewRun(index, subscription, *run))
                plan.take(found.matched, found.buffers)
            if found.examined > max(start, found.end):
                plan.passed.append(PassedOver(partition.id, puller.group, found.examined))
            if not found.matched and found.examined < partition.confirmed:
                plan.is_unfinished = True
            return found.matched
        span = self._engine.span(
            partition,
            start,
            max_messages=min(plan.messages, most),
            max_bytes=plan.room,
            may_block=may_block,
        )
        buffers = tuple(self._engine.read(partition, span, may_block=may_block))
        if not span.pieces:
            return 0
        run = (span.first_sequence, span.length, ALL_OF_THEM, buffers)
        plan.new.append(NewRun(index, subscription, *run))
        plan.take(span.length, buffers)
        return span.length


def _budget(plan: PullPlan, waiting: int, most: int, *, may_block: bool) -> Budget:
    """Return what a search may do here.

    Raises:
        WouldBlockError: There is too much to look through for the event loop.
    """
    messages = min(plan.messages, most)
    if may_block:
        return Budget(messages, plan.room, _COLD_ENTRIES, _COLD_READ)
    if waiting > _HOT_MESSAGES:
        raise WouldBlockError
    return Budget(messages, plan.room, _HOT_ENTRIES, _HOT_READ)


def _start_of(start_at: int, partition: Partition) -> ConsumeSequence:
    if owner_of(partition.name) is not None:
        return partition.start
    return ConsumeSequence(min(max(start_at, partition.start), partition.confirmed))

"""Consume log → Pulled → consumer, and the long poll.

A pull is tried in two steps. The first looks, reads and changes nothing: if the disk would have
to be asked, it stops, a thread warms the page cache, and it is tried again. The second writes the
facts and applies them. A pull that finds nothing waits, as an object in a dictionary: no task, no
thread, one timer.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from pulque.broker.plan import PullPlan, PullPlanner
from pulque.broker.state import BrokerState, PullLimits, Surroundings
from pulque.errors import (
    ErrorCode,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
)
from pulque.model.actions import GroupOpened, Pulled, SubscriptionOpened
from pulque.model.names import (
    ConsumerId,
    Group,
    effective_group,
    owner_of,
    parse_consumer_id,
    parse_partition,
)
from pulque.model.positions import PullSequence
from pulque.rules.consumption import check_incarnation
from pulque.rules.subscription import Subscription
from pulque.storage.consume_log import Span
from pulque.storage.files import Buffer, WouldBlockError
from pulque.storage.partitions import Partition
from pulque.wire.requests import LATEST, Pull
from pulque.wire.responses import Delivered, State
from pulque.wire.responses import Pulled as PulledAnswer

__all__ = ["Puller", "WaitingPull"]

_LONGEST_WAIT_MS = 60_000
_MOST_PARTITIONS = 10_000
_FEW_PARTITIONS = 10


@dataclass(eq=False, slots=True)
class WaitingPull:
    """A pull that has not been answered."""

    request: Pull
    group: Group
    consumer: ConsumerId
    answer: "Callable[[PulledAnswer], None]"
    refuse: "Callable[[PulqueError], None]"
    owner: object
    """Whose connection it came over."""
    until: float
    """When it must be answered, in the event loop's time."""
    timer: asyncio.TimerHandle | None = None
    """Set while it stands in line."""
    is_over: bool = False
    """It was answered, or its connection is gone."""


class Puller:
    """Hands messages to consumers."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        limits: PullLimits,
    ) -> None:
        self._state = state
        self._engine = state.engine
        self._consumption = state.consumption
        self._clock = around.clock
        self._executor = around.executor
        self._planner = PullPlanner(state, limits)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, dict[Group, dict[WaitingPull, None]]] = {}
        """By partition name, as a partition may come into being while a pull waits for it."""
        self._by_owner: dict[object, set[WaitingPull]] = {}
        self.delivered = 0
        self.waiting = 0

    # -- requests ----------------------------------------------------------------------------

    def pull(
        self,
        request: Pull,
        owner: object,
        answer: Callable[[PulledAnswer], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Answer a pull as soon as there is something, at the latest when its time is up."""
        consumer = parse_consumer_id(request.consumer)
        waiting = WaitingPull(
            request,
            effective_group(request.group, consumer),
            consumer,
            answer,
            refuse,
            owner,
            self._loop.time() + min(request.timeout_ms, _LONGEST_WAIT_MS) / 1000,
        )
        self._check(request, waiting.group)
        self._check_waiting(request, owner)
        self._check_fence(waiting)
        if request.start_at == LATEST:
            self._begin_at_end(waiting)
        self._renew_lease(waiting)
        self._by_owner.setdefault(owner, set()).add(waiting)
        if not self._try(waiting):
            self._wait(waiting)

    def wake(self, partitions: list[Partition]) -> None:
        """Serve pulls that wait for messages of these partitions."""
        for partition in partitions:
            groups = self._waiting.get(partition.name)
            if groups:
                for group, line in list(groups.items()):
                    self._wake_group(partition, group, line)

    def closed(self, owner: object) -> None:
        """Forget the pulls of a connection that is gone."""
        for waiting in self._by_owner.get(owner, set()).copy():
            self._stop_waiting(waiting)

    def dismiss(self, lost: Collection[tuple[Group, ConsumerId]]) -> None:
        """Answer the waiting pulls of consumers that were lost, with nothing.

        Should one be dead, it must not be handed messages; should it live, it comes back.
        """
        if not lost:
            return
        for waiting in [each for owned in self._by_owner.values() for each in owned]:
            is_in_line = waiting.timer is not None
            if is_in_line and (waiting.group, waiting.consumer) in lost:
                self._time_is_up(waiting)

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, waiting: WaitingPull) -> None:
        if self._loop.time() >= waiting.until:
            self._time_is_up(waiting)
            return
        waiting.timer = self._loop.call_at(waiting.until, self._time_is_up, waiting)
        self.waiting += 1
        for wanted in waiting.request.wanted:
            groups = self._waiting.setdefault(wanted.partition, {})
            groups.setdefault(waiting.group, {})[waiting] = None

    def _stop_waiting(self, waiting: WaitingPull) -> None:
        if waiting.is_over:
            return
        waiting.is_over = True
        self._leave_lines(waiting)
        owned = self._by_owner.get(waiting.owner)
        if owned is not None:
            owned.discard(waiting)
            if not owned:
                del self._by_owner[waiting.owner]

    def _leave_lines(self, waiting: WaitingPull) -> None:
        if waiting.timer is None:
            return
        waiting.timer.cancel()
        waiting.timer = None
        self.waiting -= 1
        for wanted in waiting.request.wanted:
            self._leave_line(wanted.partition, waiting)

    def _leave_line(self, partition: str, waiting: WaitingPull) -> None:
        groups = self._waiting.get(partition, {})
        line = groups.get(waiting.group, {})
        line.pop(waiting, None)
        if not line:
            groups.pop(waiting.group, None)
        if not groups:
            self._waiting.pop(partition, None)

    def _time_is_up(self, waiting: WaitingPull) -> None:
        self._end(waiting, self._plan_nothing(waiting))

    def _wake_group(
        self, partition: Partition, group: Group, line: dict[WaitingPull, None]
    ) -> None:
        """Serve those who wait, first come first served, as long as there are messages."""
        for waiting in list(line):
            state = self._consumption.groups.get((partition.id, group))
            if state is not None and state.next_sequence >= partition.confirmed:
                return
            self._try(waiting)

    # -- trying ------------------------------------------------------------------------------

    def _try(self, waiting: WaitingPull, *, may_block: bool = False) -> bool:
        """Answer a pull if there is something; say whether it is dealt with."""
        try:
            plan = self._planner.plan(waiting, may_block=may_block)
            if plan.is_empty:
                self._open(plan)
                return False
            self._end(waiting, plan)
        except WouldBlockError:
            self._warm(waiting)
        except PulqueError as error:
            self._stop_waiting(waiting)
            waiting.refuse(error)
        return True

    def _warm(self, waiting: WaitingPull) -> None:
        """Have a thread read what the pull needs, then try again."""
        self._leave_lines(waiting)

        def again(_: object) -> None:
            # Its connection may be gone by now: nobody would get what it is handed.
            if not waiting.is_over and not self._try(waiting, may_block=True):
                self._wait(waiting)

        def read() -> None:
            # The second try meets the same, and answers it. What changes under this one's eyes
            # (a RuntimeError says so) changes nothing: it only warms.
            with suppress(PulqueError, OSError, RuntimeError):
                self._planner.plan(waiting, may_block=True)

        self._loop.run_in_executor(self._executor, read).add_done_callback(again)

    # -- doing -------------------------------------------------------------------------------

    def _open(self, plan: PullPlan) -> None:
        """Write down who waits, so that an older incarnation of it is fenced off already."""
        for fact in plan.facts:
            if isinstance(fact, SubscriptionOpened):
                self._state.record(fact)

    def _end(self, waiting: WaitingPull, plan: PullPlan) -> None:
        """Write the facts of a plan, apply them, and answer."""
        try:
            for fact in plan.facts:
                self._state.record(fact)
            deliveries = [
                Delivered(
                    index, held.tenure, held.first_pull, held.first_sequence, held.length, buffers
                )
                for index, held, buffers in plan.deliveries
            ]
            deliveries += [self._hand_out(*new) for new in plan.new]
        except PulqueError as error:
            self._stop_waiting(waiting)
            waiting.refuse(error)
            return
        if plan.new:
            self._renew_lease(waiting)
        self._stop_waiting(waiting)
        states = tuple(self._states(waiting, plan))
        waiting.answer(PulledAnswer(states, tuple(deliveries)))

    def _hand_out(
        self,
        index: int,
        subscription: SubscriptionOpened | Subscription,
        span: Span,
        buffers: tuple[Buffer, ...],
    ) -> Delivered:
        number = (
            subscription.id
            if isinstance(subscription, Subscription)
            else subscription.subscription
        )
        first_pull = self._consumption.subscriptions[number].next_pull
        self._state.record(
            Pulled(
                number,
                self._state.tenure,
                first_pull,
                span.first_sequence,
                span.length,
                self._clock.now_ms(),
            )
        )
        self.delivered += span.length
        return Delivered(
            index, self._state.tenure, first_pull, span.first_sequence, span.length, buffers
        )

    def _states(self, waiting: WaitingPull, plan: PullPlan) -> Iterator[State]:
        for code, wanted in zip(plan.states, waiting.request.wanted, strict=True):
            partition = self._engine.partition(wanted.partition)
            found = (
                self._consumption.subscription(partition.id, waiting.group, waiting.consumer)
                if partition is not None
                else None
            )
            if found is None:
                yield State(code, PullSequence(0), PullSequence(0))
            else:
                yield State(code, found.settled, found.next_pull)

    def _plan_nothing(self, waiting: WaitingPull) -> PullPlan:
        plan = PullPlan(0, 0)
        plan.states = [ErrorCode.NONE] * len(waiting.request.wanted)
        return plan

    def _check(self, request: Pull, group: Group) -> None:
        if not 1 <= len(request.wanted) <= _MOST_PARTITIONS:
            raise InvalidRequestError(
                f"a pull from {len(request.wanted)} partitions; "
                f"1 to {_MOST_PARTITIONS} are allowed"
            )
        if not request.max_messages or not request.max_bytes:
            raise InvalidRequestError("a pull must ask for at least one message and one byte")
        if len({wanted.partition for wanted in request.wanted}) < len(request.wanted):
            raise InvalidRequestError("a pull names a partition twice")
        for wanted in request.wanted:
            owner = owner_of(parse_partition(wanted.partition))
            if owner is not None and owner != group:
                raise NotAllowedError(f"{wanted.partition} belongs to group {owner}, not {group}")

    def _check_waiting(self, request: Pull, owner: object) -> None:
        """Refuse what would have the owner wait for too much at once."""
        if len(request.wanted) <= _FEW_PARTITIONS:
            return
        waited_for = sum(len(each.request.wanted) for each in self._by_owner.get(owner, ()))
        if waited_for + len(request.wanted) > _MOST_PARTITIONS:
            raise OverloadedError(f"this connection waits for {waited_for} partitions already")

    def _check_fence(self, waiting: WaitingPull) -> None:
        """Refuse an old incarnation before it renews the lease of its successor."""
        for wanted in waiting.request.wanted:
            partition = self._engine.partition(wanted.partition)
            if partition is not None:
                found = self._consumption.subscription(
                    partition.id, waiting.group, waiting.consumer
                )
                if found is not None:
                    check_incarnation(found, waiting.request.incarnation)

    def _begin_at_end(self, waiting: WaitingPull) -> None:
        """Write down where a new group starts: at the end of now, not of when it is served."""
        for wanted in waiting.request.wanted:
            name = parse_partition(wanted.partition)
            if owner_of(name) is None:
                partition = self._state.make_partition(name, self._clock.now_ms())
                if (partition.id, waiting.group) not in self._consumption.groups:
                    self._state.record(
                        GroupOpened(partition.id, waiting.group, partition.confirmed)
                    )

    def _renew_lease(self, waiting: WaitingPull) -> None:
        self._state.leases.renew(waiting.group, waiting.consumer, self._clock.monotonic_ms())

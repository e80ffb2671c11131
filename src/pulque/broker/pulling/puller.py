"""Consume log → Pulled → consumer, and the long poll.

A pull is tried in two steps. The first looks, reads and changes nothing: if the disk would have
to be asked, a thread does it, and what it found is handed out if nothing has changed meanwhile;
the event loop itself never waits for the disk. The second writes the facts and applies them. A
pull that finds nothing waits in line; of a partition that it covers and does not know it is told
at once.

All of that looks at every partition that the pull names. One that names more than ``PART`` is
therefore handled as several, its parts, with a turn of the event loop for each: every part is
tried and stands in line by itself. The first that has something to hand out, or to say, answers
for the whole; without that, the whole is answered when all parts were tried and its time is up.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from pulque.broker.cluster.partition_coverage import Place
from pulque.broker.pulling.cold_reads import ColdFound, ColdPull, ColdReads
from pulque.broker.pulling.pull_plan import NewRun, PullPlan, PullPlanner
from pulque.broker.pulling.pull_validation import check_names, check_pull
from pulque.broker.pulling.waiting_pulls import Lines, WaitingPull, WholePull
from pulque.broker.state import BrokerState, PullLimits, Surroundings
from pulque.errors import (
    ErrorCode,
    NotAllowedError,
    OverloadedError,
    PulqueError,
)
from pulque.model.actions import ALL_OF_THEM, GroupOpened, Pulled, Settled, SubscriptionOpened
from pulque.model.groups import Mode
from pulque.model.names import (
    ConsumerId,
    Group,
    effective_group,
    level_of,
    owner_of,
    parse_consumer_id,
    parse_partition,
    parse_pattern,
    subject_of,
)
from pulque.model.positions import PartitionId, PullSequence
from pulque.net.server import Work
from pulque.net.steps import in_slices
from pulque.rules.consumption import check_incarnation
from pulque.rules.subscription import Subscription
from pulque.rules.turns import PullCandidate, Turns
from pulque.serving.commit import Synced
from pulque.storage.files import WouldBlockError
from pulque.storage.logs.partitions import Partition
from pulque.wire.requests import LATEST, MAX_WANTED, Pull, Wanted
from pulque.wire.responses import Delivered, State
from pulque.wire.responses import Pulled as PulledAnswer

__all__ = ["PART", "Puller", "WaitingPull"]

PART = 256
"""How many partitions of a pull are looked at in one turn of the event loop."""

_LONGEST_WAIT_MS = 60_000
_FEW_PARTITIONS = 10
_PULLS_PER_LOCK = 3
_MOST_COLD = 10_000
_MOST_COLD_TRIES = 5
_COLD_PATIENCE_S = 1.0
"""How long a pull without time to wait may still wait for its turn at the disk."""
_cover = lru_cache(maxsize=4096)(parse_pattern)
_NO_PARTITION = PartitionId(0)


class Puller:
    """Hands messages to consumers."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        limits: PullLimits,
        sync_facts: Callable[[Synced], None],
    ) -> None:
        self._state = state
        self._sync_facts = sync_facts
        """Tells when the facts that are recorded by now are on disk."""
        self._engine = state.engine
        self._consumption = state.consumption
        self._clock = around.clock
        self._turns = Turns(limits.low_priority_share)
        self._cold = ColdReads[ColdFound](around.executor, limits.cold_reads)
        self._planner = PullPlanner(state, limits, self._turns)
        self._loop = asyncio.get_running_loop()
        self._lines = Lines()
        self.delivered = 0

    @property
    def waiting(self) -> int:
        """How many pulls stand in line."""
        return self._lines.waiting

    # -- requests ----------------------------------------------------------------------------

    def pull(
        self,
        request: Pull,
        owner: object,
        answer: Callable[[PulledAnswer], None],
        refuse: Callable[[PulqueError], None],
        go_on: Callable[[Work], None],
    ) -> Work | None:
        """Answer a pull as soon as there is something, at the latest when its time is up.

        Args:
            request: What is asked.
            owner: Whose connection it came over.
            answer: Takes the answer.
            refuse: Takes what went wrong later.
            go_on: Takes the steps of an answer that is given later.

        Returns:
            The steps of a pull from very many partitions. They raise nothing.

        Raises:
            RejectedError: It cannot be.
        """
        consumer = parse_consumer_id(request.consumer)
        now = self._loop.time()
        waiting = WaitingPull(
            request,
            effective_group(request.group, consumer),
            consumer,
            answer,
            refuse,
            owner,
            now,
            now + min(request.timeout_ms, self._longest_wait_ms(request)) / 1000,
        )
        check_pull(request)
        self._check_waiting(request, owner)
        if len(request.wanted) > PART:
            named = frozenset(each.partition for each in request.wanted)
            return self._pull_in_parts(waiting, WholePull(request, answer, refuse, go_on, named))
        self._check(waiting)
        is_new = request.start_at == LATEST and not self._is_here(waiting)
        self._begin(waiting, at_end=is_new)
        return None

    def _check(self, waiting: WaitingPull) -> None:
        """Refuse who may not pull, before anything is done."""
        check_names(waiting.request, waiting.group)
        self._check_fence(waiting)
        if (waiting.group, waiting.consumer) in self._state.outdated:
            raise NotAllowedError(
                f"group {waiting.group} was changed since consumer {waiting.consumer} subscribed: "
                "it must be started anew, with the group's mode and filter of now"
            )

    def _begin(self, waiting: WaitingPull, *, at_end: bool) -> None:
        """Answer a pull, or have it stand in line.

        Args:
            waiting: The pull.
            at_end: Whether its group is new, and starts at the end.
        """
        self._look_for_unnamed(waiting)
        if at_end:
            self._begin_at_end(waiting)
        self._renew_lease(waiting)
        self._lines.add(waiting)
        if not self._try(waiting):
            self._wait(waiting)

    # -- pulls in parts ----------------------------------------------------------------------

    def _pull_in_parts(self, waiting: WaitingPull, whole: WholePull) -> Work:
        """Begin the parts of a pull, one after the other, until one has an answer."""
        try:
            yield from self._divide(waiting, whole)
            parts = list(whole.places)
            is_here = waiting.request.start_at != LATEST
            for part in parts:
                self._check(part)
                is_here = is_here or self._is_here(part)
                yield
            for part in parts:
                if part.is_over:
                    break
                self._check(part)
                self._begin(part, at_end=not is_here)
                yield
        except PulqueError as error:
            self._give_up(whole)
            whole.refuse(error)
            return
        except GeneratorExit:
            self._give_up(whole)  # its connection is gone
            raise
        whole.is_begun = True
        if whole.found is not None:
            self._end_all(whole)
            yield from self._answer_whole(whole)

    def _divide(self, waiting: WaitingPull, whole: WholePull) -> Work:
        """Divide a pull into parts, in the order in which its partitions have their turn."""
        request, group = waiting.request, waiting.group
        candidates: list[PullCandidate] = []
        for some in in_slices(enumerate(request.wanted)):
            for place, wanted in some:
                level = level_of(parse_partition(wanted.partition))
                found = self._engine.partition(wanted.partition)
                number = _NO_PARTITION if found is None else found.id
                candidates.append(PullCandidate(place, number, level))
            yield
        if any(each.level != candidates[0].level for each in candidates):
            whole.favoured = self._turns.favoured(group, lambda: self._levels(group, candidates))
        in_order = self._turns.in_order(group, candidates, whole.favoured)
        yield
        covers = request.covers
        for turn in in_slices(in_order, PART):
            names = tuple([request.wanted[each.place] for each in turn])
            part = replace(waiting, request=replace(request, wanted=names, covers=covers))
            part.whole = whole
            whole.places[part] = [each.place for each in turn]
            covers = ()
            yield

    def _levels(self, group: Group, candidates: Iterable[PullCandidate]) -> set[int]:
        """Return the levels that have messages for a group."""
        partitions = self._engine.partitions.by_id
        return {
            each.level
            for each in candidates
            if each.partition and self._planner.has_new(partitions[each.partition], group)
        }

    def _answer(self, waiting: WaitingPull, answer: PulledAnswer) -> None:
        """Answer a pull; if it is a part, the whole."""
        whole = waiting.whole
        if whole is None:
            waiting.answer(answer)
        elif whole.places:
            whole.found = waiting, answer
            if whole.is_begun:
                whole.go_on(self._answer_whole(whole))

    def _answer_whole(self, whole: WholePull) -> Work:
        """Answer a pull with what one of its parts has, and where all its partitions are."""
        if whole.found is None:
            return
        part, answer = whole.found
        places = whole.places[part]
        told = dict(zip(places, answer.states, strict=True))
        states: list[State] = []
        for some in in_slices(enumerate(whole.request.wanted), PART):
            states += [
                told.get(place) or self._standing(part, wanted, ErrorCode.NONE)
                for place, wanted in some
            ]
            yield
        deliveries = [replace(each, index=places[each.index]) for each in answer.deliveries]
        head = whole.head
        is_changed = answer.routes_changed or head.routes_changed
        whole.answer(
            PulledAnswer(tuple(states), tuple(deliveries), head.routes_version, is_changed)
        )
        whole.let_go()

    def _give_up(self, whole: WholePull) -> None:
        self._end_all(whole)
        whole.let_go()

    def _end_all(self, whole: WholePull) -> None:
        for each in whole.places:
            self._lines.end(each)

    def _end_one(self, waiting: WaitingPull, *, is_told: bool) -> None:
        """End a pull; if it is a part and has something to tell, all parts of the whole."""
        self._lines.end(waiting)
        whole = waiting.whole
        if whole is not None and (is_told or whole.is_begun):
            whole.found = None
            self._end_all(whole)

    def wake(self, partitions: list[Partition]) -> None:
        """Serve pulls that wait for messages of these partitions."""
        for partition in partitions:
            for group in self._lines.groups_of(partition.name):
                self._wake_group(partition, group)

    def closed(self, owner: object) -> None:
        """Forget the pulls of a connection that is gone."""
        for waiting in self._lines.of_owner(owner):
            self._end_one(waiting, is_told=True)
            if waiting.whole is not None:
                waiting.whole.let_go()

    def dismiss(self, lost: Collection[tuple[Group, ConsumerId]]) -> None:
        """Answer the waiting pulls of consumers that were lost, with nothing.

        Should one be dead, it must not be handed messages; should it live, it comes back.
        """
        for group, consumer in lost:
            for waiting in self._lines.of_consumer(group, consumer):
                self._time_is_up(waiting)

    def settled(self, group: Group, consumer: ConsumerId) -> None:
        """Serve a consumer's waiting pulls, if they wait because it held as much as it may."""
        for waiting in self._lines.of_consumer(group, consumer):
            if waiting.is_at_limit and waiting.timer is not None:
                self._try(waiting)

    def look_again(self, group: Group, consumer: ConsumerId) -> None:
        """Look at a consumer's waiting pulls, as a partition may not be its own any more."""
        for waiting in self._lines.of_consumer(group, consumer):
            if waiting.timer is not None:
                self._try(waiting)

    def partition_added(self, partition: Partition, places: Iterable[Place]) -> None:
        """Tell those who wait, and cover a new partition without knowing it."""
        told = self._lines.not_naming(partition.name, places)
        if told:
            # Not now: whoever makes a partition is in the middle of something.
            self._loop.call_soon(self._tell_of_routes, told)

    def _tell_of_routes(self, told: list[WaitingPull]) -> None:
        for waiting in told:
            waiting.routes_changed = True
            self._time_is_up(waiting)

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, waiting: WaitingPull) -> None:
        self._look_for_unnamed(waiting)
        if waiting.routes_changed or self._loop.time() >= waiting.until:
            self._time_is_up(waiting)
        else:
            timer = self._loop.call_at(waiting.until, self._time_is_up, waiting)
            self._lines.enter(waiting, timer)

    def _time_is_up(self, waiting: WaitingPull) -> None:
        if not waiting.is_over:
            self._end(waiting, self._plan_nothing(waiting))

    def _wake_group(self, partition: Partition, group: Group) -> None:
        """Serve those who wait, first come first served, as long as there are messages."""
        unserved = 0
        while some := self._lines.some_of(partition.name, group, unserved):
            for waiting in some:
                state = self._consumption.groups.get((partition.id, group))
                if state is not None and state.next_sequence >= partition.confirmed:
                    return
                # One that was served with another's turn, or whose connection is gone, has left.
                if waiting.timer is not None and not self._try(waiting):
                    unserved += 1

    # -- trying ------------------------------------------------------------------------------

    def _try(self, waiting: WaitingPull) -> bool:
        """Answer a pull if there is something; say whether it is dealt with."""
        try:
            plan = self._planner.plan(waiting, may_block=False)
            if plan.is_empty:
                self._open(plan)
                waiting.is_at_limit = plan.is_at_limit
                if not plan.is_unfinished:
                    return False
                self._read_cold(waiting)
                return True
            self._end(waiting, plan)
        except WouldBlockError:
            self._read_cold(waiting)
        except PulqueError as error:
            self._refuse(waiting, error)
        return True

    def _read_cold(self, waiting: WaitingPull) -> None:
        """Have a thread read what the pull needs, when it is its group's turn."""
        self._lines.leave(waiting)
        if self._cold.waiting >= _MOST_COLD:
            self._refuse(waiting, OverloadedError(f"{_MOST_COLD} pulls wait for the disk already"))
        elif waiting.cold_tries >= _MOST_COLD_TRIES:
            # Others of its group were always faster: it gets nothing, and asks again.
            self._time_is_up(waiting)
        else:
            waiting.cold_tries += 1
            read = ColdPull(self._planner, waiting, self._is_cold_wanted, self._was_cold)
            self._cold.submit(waiting.group, read)

    def _is_cold_wanted(self, waiting: WaitingPull) -> bool:
        """Say whether it is worth the while to read for a pull, now that its turn has come."""
        if waiting.is_over:
            return False
        if self._loop.time() > max(waiting.until, waiting.asked_at + _COLD_PATIENCE_S):
            self._time_is_up(waiting)
            return False
        return True

    def _was_cold(self, waiting: WaitingPull, found: ColdFound, is_current: bool) -> None:  # noqa: FBT001  # ours
        """Go on with a pull after a thread has read for it."""
        if waiting.is_over:
            return  # its connection is gone: nobody would get what it is handed
        if isinstance(found, PulqueError):
            self._refuse(waiting, found)
        elif found is not None and is_current and not found.is_empty:
            self._end(waiting, found)
        elif found is not None and is_current and found.is_unfinished:
            self._go_on(waiting, found)
        elif not self._try(waiting):
            self._wait(waiting)

    def _go_on(self, waiting: WaitingPull, plan: PullPlan) -> None:
        """Note how far was looked, and have a thread look further when it is its turn again."""
        try:
            self._open(plan)
        except PulqueError as error:
            self._refuse(waiting, error)
            return
        waiting.cold_tries = 0
        self._read_cold(waiting)

    def _refuse(self, waiting: WaitingPull, error: PulqueError) -> None:
        self._end_one(waiting, is_told=True)
        if waiting.whole is not None:
            waiting.whole.let_go()
        waiting.refuse(error)

    # -- doing -------------------------------------------------------------------------------

    def _open(self, plan: PullPlan) -> None:
        """Write down who waits, so that an older incarnation of it is fenced off already.

        Also what its group does not want, so that nobody has to look at that again.
        """
        for fact in plan.facts:
            if isinstance(fact, SubscriptionOpened):
                self._state.record(fact)
        for passed in plan.passed:
            self._state.record(passed)

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
            deliveries += [self._hand_out(new) for new in plan.new]
            for passed in plan.passed:
                self._state.record(passed)
            is_once = self._settle_once(waiting, deliveries)
        except PulqueError as error:
            self._refuse(waiting, error)
            return
        if plan.new:
            self._renew_lease(waiting)
            favoured = plan.favoured if waiting.whole is None else waiting.whole.favoured
            self._turns.served(waiting.group, favoured, self._partitions_of(plan))
        self._end_one(waiting, is_told=waiting.routes_changed or not plan.is_empty)
        states = tuple(self._states(waiting, plan))
        answer = PulledAnswer(
            states, tuple(deliveries), waiting.routes_version, waiting.routes_changed
        )
        if is_once:
            self._sync_facts(lambda error: self._answer_synced(waiting, answer, error))
        else:
            self._answer(waiting, answer)

    def _answer_synced(
        self, waiting: WaitingPull, answer: PulledAnswer, error: PulqueError | None
    ) -> None:
        if error is None:
            self._answer(waiting, answer)
        else:
            waiting.refuse(error)

    def _settle_once(self, waiting: WaitingPull, deliveries: list[Delivered]) -> bool:
        """Settle what is handed out to a group that wants it once; say whether there is any.

        It is the reliable way with the consumer's part left out: whatever becomes of the
        messages, they count as done.
        """
        settings = self._state.groups_settings
        if waiting.group not in settings.once:
            return False
        is_once = False
        for index in {each.index for each in deliveries}:
            partition = self._engine.partition(waiting.request.wanted[index].partition)
            if partition is None:
                continue
            mode = settings.of(waiting.group, subject_of(partition.name)).mode
            found = self._consumption.subscription(partition.id, waiting.group, waiting.consumer)
            if mode is Mode.ONCE and found is not None and found.held:
                is_once = True
                last = PullSequence(found.next_pull - 1)
                at_ms = self._clock.now_ms()
                self._state.record(Settled(found.id, found.settled, last, (), at_ms))
        return is_once

    @staticmethod
    def _partitions_of(plan: PullPlan) -> list[PartitionId]:
        return [new.subscription.partition for new in plan.new]

    def _hand_out(self, new: NewRun) -> Delivered:
        number = (
            new.subscription.id
            if isinstance(new.subscription, Subscription)
            else new.subscription.subscription
        )
        first_pull = self._consumption.subscriptions[number].pull_of(new.first_sequence)
        tenure = self._state.tenure
        self._state.record(
            Pulled(
                number,
                tenure,
                first_pull,
                new.first_sequence,
                new.length,
                self._clock.now_ms(),
                new.matched,
            )
        )
        self.delivered += new.length if new.matched == ALL_OF_THEM else new.matched
        return Delivered(
            new.place, tenure, first_pull, new.first_sequence, new.length, new.buffers
        )

    def _states(self, waiting: WaitingPull, plan: PullPlan) -> Iterator[State]:
        for code, wanted in zip(plan.states, waiting.request.wanted, strict=True):
            yield self._standing(waiting, wanted, code)

    def _standing(self, waiting: WaitingPull, wanted: Wanted, code: ErrorCode) -> State:
        partition = self._engine.partition(wanted.partition)
        found = (
            self._consumption.subscription(partition.id, waiting.group, waiting.consumer)
            if partition is not None
            else None
        )
        if found is None:
            return State(code, PullSequence(0), PullSequence(0))
        return State(code, found.settled, found.next_pull)

    def _plan_nothing(self, waiting: WaitingPull) -> PullPlan:
        plan = PullPlan(0, 0)
        plan.states = [ErrorCode.NONE] * len(waiting.request.wanted)
        return plan

    def _check_waiting(self, request: Pull, owner: object) -> None:
        """Refuse what would have the owner wait for too much at once."""
        if len(request.wanted) <= _FEW_PARTITIONS:
            return
        waited_for = sum(len(each.request.wanted) for each in self._lines.of_owner(owner))
        if waited_for + len(request.wanted) > MAX_WANTED:
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

    def _look_for_unnamed(self, waiting: WaitingPull) -> None:
        """Find out whether there are partitions that a pull covers and does not name."""
        request, places = waiting.request, self._state.places
        known = max(request.routes_version, waiting.routes_version)
        waiting.routes_version = places.version
        covers = [_cover(each) for each in request.covers]
        if known >= places.version:
            return
        named: Collection[str] = {each.partition for each in request.wanted}
        if waiting.whole is not None:
            named = waiting.whole.named
        waiting.routes_changed = waiting.routes_changed or any(
            name not in named
            for pattern in covers
            for name in places.newer(pattern, waiting.group, known)
        )

    def _begin_at_end(self, waiting: WaitingPull) -> None:
        """Write down where a new group starts: at the end of now, not of when it is served.

        A group that is here already starts at the beginning of what came later: the subject of a
        pattern, or the first message of another priority.
        """
        for wanted in waiting.request.wanted:
            name = parse_partition(wanted.partition)
            if owner_of(name) is None:
                partition = self._state.make_partition(name, self._clock.now_ms())
                self._state.record(GroupOpened(partition.id, waiting.group, partition.confirmed))

    def _is_here(self, waiting: WaitingPull) -> bool:
        found = (self._engine.partition(each.partition) for each in waiting.request.wanted)
        return any(
            each is not None and (each.id, waiting.group) in self._consumption.groups
            for each in found
        )

    def _longest_wait_ms(self, request: Pull) -> int:
        """Return how long a pull may wait: with a lock, so that the next one comes in time."""
        if any(wanted.token for wanted in request.wanted):
            return min(self._state.lock_times.lock_ms // _PULLS_PER_LOCK, _LONGEST_WAIT_MS)
        return _LONGEST_WAIT_MS

    def _renew_lease(self, waiting: WaitingPull) -> None:
        now_ms = self._clock.monotonic_ms()
        self._state.leases.renew(waiting.group, waiting.consumer, now_ms)
        for wanted in waiting.request.wanted:
            if wanted.token:
                self._renew_lock(waiting, wanted, now_ms)

    def _renew_lock(self, waiting: WaitingPull, wanted: Wanted, now_ms: int) -> None:
        partition = self._engine.partition(wanted.partition)
        if partition is not None:
            key = (partition.id, waiting.group)
            if self._consumption.locks.is_held_by(key, waiting.consumer, wanted.token):
                self._state.lock_times.renew(key, now_ms)

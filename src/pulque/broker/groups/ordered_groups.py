"""Looking after ordered groups: how far they are, what they wait for, and closing partitions."""

from collections.abc import Callable

from pulque.broker.groups.pull_locks import Locker
from pulque.broker.state import BrokerState
from pulque.clock import Clock
from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    PulqueError,
    UnknownGroupError,
    UnknownSubjectError,
)
from pulque.model.actions import PartitionClosed, Skipped
from pulque.model.names import (
    Group,
    Pattern,
    parse_group,
    parse_partition,
    parse_subject,
)
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.net.steps import Steps, in_slices
from pulque.rules.consumption import Effect
from pulque.rules.locks import NOBODY, can_be_locked
from pulque.serving.commit import Synced
from pulque.storage.logs.partitions import Partition
from pulque.wire.ordered import (
    NO_TOKEN,
    NOT_STUCK,
    Close,
    Closed,
    Ordered,
    OrderedReport,
    OrderedRow,
    Skip,
)
from pulque.wire.ordered import Skipped as SkippedAnswer

__all__ = ["Steward"]

_LOCKS_PER_STEP = 4096
_LONGEST_REASON = 1000
_BY_COMMAND = "skipped by command"


class Steward:
    """Tells how ordered groups stand, and does what is commanded about them.

    Args:
        state: What the broker knows.
        clock: The time.
        locker: Told when a lock is taken away.
        perform: Does what follows from facts.
        sync_facts: Tells when the facts that are recorded by now are on disk.
    """

    def __init__(
        self,
        state: BrokerState,
        clock: Clock,
        locker: Locker,
        *,
        perform: Callable[[Effect], None],
        sync_facts: Callable[[Synced], None],
    ) -> None:
        self._state = state
        self._consumption = state.consumption
        self._locks = state.consumption.locks
        self._clock = clock
        self._locker = locker
        self._perform = perform
        self._sync_facts = sync_facts

    def report(self, request: Ordered) -> Steps[OrderedReport]:
        """Return how far the ordered groups of a subject are.

        Raises:
            InvalidNameError: It names what cannot be.
        """
        subject = parse_subject(request.subject)
        only = parse_group(request.group) if request.group else None
        names = [
            name
            for name in self._state.places.covered(Pattern(subject), None)
            if can_be_locked(name)
        ]
        found = [each for each in map(self._state.engine.partition, names) if each is not None]
        groups = {each.id: [] if only is None else [only] for each in found}
        if only is None:
            yield from self._collect_groups(groups)
        rows: list[OrderedRow] = []
        for pairs in in_slices(
            (each, group) for each in found for group in sorted(groups[each.id])
        ):
            rows += [self._row(partition, group) for partition, group in pairs]
            yield
        return OrderedReport(tuple(rows))

    def skip(
        self,
        request: Skip,
        answer: Callable[[SkippedAnswer], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Make a dead letter of the message that a group waits for.

        Raises:
            RejectedError: The group does not wait for that one.
        """
        group, partition = parse_group(request.group), self._partition(request.partition)
        key = (partition.id, group)
        lock = self._locks.by_key.get(key)
        if lock is None or not lock.is_exclusive:
            raise UnknownGroupError(
                f"no consumer of an ordered group {group} ever had {partition.name} here"
            )
        settled = self._settled(partition, group)
        if request.sequence != settled or settled >= partition.confirmed:
            waits = f"waits for {settled}" if settled < partition.confirmed else "waits for none"
            raise NotAllowedError(
                f"group {group} {waits} in {partition.name}, not for {request.sequence}: only the "
                "first message that is not settled can be skipped"
            )
        reason = request.reason[:_LONGEST_REASON] or _BY_COMMAND
        holder = lock.holder
        sequence = ConsumeSequence(settled)
        for effect in self._state.record(Skipped(*key, sequence, self._clock.now_ms(), reason)):
            self._perform(effect)
        self._locker.vacated(key, holder)

        def synced(error: PulqueError | None) -> None:
            if error is None:
                answer(SkippedAnswer(settled + 1))
            else:
                refuse(error)

        self._sync_facts(synced)

    def close(
        self,
        request: Close,
        answer: Callable[[Closed], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Have a partition take no more sends.

        Raises:
            InvalidRequestError: It is one that is not sent to.
        """
        name = parse_partition(request.partition)
        if not can_be_locked(name):
            raise InvalidRequestError(f"{name} is no partition that can be split or merged")
        partition = self._state.make_partition(name, self._clock.now_ms())
        if partition.id not in self._locks.closed:
            self._state.record(PartitionClosed(partition.id, self._clock.now_ms()))

        def synced(error: PulqueError | None) -> None:
            if error is None:
                answer(Closed(partition.end))
            else:
                refuse(error)

        self._sync_facts(synced)

    def _collect_groups(self, found: dict[PartitionId, list[Group]]) -> Steps[None]:
        """Add the ordered groups of each of these partitions."""
        # In one pass: locks are many where partitions are.
        for some in in_slices(list(self._locks.by_key), _LOCKS_PER_STEP):
            for place, group in some:
                lock = self._locks.by_key.get((place, group))
                if place in found and lock is not None and lock.is_exclusive:
                    found[place].append(group)
            yield

    def _row(self, partition: Partition, group: Group) -> OrderedRow:
        key = (partition.id, group)
        lock = self._locks.by_key.get(key)
        holder = NOBODY if lock is None else lock.holder
        held = [each for each in self._consumption.consumers_of(*key) if each.held]
        left_ms = self._state.lock_times.left_ms(key, self._clock.monotonic_ms())
        return OrderedRow(
            partition.name,
            group,
            partition.id in self._locks.closed,
            self._settled(partition, group),
            partition.start,
            partition.end,
            sum(each.held_count for each in held),
            NO_TOKEN if lock is None else lock.token,
            holder,
            left_ms if holder else 0,
            min((each.since_ms for each in held), default=NOT_STUCK),
        )

    def _settled(self, partition: Partition, group: Group) -> ConsumeSequence:
        """Return the first message that a group has not settled."""
        key = (partition.id, group)
        state = self._consumption.groups.get(key)
        first = partition.start if state is None else max(state.next_sequence, partition.start)
        held = (each.held[0] for each in self._consumption.consumers_of(*key) if each.held)
        return ConsumeSequence(min((first, *(each.first_sequence for each in held))))

    def _partition(self, name: str) -> Partition:
        found = self._state.engine.partition(parse_partition(name))
        if found is None:
            raise UnknownSubjectError(f"there is no partition {name} here")
        return found

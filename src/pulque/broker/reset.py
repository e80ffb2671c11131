"""Reset → GroupReset: a group goes on from another place; and where all groups are.

The facts are on disk before the answer. Where an instant lies is looked up off the event loop.

The retries of a group are not re-read: what was retried came again by itself. A reset that skips
messages by time, or to the end, skips those that stand in the retry partitions, too.
"""

import asyncio
from collections.abc import Callable, Iterator

from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import (
    InvalidRequestError,
    PulqueError,
    UnknownGroupError,
    UnknownSubjectError,
)
from pulque.model.actions import GroupReset
from pulque.model.groups import Start, StartKind
from pulque.model.names import (
    Group,
    Pattern,
    Subject,
    is_retry,
    level_of,
    level_partition,
    owner_of,
    parse_owner,
    parse_partition,
    parse_pattern,
    patterns_of,
    subject_of,
)
from pulque.model.positions import ConsumeSequence
from pulque.serving.commit import Committer
from pulque.storage.partitions import Partition
from pulque.wire.requests import Groups, Reset
from pulque.wire.resets import UNHEARD, GroupConsumer, GroupPosition, ResetRow
from pulque.wire.responses import GroupsReport, ResetDone

__all__ = ["Resetter"]

_MOST_POSITIONS = 10_000
_MOST_CONSUMERS = 1000
_GROUPS_TOLD = 10
Targets = dict[Partition, ConsumeSequence]
"""Where a group goes on, by partition."""


class Resetter:
    """Sets groups to other places, and tells where they are."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        *,
        wake: Callable[[list[Partition]], None],
    ) -> None:
        self._state = state
        self._engine = state.engine
        self._consumption = state.consumption
        self._committer = committer
        self._clock = around.clock
        self._executor = around.executor
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    # -- resets ------------------------------------------------------------------------------

    def reset(
        self,
        request: Reset,
        answer: Callable[[ResetDone], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Set a group to another place, and answer when that is on disk.

        Raises:
            RejectedError: There is no such group, subject or place.
        """
        group, pattern = parse_owner(request.group), parse_pattern(request.subject)
        partitions = self._partitions(pattern, group, request.partition)
        self._check_group(group, pattern)
        _check_target(request, partitions)

        def finish(targets: Targets) -> None:
            rows = tuple(self._row(group, each, target) for each, target in targets.items())
            if request.is_dry_run:
                answer(ResetDone(rows))
                return
            self._record(group, targets)

            def synced(error: PulqueError | None) -> None:
                if error is None:
                    answer(ResetDone(rows))
                else:
                    refuse(error)

            self._committer.sync_facts(synced)
            self._wake(list(targets))

        if request.target.kind is not StartKind.TIME:
            finish(self._targets(group, partitions, request))
            return

        def done(future: "asyncio.Future[Targets]") -> None:
            try:
                finish(future.result())
            except PulqueError as error:
                refuse(error)

        # It reads what the loop may change: positions move, but none of it makes it fail.
        self._loop.run_in_executor(
            self._executor, self._targets, group, partitions, request
        ).add_done_callback(done)

    def _partitions(self, pattern: Pattern, group: Group, only: str) -> list[Partition]:
        names = self._state.places.covered(pattern, group)
        found = [each for each in map(self._engine.partition, names) if each is not None]
        if not any(owner_of(each.name) is None for each in found):
            raise UnknownSubjectError(f"no message was ever sent to {pattern} here")
        if not only:
            return found
        name = parse_partition(only)
        chosen = [each for each in found if each.name == name]
        if not chosen:
            names_found = ", ".join(each.name for each in found[:_GROUPS_TOLD])
            raise UnknownSubjectError(
                f"{name} is no partition of {pattern} for group {group}; there are {names_found}"
            )
        return chosen

    def _check_group(self, group: Group, pattern: Pattern) -> None:
        """Refuse a group that was never at the subject: it is probably misspelled."""
        groups = self._consumption.groups
        covered = map(self._engine.partition, self._state.places.covered(pattern, group))
        if any(each is not None and (each.id, group) in groups for each in covered):
            return
        others: dict[Group, None] = {}
        for number, each in groups:
            name = self._engine.partitions.by_id[number].name
            if pattern in patterns_of(subject_of(name)):
                others[each] = None
        known = ", ".join(list(others)[:_GROUPS_TOLD]) or "none"
        raise UnknownGroupError(
            f"group {group} never consumed {pattern} here; groups that did: {known}"
        )

    def _targets(self, group: Group, partitions: list[Partition], request: Reset) -> Targets:
        """Return where the group goes on, in the partitions that the reset is about."""
        targets: Targets = {}
        if request.partition:
            return {each: self._place(each, request.target) for each in partitions}
        for each in partitions:
            if not is_retry(each.name):
                targets[each] = self._place(each, request.target)
        for each in partitions:
            if is_retry(each.name) and self._skips_retries(group, each, request.target, targets):
                place = self._place(each, request.target)
                if place > self._position(group, each):
                    targets[each] = place
        return targets

    def _skips_retries(
        self, group: Group, retries: Partition, target: Start, targets: Targets
    ) -> bool:
        """Say whether a reset skips what was sent to the partition that retries belong to."""
        if target.kind is not StartKind.TIME:
            return target.kind is StartKind.LATEST
        subject = Subject(subject_of(retries.name))
        origin = self._engine.partition(level_partition(subject, level_of(retries.name)))
        if origin is None or origin not in targets:
            return False
        return targets[origin] > self._position(group, origin)

    def _place(self, partition: Partition, target: Start) -> ConsumeSequence:
        match target.kind:
            case StartKind.EARLIEST:
                return partition.start
            case StartKind.LATEST:
                return partition.confirmed
            case StartKind.TIME:
                return self._engine.at_time(partition, target.value)
            case StartKind.SEQUENCE:
                clipped = min(max(target.value, partition.start), partition.confirmed)
                return ConsumeSequence(clipped)

    def _position(self, group: Group, partition: Partition) -> ConsumeSequence:
        state = self._consumption.groups.get((partition.id, group))
        return partition.start if state is None else state.next_sequence

    def _row(self, group: Group, partition: Partition, target: ConsumeSequence) -> ResetRow:
        held = sum(each.held_count for each in self._consumption.consumers_of(partition.id, group))
        return ResetRow(
            partition.name,
            self._position(group, partition),
            target,
            partition.start,
            partition.confirmed,
            held,
        )

    def _record(self, group: Group, targets: Targets) -> None:
        now_ms = self._clock.now_ms()
        for partition, target in targets.items():
            self._state.record(GroupReset(partition.id, group, target, now_ms))

    # -- where groups are --------------------------------------------------------------------

    def groups(self, request: Groups) -> GroupsReport:
        """Say where groups are, and what their consumers hold."""
        pattern = parse_pattern(request.subject) if request.subject else None
        group = parse_owner(request.group) if request.group else None
        found: list[GroupPosition] = []
        for position in self._positions(pattern, group):
            if len(found) == _MOST_POSITIONS:
                return GroupsReport(tuple(found), is_cut=True)
            found.append(position)
        return GroupsReport(tuple(found))

    def _positions(self, pattern: Pattern | None, group: Group | None) -> Iterator[GroupPosition]:
        now_ms = self._clock.monotonic_ms()
        leases, settings = self._state.leases, self._state.groups_settings
        for (number, each), state in self._consumption.groups.items():
            if group is not None and each != group:
                continue
            partition = self._engine.partitions.by_id[number]
            subject = subject_of(partition.name)
            if pattern is not None and pattern not in patterns_of(subject):
                continue
            consumers = [
                GroupConsumer(
                    one.consumer,
                    one.held_count,
                    _or_unheard(leases.silent_ms(each, one.consumer, now_ms)),
                )
                for one in self._consumption.consumers_of(number, each)
            ]
            yield GroupPosition(
                partition.name,
                each,
                settings.of(each, subject).mode,
                state.next_sequence,
                partition.start,
                partition.confirmed,
                state.pending_count,
                tuple(consumers[:_MOST_CONSUMERS]),
            )


def _check_target(request: Reset, partitions: list[Partition]) -> None:
    if request.target.kind is not StartKind.SEQUENCE or request.partition:
        return
    names = [each.name for each in partitions if not is_retry(each.name)]
    if len(names) > 1:
        raise InvalidRequestError(
            f"sequence {request.target.value} of which partition? {request.subject} has "
            f"{len(names)}, such as {', '.join(names[:_GROUPS_TOLD])}: name the partition"
        )


def _or_unheard(silent_ms: int | None) -> int:
    return UNHEARD if silent_ms is None else silent_ms

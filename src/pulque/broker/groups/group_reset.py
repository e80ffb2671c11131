"""Reset → GroupReset: a group goes on from another place; and where all groups are.

The facts are on disk before the answer. Where an instant lies is looked up off the event loop.

The retries of a group are not re-read: what was retried came again by itself. A reset that skips
messages by time, or to the end, skips those that stand in the retry partitions, too.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import cast

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
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.net.server import Work
from pulque.net.steps import Steps, in_slices
from pulque.rules.consumption import GroupKey
from pulque.serving.commit import Committer
from pulque.storage.logs.partitions import Partition
from pulque.wire.codec import Writer
from pulque.wire.opcodes import Opcode
from pulque.wire.requests import Groups, Reset
from pulque.wire.resets import UNHEARD, GroupConsumer, GroupPosition, ResetRow
from pulque.wire.responses import GroupsReport, ResetDone

__all__ = ["Resetter"]

_MOST_POSITIONS = 10_000
_MOST_CONSUMERS = 1000
_GROUPS_TOLD = 10
_KEYS_PER_STEP = 4096
_RECORDED_PER_STEP = 32
"""A fact costs many times what a look at a row does."""
Answer = Callable[[Opcode, Writer], None]
"""Takes an answer that was written in steps."""
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
        answer: Answer,
        refuse: Callable[[PulqueError], None],
        go_on: Callable[[Work], None],
    ) -> Work:
        """Set a group to another place, and answer when that is on disk.

        In steps, a few partitions at a time: a broker may have very many of them.

        Args:
            request: Which group, and where to.
            answer: Takes the answer.
            refuse: Takes what went wrong after the steps that are returned.
            go_on: Takes steps that follow when the disk was asked.

        Raises:
            RejectedError: There is no such group, subject or place.
        """
        group, pattern = parse_owner(request.group), parse_pattern(request.subject)
        partitions = yield from self._partitions(pattern, group, request.partition)
        yield from self._check_group(group, pattern)
        _check_target(request, partitions)

        if request.target.kind is not StartKind.TIME:
            targets = yield from self._targets(group, partitions, request)
            yield from self._finish(request, group, targets, answer, refuse)
            return

        def done(future: "asyncio.Future[Targets]") -> None:
            try:
                found = future.result()
            except PulqueError as error:
                refuse(error)
            else:
                go_on(self._finish(request, group, found, answer, refuse))

        # It reads what the loop may change: positions move, but none of it makes it fail.
        self._loop.run_in_executor(
            self._executor, _outcome_of, self._targets(group, partitions, request)
        ).add_done_callback(done)

    def _finish(
        self,
        request: Reset,
        group: Group,
        targets: Targets,
        answer: Answer,
        refuse: Callable[[PulqueError], None],
    ) -> Work:
        """Record where the group goes on, and answer."""
        payload = Writer()
        payload.count(len(targets))
        for some in in_slices(targets.items(), _RECORDED_PER_STEP):
            now_ms = self._clock.now_ms()
            rows = Writer()
            for partition, target in some:
                ResetDone.write_row(self._row(group, partition, target), rows)
                if not request.is_dry_run:
                    self._state.record(GroupReset(partition.id, group, target, now_ms))
            payload.parts.append(rows.join())
            if not request.is_dry_run:
                self._wake([partition for partition, _ in some])
            yield
        if request.is_dry_run:
            answer(Opcode.RESET, payload)
            return

        def synced(error: PulqueError | None) -> None:
            if error is None:
                answer(Opcode.RESET, payload)
            else:
                refuse(error)

        self._committer.sync_facts(synced)

    def _partitions(self, pattern: Pattern, group: Group, only: str) -> Steps[list[Partition]]:
        found: list[Partition] = []
        is_sent_to = False
        for some in in_slices(self._state.places.covered(pattern, group)):
            for each in map(self._engine.partition, some):
                if each is not None:
                    found.append(each)
                    is_sent_to = is_sent_to or owner_of(each.name) is None
            yield
        if not is_sent_to:
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

    def _check_group(self, group: Group, pattern: Pattern) -> Work:
        """Refuse a group that was never at the subject: it is probably misspelled."""
        groups, covered = self._consumption.groups, set[PartitionId]()
        for some in in_slices(self._state.places.covered(pattern, group)):
            ids = [each.id for each in map(self._engine.partition, some) if each is not None]
            if any((number, group) in groups for number in ids):
                return
            covered.update(ids)
            yield
        others: dict[Group, None] = {}
        for keys in in_slices(list(groups), _KEYS_PER_STEP):
            others.update((each, None) for number, each in keys if number in covered)
            if len(others) >= _GROUPS_TOLD:
                break
            yield
        known = ", ".join(list(others)[:_GROUPS_TOLD]) or "none"
        raise UnknownGroupError(
            f"group {group} never consumed {pattern} here; groups that did: {known}"
        )

    def _targets(
        self, group: Group, partitions: list[Partition], request: Reset
    ) -> Steps[Targets]:
        """Return where the group goes on, in the partitions that the reset is about."""
        targets: Targets = {}
        for some in in_slices(partitions):
            for each in some:
                if request.partition or not is_retry(each.name):
                    targets[each] = self._place(each, request.target)
            yield
        if request.partition:
            return targets
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

    # -- where groups are --------------------------------------------------------------------

    def groups(self, request: Groups, answer: Answer) -> Work:
        """Answer where groups are, and what their consumers hold.

        In steps: a message that moves on meanwhile, from a subject to the group's retries, may
        be counted twice, but is not missed, as a group is at a subject before it has retries.
        """
        pattern = parse_pattern(request.subject) if request.subject else None
        group = parse_owner(request.group) if request.group else None
        rows: list[bytes] = []
        count = 0
        for keys in in_slices(list(self._consumption.groups), _KEYS_PER_STEP):
            chosen = keys if group is None else [key for key in keys if key[1] == group]
            for some in in_slices(chosen):
                # Bytes at once: many objects that live for long make the garbage collector stop
                # the broker to look at all there are.
                found = list(islice(self._positions(some, pattern), _MOST_POSITIONS + 1 - count))
                written = Writer()
                for each in found[: _MOST_POSITIONS - count]:
                    GroupsReport.write_position(each, written)
                rows.append(written.join())
                count += len(found)
                if count > _MOST_POSITIONS:
                    answer(Opcode.GROUPS, _groups_payload(_MOST_POSITIONS, rows, is_cut=True))
                    return
                yield
            yield
        answer(Opcode.GROUPS, _groups_payload(count, rows, is_cut=False))

    def _positions(self, keys: list[GroupKey], pattern: Pattern | None) -> Iterator[GroupPosition]:
        now_ms = self._clock.monotonic_ms()
        leases, settings = self._state.leases, self._state.groups_settings
        for key in keys:
            state = self._consumption.groups.get(key)
            if state is None:
                continue
            number, each = key
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


def _groups_payload(count: int, rows: list[bytes], *, is_cut: bool) -> Writer:
    payload = Writer()
    payload.count(count)
    payload.parts += rows
    GroupsReport.write_end(payload, is_cut=is_cut)
    return payload


def _outcome_of(steps: Steps[Targets]) -> Targets:
    """Take all steps, in a thread."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("Targets", end.value)


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

"""Subscribe → GroupConfigured and GroupOpened: what a group wants, and where it starts.

All facts are on disk before the answer. Where a new group starts is decided for every partition
that exists, here and now; what comes into being later is read from its start.
"""

import asyncio
from collections.abc import Callable, Collection

from pulque.broker.groups.pull_locks import Locker
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    PulqueError,
    UnknownGroupError,
    UsageError,
)
from pulque.model.actions import GroupConfigured, GroupOpened
from pulque.model.groups import (
    MAX_DELAYS,
    Filter,
    GroupSettings,
    Mode,
    RetrySettings,
    Start,
    StartKind,
    tag_filter,
)
from pulque.model.names import (
    ConsumerId,
    Group,
    Pattern,
    broadcast_group,
    parse_consumer_id,
    parse_group,
    parse_owner,
    parse_pattern,
)
from pulque.model.positions import ConsumeSequence
from pulque.rules.consumption import check_incarnation
from pulque.rules.groups import agreed, changed, check_order
from pulque.rules.locks import LockKey
from pulque.serving.commit import Committer
from pulque.storage.logs.partitions import Partition
from pulque.wire.groups import Subscription
from pulque.wire.requests import ChangeGroup, Subscribe, Subscriptions
from pulque.wire.responses import GroupChanged, Subscribed, SubscriptionsListed

__all__ = ["GroupRegistrar"]

_ANY_JITTER = 100
_MOST_LISTED = 500
"""With all the tags and delays that one may have, an answer of so many still fits a frame."""
Opening = tuple[Partition, ConsumeSequence]


class GroupRegistrar:
    """Takes in what groups want."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        dismiss: Callable[[Collection[tuple[Group, ConsumerId]]], None],
        locker: Locker,
    ) -> None:
        self._state = state
        self._answer_waiting = dismiss
        """Answers the waiting pulls of consumers, with nothing."""
        self._locker = locker
        self._clock = around.clock
        self._engine = state.engine
        self._committer = committer
        self._executor = around.executor
        self._loop = asyncio.get_running_loop()

    def subscribe(
        self,
        request: Subscribe,
        answer: Callable[[Subscribed], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Record what a group wants, and answer when that is on disk.

        Raises:
            RejectedError: It cannot be, or the group told otherwise before.
        """
        consumer = parse_consumer_id(request.consumer)
        group = _group_of(request, consumer)
        subject = parse_pattern(request.subject)
        asked = GroupSettings(
            request.mode, _checked_filter(request.filter), _checked_retry(request.retry)
        )
        for subscription in self._state.consumption.subscriptions_of(group, consumer):
            check_incarnation(subscription, request.incarnation)
        fact = self._agreed(asked, group, subject)

        def finish(openings: list[Opening]) -> None:
            # Another consumer may have come first while the disk was asked.
            fact = self._agreed(asked, group, subject)
            self._record(group, openings, fact)
            self._state.outdated.discard((group, consumer))
            settings = self._recorded(group, subject) or asked

            def synced(error: PulqueError | None) -> None:
                if error is None:
                    answer(Subscribed(group, *settings))
                else:
                    refuse(error)

            # Also if it is known already: somebody else said it perhaps a moment ago.
            self._committer.sync_facts(synced)

        is_new = fact is not None and self._recorded(group, subject) is None
        if not is_new:
            finish([])
        elif request.start.kind is StartKind.TIME:
            self._ask_disk(lambda: self._openings(group, subject, request.start), finish, refuse)
        else:
            finish(self._openings(group, subject, request.start))

    def change(
        self,
        request: ChangeGroup,
        answer: Callable[[GroupChanged], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Change on purpose what a group said, and answer when that is on disk.

        A consumer that subscribed before would throw away what only the new filter wants, so it
        gets nothing more until it subscribes anew.

        Raises:
            RejectedError: It cannot be.
        """
        group, subject = parse_group(request.group), parse_pattern(request.subject)
        recorded = self._recorded(group, subject)
        if recorded is None:
            raise UnknownGroupError(f"group {group} never subscribed to {subject} here")
        mode = request.mode if request.has_mode else recorded.mode
        wanted = _checked_filter(request.filter) if request.has_filter else recorded.filter
        settings = GroupSettings(mode, wanted, _checked_retry(request.retry))
        if mode != recorded.mode:
            self._check_switch(mode, group, subject)
        fact = changed(recorded, settings, group, subject)
        if fact is not None:
            self._end_order(group, subject, recorded.mode, mode)
            self._state.record(fact)
            if fact.settings[:2] != recorded[:2]:
                self._dismiss(group)
        told = recorded if fact is None else fact.settings

        def synced(error: PulqueError | None) -> None:
            if error is None:
                answer(GroupChanged(*told))
            else:
                refuse(error)

        self._committer.sync_facts(synced)

    def subscriptions(self, request: Subscriptions) -> SubscriptionsListed:
        """Say what groups said, in the order of their names and of what they said it about."""
        group = parse_owner(request.group) if request.group else None
        said, after = self._state.groups_settings, (request.after_group, request.after_subject)
        names = sorted(name for name in said if name > after and group in (None, name[0]))
        rows = (
            Subscription(*name, settings)
            for name in names[: min(request.most, _MOST_LISTED)]
            if (settings := said.recorded(*name)) is not None
        )
        return SubscriptionsListed(tuple(rows))

    def _check_switch(self, mode: Mode, group: Group, subject: Pattern) -> None:
        """Refuse to switch the mode while consumers hold messages, or to a broadcast at all."""
        check_order(self._state.groups_settings, mode, group, subject)
        if mode is Mode.BROADCAST:
            raise NotAllowedError(
                f"group {group} cannot be switched to broadcast: a broadcast consumer is a group "
                "of its own and needs no other"
            )
        covered = set(self._state.places.covered(subject, group))
        partitions = self._engine.partitions.by_id
        locks, now_ms = self._state.consumption.locks, self._clock.monotonic_ms()
        mine = self._locks_of(group, subject)
        for key in mine:
            holder = locks.by_key[key].holder
            if holder and self._state.lock_times.left_ms(key, now_ms):
                raise NotAllowedError(
                    f"consumer {holder} of group {group} has the lock of "
                    f"{partitions[key[0]].name}: stop the group's consumers, then switch its mode"
                )
        for each in self._state.consumption.subscriptions.values():
            if (each.partition, group) in mine:
                continue
            if each.group == group and each.held and partitions[each.partition].name in covered:
                raise NotAllowedError(
                    f"consumer {each.consumer} of group {group} holds {each.held_count} messages "
                    f"of {subject}: stop the group's consumers, then switch its mode"
                )

    def _end_order(self, group: Group, subject: Pattern, before: Mode, after: Mode) -> None:
        """Have partitions belong to nobody, if a group is no ordered one any more."""
        if before is Mode.ORDERED and after is not Mode.ORDERED:
            for key in self._locks_of(group, subject):
                self._locker.release(key, is_end=True)

    def _locks_of(self, group: Group, subject: Pattern) -> set[LockKey]:
        """Return the partitions that consumers of an ordered group have, or had."""
        found = map(self._engine.partition, self._state.places.covered(subject, None))
        keys = {(each.id, group) for each in found if each is not None}
        return {key for key in keys if self._state.consumption.locks.is_exclusive(key)}

    def _dismiss(self, group: Group) -> None:
        """Have all consumers of a group subscribe anew before they get anything more."""
        consumers = self._state.leases.of_group(group)
        self._state.outdated.update((group, consumer) for consumer in consumers)
        self._answer_waiting([(group, consumer) for consumer in consumers])

    def _recorded(self, group: Group, subject: Pattern) -> GroupSettings | None:
        return self._state.groups_settings.recorded(group, subject)

    def _agreed(
        self, asked: GroupSettings, group: Group, subject: Pattern
    ) -> GroupConfigured | None:
        fact = agreed(self._recorded(group, subject), asked, group, subject)
        check_order(self._state.groups_settings, asked.mode, group, subject)
        return fact

    def _openings(self, group: Group, subject: Pattern, start: Start) -> list[Opening]:
        """Return where the group starts in the partitions that it was never at."""
        groups = self._state.consumption.groups
        found = map(self._engine.partition, self._state.places.covered(subject, None))
        return [
            (partition, self._first(partition, start))
            for partition in found
            if partition is not None and (partition.id, group) not in groups
        ]

    def _first(self, partition: Partition, start: Start) -> ConsumeSequence:
        match start.kind:
            case StartKind.EARLIEST:
                return partition.start
            case StartKind.LATEST:
                return partition.confirmed
            case StartKind.TIME:
                return self._engine.at_time(partition, start.value)
            case StartKind.SEQUENCE:
                clipped = min(max(start.value, partition.start), partition.confirmed)
                return ConsumeSequence(clipped)

    def _record(self, group: Group, openings: list[Opening], fact: GroupConfigured | None) -> None:
        """Write the facts. The settings come last: with them, the start is no longer open."""
        for partition, sequence in openings:
            if (partition.id, group) not in self._state.consumption.groups:
                self._state.record(GroupOpened(partition.id, group, sequence))
        if fact is not None:
            self._state.record(fact)

    def _ask_disk(
        self,
        work: Callable[[], list[Opening]],
        finish: Callable[[list[Opening]], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        def done(future: "asyncio.Future[list[Opening]]") -> None:
            try:
                finish(future.result())
            except PulqueError as error:
                refuse(error)

        self._loop.run_in_executor(self._executor, work).add_done_callback(done)


def _group_of(request: Subscribe, consumer: ConsumerId) -> Group:
    if request.mode is Mode.BROADCAST:
        return broadcast_group(consumer)
    if not request.group:
        raise InvalidRequestError(
            f"mode {request.mode.name.lower()} needs a group; only a broadcast consumer has none"
        )
    return parse_group(request.group)


def _checked_filter(asked: Filter) -> Filter:
    try:
        return tag_filter(asked.any_of, asked.all_of)
    except UsageError as error:
        raise InvalidRequestError(f"the filter is not allowed: {error}") from None


def _checked_retry(asked: RetrySettings) -> RetrySettings:
    if len(asked.delays_ms) > MAX_DELAYS:
        raise InvalidRequestError(
            f"{len(asked.delays_ms)} delays of retries; at most {MAX_DELAYS} are allowed"
        )
    if asked.names_jitter and asked.jitter_percent > _ANY_JITTER:
        raise InvalidRequestError(
            f"a jitter of {asked.jitter_percent} %; 0 to {_ANY_JITTER} are allowed"
        )
    return asked

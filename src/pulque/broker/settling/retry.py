"""Redeliver → another attempt, now or later, or a dead letter.

Single messages are taken out of their batches in a worker thread, packed anew with their next
attempt, and appended like any other batch: to the group's retry partition, to its waiting one
with a due time, or to its dead letters. Until that is in the log the redelivery is pending and
part of every checkpoint; each record names its origin, so that a replay performs only those that
the log does not have yet.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import NamedTuple

from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.settling.message_extraction import (
    Extractor,
    Packing,
    RepackedBatch,
    Unreadable,
    Withheld,
    unreadable_message,
    withheld_of,
)
from pulque.broker.settling.unreadable_batches import UnreadableLetters
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import InvalidBatchError, StorageError
from pulque.model.groups import EVERYTHING, Filter
from pulque.model.message import Message, StoredBatch, check_message
from pulque.model.names import (
    Group,
    PartitionName,
    Subject,
    dead_partition,
    is_dead,
    level_of,
    owner_of,
    retry_partition,
    subject_of,
    wait_partition,
)
from pulque.model.pack import ONCE_HEADER
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.adoption import is_adoption
from pulque.rules.consumption import Redeliver, Redelivery
from pulque.rules.groups import GroupsSettings
from pulque.rules.retry import (
    DEAD_HEADER,
    DUE_HEADER,
    FAILED_HEADER,
    FIRST_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    UNREADABLE_HEADER,
    DeadLetter,
    FailedDelivery,
    RetryLater,
    RetryNow,
    RetryRules,
    decide,
    parse_position,
    parse_sequences,
)
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.partitions import Partition

__all__ = [
    "Policies",
    "PolicyOf",
    "Redeliverer",
    "RetryOrigin",
    "add_decided",
    "headers_after",
    "origins_of",
]

PolicyOf = Callable[[Group, Subject], RetryRules]
"""Says which policy a group has for a subject."""

_MOST_MESSAGES = 500
_TRY_AGAIN_S = 5.0
"""So long messages wait that cannot be read."""
_MOST_FAILURES = 20
_LONGEST_FAILURE = 300
_OURS = "pulque."


class Policies:
    """The policies in force: what a group says, and the broker's settings for the rest.

    Args:
        settings: What groups told.
        usual: For what they did not tell.
        longest_delay_ms: No message waits for longer.
    """

    def __init__(self, settings: GroupsSettings, usual: RetryRules, longest_delay_ms: int) -> None:
        self._settings = settings
        self._usual = usual
        self._longest_delay_ms = longest_delay_ms

    def policy_of(self, group: Group, subject: Subject) -> RetryRules:
        """Return what holds for a group and a subject. May be called from any thread."""
        told, usual = self._settings.of(group, subject).retry, self._usual
        delays_ms = told.delays_ms or usual.delays_ms
        return RetryRules(
            tuple(min(delay, self._longest_delay_ms) for delay in delays_ms),
            told.jitter_percent / 100 if told.names_jitter else usual.jitter,
            told.max_attempts or usual.max_attempts,
        )


class RetryOrigin(NamedTuple):
    """Which stored message a record of a group's partitions follows."""

    partition: PartitionName
    sequence: ConsumeSequence
    due_ms: int
    """When it was due, if it waited; else 0."""
    at: int
    """Which message of its batch the record is."""
    adopted: str = ""
    """The name of the adoption, if it was taken over from another broker."""


_ELSEWHERE = PartitionName("")


def origins_of(partition: PartitionName, batch: bytes) -> Iterator[RetryOrigin]:
    """Yield which messages those of a stored batch follow, in a partition that a group owns."""
    stored = StoredBatch(
        batch, partition=partition, first_sequence=ConsumeSequence(0), stored_at_ms=0
    )
    for i in range(len(stored)):
        headers = Message(stored, i).headers
        text = headers.get(ORIGIN_HEADER, "")
        found = parse_position(text)
        if is_adoption(text):
            yield RetryOrigin(_ELSEWHERE, ConsumeSequence(0), 0, i, text)
        elif found is not None and UNREADABLE_HEADER in headers:
            for sequence in parse_sequences(headers[UNREADABLE_HEADER]):
                yield RetryOrigin(found[0], sequence, 0, i)
        elif found is not None:
            yield RetryOrigin(*found, int(headers.get(DUE_HEADER, 0)), i)


class _Found(NamedTuple):
    """What became of messages that are to be redelivered."""

    batches: list[RepackedBatch]
    missing: list[ConsumeSequence]
    """Not stored any more."""
    dropped: list[ConsumeSequence]
    """Not wanted any more."""
    withheld: list[ConsumeSequence]
    """Not readable now."""
    problem: str


class Redeliverer:
    """Performs redeliveries. Groups take turns, so that none waits for all of another's."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        appender: Appender,
        policy_of: PolicyOf,
        *,
        waits: Callable[[], None],
        max_message: int,
    ) -> None:
        self._engine = state.engine
        self._letters = UnreadableLetters(max_message)
        self._consumption = state.consumption
        self._schedule = state.schedule
        self._extractor = Extractor(state.engine)
        self._appender = appender
        self._policy_of = policy_of
        self._waits = waits
        """Called when something was put into a waiting partition."""
        self._clock = around.clock
        self._executor = around.executor
        self._warn = around.warn
        self._todo: dict[tuple[PartitionId, Group], deque[Redelivery]] = {}
        self._has_work = asyncio.Event()
        self.redelivered = 0
        self.died = 0

    def perform(self, effect: Redeliver) -> None:
        """Begin a redelivery."""
        todo = self._todo.setdefault((effect.partition, effect.group), deque())
        todo.extend(effect.redeliveries)
        self._has_work.set()

    async def run(self) -> None:
        """Perform redeliveries until cancelled."""
        while True:
            while self._todo:
                await self._take_turn()
            self._has_work.clear()
            await self._has_work.wait()

    async def _take_turn(self) -> None:
        """Perform some redeliveries of the group whose turn it is."""
        key = next(iter(self._todo))
        todo = self._todo.pop(key)
        some: dict[ConsumeSequence, Redelivery] = {}
        while todo and todo[0].length == 1 and len(some) < _MOST_MESSAGES:
            each = todo.popleft()
            some[each.sequence] = each
        ranged = None if some or not todo else todo.popleft()
        if todo:
            self._todo[key] = todo  # at the end
        if ranged is not None:
            await self._narrow(*key, ranged)
        else:
            await self._redeliver(*key, some)

    async def _narrow(self, source: PartitionId, group: Group, ranged: Redelivery) -> None:
        """Find out which messages of a range the group wants, as many as one turn can take."""
        partition = self._engine.partitions.by_id[source]
        loop = asyncio.get_running_loop()
        wishes = self._wishes(partition, group)
        try:
            examined, wanted = await loop.run_in_executor(
                self._executor,
                partial(self._extractor.wanted, partition, ranged.sequence, ranged.end, wishes),
            )
        except StorageError:
            # Whatever cannot be read holds up itself alone: each message is looked at by itself.
            examined, wanted = self._extractor.wanted(
                partition, ranged.sequence, ranged.end, EVERYTHING
            )
        found = self._consumption.narrowed(source, group, ranged, examined, wanted)
        self.perform(Redeliver(source, group, tuple(found)))

    async def _redeliver(
        self, source: PartitionId, group: Group, wanted: Mapping[ConsumeSequence, Redelivery]
    ) -> None:
        partition = self._engine.partitions.by_id[source]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self._pack, partition, group, wanted)
        for packed in found.batches:
            await self._append(source, group, packed)
        if found.dropped:
            self._consumption.redelivered(source, group, found.dropped)
        if found.missing:
            self._warn(
                "redelivery_impossible", partition=partition.name, sequences=found.missing[:10]
            )
            self._consumption.redelivered(source, group, found.missing)
        if found.withheld:
            later = [wanted[each] for each in found.withheld]
            self._warn(
                "redelivery_delayed",
                partition=partition.name,
                messages=len(later),
                reason=found.problem,
            )
            # Nobody waits for them: only another broker may be able to read them.
            loop.call_later(_TRY_AGAIN_S, self.perform, Redeliver(source, group, tuple(later)))

    async def _append(self, source: PartitionId, group: Group, packed: RepackedBatch) -> None:
        def written(appended: Appended) -> None:
            self._consumption.redelivered(source, group, packed.sequences)
            if packed.due_ms:
                first = appended.entry.first_sequence
                self._schedule.add(appended.partition.id, first, packed.due_ms)
                self._waits()
            elif is_dead(packed.target):
                name = self._engine.partitions.by_id[source].name
                self._letters.written(name, group, packed, appended.entry.first_sequence)
                self.died += len(packed.sequences)
                self._warn("dead_letters", partition=packed.target, messages=len(packed.sequences))
            else:
                self.redelivered += len(packed.sequences)

        await self._appender.append(packed.target, packed.batch, written)

    def _pack(
        self, partition: Partition, group: Group, wanted: Mapping[ConsumeSequence, Redelivery]
    ) -> "_Found":
        """Return batches to be appended, and what becomes of the other messages.

        A filter may have been changed since a message was handed out; and what was sent to be
        delivered once is not delivered again.
        """
        subject = subject_of(partition.name)
        policy = self._policy_of(group, subject)
        wishes = self._wishes(partition, group)
        packing = Packing()
        missing = set(wanted)
        dropped: list[ConsumeSequence] = []
        unreadable: list[Unreadable] = []
        withheld: list[Withheld] = []
        for found in self._extractor.found(partition, sorted(wanted), withheld):
            if isinstance(found, Unreadable):
                unreadable.append(found)
                missing.difference_update(map(ConsumeSequence, range(found.first, found.end)))
                continue
            missing.discard(found.sequence)
            redelivery = wanted[found.sequence]
            try:
                check_message(found)
                if not wishes.matches(found.tags) or ONCE_HEADER in found.headers:
                    dropped.append(found.sequence)
                    continue
                add_decided(
                    packing,
                    found,
                    group,
                    redelivery,
                    policy,
                    headers=headers_after(found, redelivery),
                    now_ms=self._clock.now_ms(),
                )
            except InvalidBatchError as error:
                unreadable.append(unreadable_message(found, str(error)))
        now_ms = self._clock.now_ms()
        letters = self._letters.pack(partition.name, group, unreadable, wanted, now_ms)
        later = withheld_of(missing, withheld)
        missing.difference_update(later)
        problem = str(withheld[0].problem) if withheld else ""
        return _Found(packing.batches() + letters, sorted(missing), dropped, later, problem)

    def _wishes(self, partition: Partition, group: Group) -> Filter:
        """Return what a group wants of a partition; of one of its own, everything."""
        if owner_of(partition.name) is not None:
            return EVERYTHING
        return self._consumption.settings.of(group, subject_of(partition.name)).filter


def add_decided(  # noqa: PLR0913  # a message, and all that decides
    packing: Packing,
    message: Message,
    group: Group,
    redelivery: Redelivery,
    policy: RetryRules,
    *,
    headers: dict[str, str],
    now_ms: int,
) -> None:
    """Add a message to where it goes after an attempt: retries, what waits, or dead letters.

    Raises:
        InvalidBatchError: Its producer packed nonsense.
    """
    batch, index = message.source()
    subject, level = subject_of(message.partition), level_of(message.partition)
    failed = FailedDelivery(message.attempt, batch.id_of(index), message.expires_at_ms)
    match decide(redelivery, failed, policy, now_ms):
        case RetryNow(attempt):
            target = retry_partition(subject, group, level)
            packing.add(target, message, headers=headers, attempt=attempt)
        case RetryLater(attempt, due_ms):
            target = wait_partition(subject, group, level)
            packing.add(target, message, headers=headers, attempt=attempt, due_ms=due_ms)
        case DeadLetter(reason):
            headers[DEAD_HEADER] = reason
            target = dead_partition(subject, group)
            packing.add(target, message, headers=headers, attempt=message.attempt)


def headers_after(message: Message, redelivery: Redelivery) -> dict[str, str]:
    """Return the headers of a message after an attempt: where it comes from, and what failed."""
    headers = message.headers
    if headers and owner_of(message.partition) is None:
        # Whoever sent it cannot have tried it before.
        headers = {name: text for name, text in headers.items() if not name.startswith(_OURS)}
    # Only a letter of a batch that cannot be decoded stands for other messages. It is not retried,
    # but whoever asks for an adoption could say so of any message.
    headers = {name: text for name, text in headers.items() if not _is_of_letter(name)}
    here = f"{message.partition}/{message.sequence}"
    headers[ORIGIN_HEADER] = here
    headers.setdefault(FIRST_HEADER, here)
    headers.pop(DUE_HEADER, None)
    if redelivery.is_failure:
        reason = redelivery.reason.replace("\0", " ")
        headers[REASON_HEADER] = reason
        failure = f"{_instant(redelivery.at_ms)} {reason}"[:_LONGEST_FAILURE]
        headers[f"{FAILED_HEADER}{message.attempt}"] = failure
        if message.attempt > _MOST_FAILURES:
            failures = [name for name in headers if name.startswith(FAILED_HEADER)]
            for name in failures[:-_MOST_FAILURES]:
                del headers[name]
    return headers


def _is_of_letter(name: str) -> bool:
    return name.startswith(UNREADABLE_HEADER)


@lru_cache(maxsize=64)
def _instant(at_ms: int) -> str:
    try:
        shown = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms}ms"
    return shown.replace("+00:00", "Z")

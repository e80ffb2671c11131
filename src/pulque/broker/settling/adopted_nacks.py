"""A nack whose own broker is away, taken over with the whole message.

It goes where a nack of this broker's own would put it: to the group's retries, to what waits, or
to its dead letters. The consumer counts the message as settled once it hears of that, so it is on
disk before the answer; and it may ask again, so each failed attempt is taken over once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pulque.broker.receiving.admission import Gate
from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.settling.message_extraction import Packing, RepackedBatch
from pulque.broker.settling.retry import PolicyOf, add_decided, headers_after
from pulque.broker.settling.settler import check_delay
from pulque.broker.state import BrokerState, SendLimits, Surroundings
from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    PulqueError,
    UnavailableError,
)
from pulque.model.batch import seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import (
    Group,
    effective_group,
    is_retry,
    owner_of,
    parse_consumer_id,
    parse_group,
    parse_partition,
    subject_of,
)
from pulque.model.pack import ONCE_HEADER
from pulque.model.positions import ConsumeSequence
from pulque.rules.adoption import Adoption, adoption_name
from pulque.rules.consumption import Redelivery
from pulque.rules.retry import ORIGIN_HEADER
from pulque.serving.batches import check_batch
from pulque.serving.commit import Committer
from pulque.storage.logs.message_log import Appended
from pulque.wire.requests import Adopt
from pulque.wire.responses import Adopted

__all__ = ["Adopter", "AdoptionRules"]

_LONGEST_REASON = 1000
_MOST_AT_WORK = 1000


class _WantedAdoption(NamedTuple):
    """An adoption that may be."""

    group: Group
    name: str
    request: Adopt


_Waiting = list[tuple[Callable[[Adopted], None], Callable[[PulqueError], None]]]
"""Who waits for one adoption: also the same one, asked for again."""


@dataclass(frozen=True, slots=True)
class AdoptionRules:
    """What holds for nacks of other brokers' messages."""

    gate: Gate
    """Says whether this broker takes new messages."""
    policy_of: PolicyOf
    limits: SendLimits
    longest_delay_ms: int


class Adopter:
    """Takes over messages of brokers that are away."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        appender: Appender,
        rules: AdoptionRules,
        *,
        waits: Callable[[], None],
    ) -> None:
        self._state = state
        self._around = around
        self._committer = committer
        self._appender = appender
        self._rules = rules
        self._waits = waits
        """Called when something was put into a waiting partition."""
        self._at_work: dict[tuple[Group, str], _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.adopted = 0

    def adopt(
        self,
        request: Adopt,
        answer: Callable[[Adopted], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Take a message over, and answer when it is on disk.

        Raises:
            RejectedError: It cannot be.
            ReadOnlyError: This broker takes no new messages; another one may.
        """
        wanted = self._checked(request)
        # Also if it was taken over before: too few may have it.
        self._rules.gate.check_obstacle()
        key = (wanted.group, wanted.name)
        if key in self._at_work:
            self._at_work[key].append((answer, refuse))
            return
        found = self._state.adoptions.find(*key)
        if found is not None:
            answer(self._answer(found, is_duplicate=True))
            return
        self._rules.gate.check_broker()
        self._at_work[key] = [(answer, refuse)]
        task = asyncio.create_task(self._work(wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forsake(self, error: PulqueError) -> None:
        """Tell all who wait that nobody knows whether their messages will be kept."""
        for key, waiting in list(self._at_work.items()):
            self._at_work[key] = []
            for _, refuse in waiting:
                refuse(error)

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- checking ----------------------------------------------------------------------------

    def _checked(self, request: Adopt) -> _WantedAdoption:
        group = effective_group(request.group, parse_consumer_id(request.consumer))
        origin = request.origin
        parse_group(origin.broker_group)
        partition = parse_partition(origin.partition)
        owner = owner_of(partition)
        if owner is not None and (owner != group or not is_retry(partition)):
            raise NotAllowedError(f"no message of {partition} was handed to group {group}")
        check_delay(request.delay_ms, self._rules.longest_delay_ms)
        header = check_batch(bytes(request.batch), seed_of(partition), self._rules.limits)
        if header.count != 1:
            raise InvalidRequestError(
                f"{header.count} messages to be adopted; one at a time is allowed"
            )
        if len(self._at_work) >= _MOST_AT_WORK:
            raise UnavailableError(f"{len(self._at_work)} adoptions are under way already")
        name = adoption_name(origin.broker_group, partition, origin.sequence, request.attempt)
        return _WantedAdoption(group, name, request)

    # -- taking over -------------------------------------------------------------------------

    async def _work(self, wanted: _WantedAdoption) -> None:
        key = (wanted.group, wanted.name)
        try:
            adopted = await self._adopt(wanted)
        except PulqueError as error:
            self._refuse(key, error)
        except asyncio.CancelledError:
            self._refuse(key, UnavailableError("the broker stops"))
            raise
        else:
            for answer, _ in self._at_work.pop(key):
                answer(adopted)

    def _refuse(self, key: tuple[Group, str], error: PulqueError) -> None:
        for _, refuse in self._at_work.pop(key):
            refuse(error)

    async def _adopt(self, wanted: _WantedAdoption) -> Adopted:
        loop = asyncio.get_running_loop()
        packed = await loop.run_in_executor(self._around.executor, self._pack, wanted)
        if packed is None:
            # It was sent to be delivered once, and was.
            origin = wanted.request.origin
            return Adopted(origin.partition, origin.sequence, is_duplicate=False)

        def written(appended: Appended) -> None:
            place = Adoption(
                appended.partition.id,
                appended.entry.first_sequence,
                appended.entry.stored_at_ms,
            )
            self._state.adoptions.stored(wanted.group, wanted.name, place)
            if packed.due_ms:
                self._state.schedule.add(place.partition, place.sequence, packed.due_ms)
                self._waits()

        await self._appender.append(packed.target, packed.batch, written, is_patient=False)
        await self._committer.synced()
        self.adopted += 1
        found = self._state.adoptions.find(wanted.group, wanted.name)
        if found is None:
            raise UnavailableError("what was adopted is forgotten already")
        return self._answer(found, is_duplicate=False)

    def _pack(self, wanted: _WantedAdoption) -> RepackedBatch | None:
        """Return the batch to be appended, or None if the message does not come again."""
        group, name, request = wanted
        message = _message_of(request)
        if message.attempt != request.attempt:
            raise InvalidRequestError(
                f"attempt {request.attempt} failed, says the request, and the message is of "
                f"attempt {message.attempt}"
            )
        if ONCE_HEADER in message.headers:
            return None
        now_ms = self._around.clock.now_ms()
        reason = request.reason[:_LONGEST_REASON]
        redelivery = Redelivery(message.sequence, request.delay_ms, reason, now_ms)
        headers = headers_after(message, redelivery)
        headers[ORIGIN_HEADER] = name
        packing = Packing()
        policy = self._rules.policy_of(group, subject_of(message.partition))
        add_decided(packing, message, group, redelivery, policy, headers=headers, now_ms=now_ms)
        (packed,) = packing.batches()
        return packed

    def _answer(self, place: Adoption, *, is_duplicate: bool) -> Adopted:
        partition = self._state.engine.partitions.by_id[place.partition]
        return Adopted(partition.name, place.sequence, is_duplicate)


def _message_of(request: Adopt) -> Message:
    """Return the message of an adoption."""
    batch = StoredBatch(
        bytes(request.batch),
        partition=request.origin.partition,
        first_sequence=ConsumeSequence(request.origin.sequence),
        stored_at_ms=0,
    )
    return Message(batch, 0)

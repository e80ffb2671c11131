"""A message that its group wants again at a certain time goes to a delay server, as a whole.

Its own broker hears that it is done, but only after the delay server has it on disk. Until then
it is held, and the lease is kept; if this consumer ends before, it is delivered again. When it is
due, a broker of the subject adopts it for this group alone, as the next attempt.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pulque.client.connection.backoff import Backoff
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.received_message import (
    ACKED,
    DEFERRED,
    NACKED,
    ReceivedBatch,
    ToDefer,
)
from pulque.clock import wall_ms
from pulque.errors import (
    NoDelayServerError,
    PulqueError,
    RejectedError,
    RemoteProtocolError,
    UnavailableError,
    error_from_wire,
)
from pulque.model.batch import Flag, seed_of
from pulque.model.message import Message
from pulque.model.names import PartitionName, level_of, parse_consumer_id, retry_partition
from pulque.model.pack import BatchPacker, ProducedBy, encode_headers
from pulque.model.positions import ConsumeSequence, Tenure
from pulque.model.returning import REASON_HEADER, RETURN_HEADER, Returning
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Outcome, Response, Sent

__all__ = ["ANSWER_LIMIT", "CONNECT_LIMIT", "ROUTE_LIMIT", "Deferring"]

log = logging.getLogger("pulque.client")

ROUTE_LIMIT = 2.0
"""How long to look for delay servers, in seconds."""
CONNECT_LIMIT = 2.0
ANSWER_LIMIT = 5.0
_AT_ONCE = 200
_PATIENCE = 2
"""After so many failures in a row another delay server is tried."""
_MOST_BYTES = 8 * 1024 * 1024

_Delivery = tuple[PartitionName, Tenure, int]


class Deferral(NamedTuple):
    """A message that a delay server is to have until it is delivered again."""

    batch: ReceivedBatch
    place: int
    """Its index in the batch."""
    reason: str
    due_ms: int

    @property
    def key(self) -> _Delivery:
        """The delivery that it is."""
        return self.batch.partition, self.batch.tenure, self.batch.pull_of(self.place)

    @property
    def sequence(self) -> ConsumeSequence:
        """Its ordinal in its partition."""
        return self.batch.sequence_of(self.place)


class _Packed(NamedTuple):
    """A message as it was packed, so that a delay server knows it again."""

    partition: PartitionName
    data: bytes


class Deferring:
    """What one broker delivered, on its way to delay servers. Used by one thread at a time.

    Args:
        core: What is held.
        producer_id: Who sends; delay servers deduplicate by it.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        core: IncomingCore,
        *,
        producer_id: int,
        draw: Callable[[], float],
    ) -> None:
        self._core = core
        self._producer_id = producer_id
        self._backoff = Backoff(draw, first=0.1, largest=5.0)
        self._retry_at = 0.0
        self.place = ""
        """The delay server that is asked."""
        self._failures = 0
        """How often in a row it did not answer, or had no room."""
        self._packed: dict[_Delivery, _Packed] = {}
        """What was sent to that place and got no answer."""
        self._numbers: dict[PartitionName, int] = {}
        self._asked: list[Deferral] = []
        """What the request that is under way takes along."""
        self._to_defer: ToDefer = {}
        core.to_defer = self._to_defer

    def is_due(self, now: float) -> bool:
        """Whether there is something to do, and it is time to try."""
        return bool(self._to_defer) and now >= self._retry_at

    def begin(self, places: Sequence[str]) -> Send | None:
        """Return what to ask ``place``, one of these delay servers; None if nothing is wanted.

        Then call ``answered`` or ``unanswered``.
        """
        self._choose(places)
        self._asked = self._next()
        if not self._asked:
            return None
        batches = [self._pack(each) for each in self._asked]
        return Send(
            Acks.DISK,
            int(ANSWER_LIMIT * 1000),
            tuple((each.partition, each.data) for each in batches),
        )

    def answered(self, answer: Response) -> None:
        """Take in an answer: what the delay server has is done with here."""
        asked = self._asked
        if not isinstance(answer, Sent) or len(answer.outcomes) != len(asked):
            self.failed(RemoteProtocolError(f"a send of {len(asked)} batches got {answer!r}"))
            return
        self._failures = 0
        self._backoff.reset()
        for each, outcome in zip(asked, answer.outcomes, strict=True):
            self._take_in(each, outcome)

    def unanswered(self, error: PulqueError) -> None:
        """Take in that the delay server was not reached, did not answer, or refused it all."""
        if isinstance(error, UnavailableError):
            self._failures += 1
        elif isinstance(error, RejectedError) and not error.retryable:
            self._give_up(self._asked, error)
            return
        self.failed(error)

    def failed(self, error: PulqueError) -> None:
        """Take in that no delay server is there, or none could be asked."""
        if isinstance(error, NoDelayServerError):
            self._give_up(self._wanted(), error)
            return
        self._retry_at = time.monotonic() + self._backoff.next_wait()
        log.info("not deferred for now: server=%s error=%s", self.place, error)

    def _choose(self, places: Sequence[str]) -> None:
        """Stay with one delay server while it answers, as only it knows a message again."""
        if self.place in places and self._failures < _PATIENCE:
            return
        at = (places.index(self.place) + 1) % len(places) if self.place in places else 0
        if self.place == places[at]:
            return
        self.place = places[at]
        self._failures = 0
        self._packed.clear()
        self._numbers.clear()
        # Its numbers begin anew: to the next server this is another producer.
        self._producer_id = (self._producer_id + 2) % 2**64 | 1

    def _next(self) -> list[Deferral]:
        some: list[Deferral] = []
        size = 0
        for each in self._wanted():
            size += each.batch.starts[each.place + 1] - each.batch.starts[each.place]
            if some and size > _MOST_BYTES:
                break
            some.append(each)
        return some

    def _pack(self, each: Deferral) -> _Packed:
        found = self._packed.get(each.key)
        if found is None:
            message = Message(each.batch, each.place)
            partition = retry_partition(
                message.subject, self._core.options.group, level_of(message.partition)
            )
            number = self._numbers.get(partition, 0)
            self._numbers[partition] = number + 1
            produced_by = ProducedBy(self._producer_id, 0, number)
            found = _Packed(partition, self._encode(each, partition, produced_by))
            self._packed[each.key] = found
        return found

    def _encode(self, each: Deferral, partition: PartitionName, produced_by: ProducedBy) -> bytes:
        batch, index = each.batch, each.place
        flags = batch.header.flags
        packer = BatchPacker()
        packer.add_encoded(
            batch.data[batch.body_starts()[index] : batch.starts[index + 1]],
            key=batch.part(index, Flag.KEYS),
            order_key=batch.part(index, Flag.ORDER_KEYS),
            tags=batch.part(index, Flag.TAGS),
            headers=self._headers(each),
            expires_at_ms=batch.column("expires_at_ms")[index] if flags & Flag.EXPIRES else 0,
            created_at_ms=batch.column("created_at_ms")[index] if flags & Flag.CREATED else 0,
            attempt=batch.column("attempt")[index] if flags & Flag.ATTEMPTS else 1,
            message_id=batch.id_of(index),
            due_at_ms=each.due_ms,
        )
        return packer.encode(
            seed=seed_of(partition),
            ids=batch.id_of(index),
            created_at_ms=batch.header.created_at_ms,
            produced_by=produced_by,
            priority=batch.header.priority,
        )

    def _headers(self, each: Deferral) -> bytes:
        """Return the headers of a message, and with them from where it came."""
        origin = Returning(
            self._core.broker_group,
            each.batch.partition,
            each.sequence,
            parse_consumer_id(self._core.options.consumer),
        )
        own = each.batch.part(each.place, Flag.HEADERS)
        added = {RETURN_HEADER: origin.header(), REASON_HEADER: each.reason.replace("\0", " ")}
        system = encode_headers(added, is_system=True)
        return own + b"\0" + system if own else system

    def _take_in(self, each: Deferral, outcome: Outcome) -> None:
        if not outcome.code:
            self._packed.pop(each.key, None)
            # Its own broker may hear now that it is done.
            each.batch.states[each.place] = ACKED
            self._forget(each.batch, each.place)
            return
        error = error_from_wire(outcome.code, outcome.text)
        if error.retryable:
            # Full, say: another one may have room.
            self._failures = _PATIENCE
            self._retry_at = time.monotonic() + self._backoff.next_wait()
            return
        self._give_up([each], error)

    def _give_up(self, some: Sequence[Deferral], error: PulqueError) -> None:
        """Have messages wait at their own broker, for as long as it lets them."""
        for each in some:
            log.warning(
                "comes again sooner than it was wanted: subject=%s id=%s: %s",
                each.batch.partition,
                each.batch.id_of(each.place).hex(),
                error,
            )
            self._packed.pop(each.key, None)
            left_ms = max(0, each.due_ms - wall_ms())
            delay_ms = min(left_ms, each.batch.max_delay_ms)
            each.batch.nacks[each.place] = each.reason, delay_ms
            each.batch.states[each.place] = NACKED
            self._forget(each.batch, each.place)

    def _wanted(self) -> list[Deferral]:
        """Return messages that a delay server is to have, the oldest first."""
        found = []
        # A copy, as applications nack in threads of their own.
        for batch, index in list(self._to_defer)[:_AT_ONCE]:
            told = batch.deferred.get(index)
            is_held = batch.settled <= index < batch.end
            if told is None or not is_held or batch.states[index] != DEFERRED:
                # The broker gave it to others, or the application thought better of it.
                self._forget(batch, index)
            else:
                found.append(Deferral(batch, index, *told))
        return found

    def _forget(self, batch: ReceivedBatch, index: int) -> None:
        batch.deferred.pop(index, None)
        self._to_defer.pop((batch, index), None)

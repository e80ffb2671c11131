"""Which batches go when, and what became of them; without I/O.

::

    open → (full, or lingered) → ready → take → in flight → answered → outcome
                                   ↑                          │
                                   └── refused for now, or the connection was lost

A batch gets its number when it is first taken and keeps it, so that a broker that stored it
already knows it again. Every batch has a deadline; whatever happens, its messages have an
outcome by then.

A producer has one dispatch for each broker that it sends to. A batch that its broker refuses, or
that cannot reach it, goes over to another's: ``OutgoingCore`` decides where to.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from pulque.client.connection.backoff import answer_room
from pulque.client.connection.call_outcomes import ended, out_of_time, outcomes_of
from pulque.client.routing.broker_health import BrokerHealth
from pulque.client.routing.failover_rules import leaves_unknown, may_go_elsewhere
from pulque.client.routing.targets import Way
from pulque.client.sending.outgoing_batch import OutgoingBatch, Stream
from pulque.client.sending.producer_options import SendOptions
from pulque.errors import (
    LocalProtocolError,
    NotLeaderError,
    PulqueError,
    StaleRouteError,
    StorageError,
)
from pulque.model.batch import Codec, renumber
from pulque.model.ids import IdSource
from pulque.model.names import DEFAULT_LEVEL
from pulque.model.pack import ProducedBy
from pulque.model.single import pack_single
from pulque.wire.requests import Send
from pulque.wire.responses import Outcome, Response

__all__ = ["OBJECT_BYTES", "Dispatch", "WorkSignal"]

OBJECT_BYTES = 64
"""What a body costs in memory beside its bytes."""
_MAX_REQUEST_BYTES = 1024 * 1024
_MAX_REQUEST_BATCHES = 200
_SMALL_REQUEST_BYTES = 8 * 1024
"""As long as a request is smaller, one more batch of the same partition goes along."""
_SWEEP_FROM = 256
"""From so many batches on, those that have an outcome are forgotten when they are the half."""
_FAR_AHEAD = 64
"""After so many batches more that wait, the answers should be looked at."""
_LONGEST_HOLD = 0.0005
"""In seconds."""


class WorkSignal:
    """Says that some dispatch of a producer may have something to do."""

    __slots__ = ("check_waiter", "is_ahead", "is_up", "on_hurry")

    def __init__(self) -> None:
        self.is_up = False
        self.is_ahead = False
        """Batches are made faster than answers come: whoever reads them should have a turn."""
        self.on_hurry: Callable[[], None] | None = None
        """Called when what was held should go now, without the lock."""
        self.check_waiter: Callable[[], None] | None = None
        """Raises where nobody may wait for an outcome: in another event loop."""


class _HeldStreams:
    """The streams of one broker whose open batch is held; the producer's lock guards them.

    The next batch is held for a moment, so that those may add to it who waited for the last one.
    Whoever waits for a batch is likely to add to the next one as soon as it is told: a caller with
    64 messages under way would else have batches of 1 and of 63 in turn, and pay for both. So the
    next one stays until somebody waits for it, too, and never for longer than ``_LONGEST_HOLD``
    nor than half of what the last one took.
    """

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._until = 0.0

    @property
    def ends_at(self) -> float | None:
        """When they are let go at the latest; None if there are none."""
        return self._until if self._streams else None

    def confirmed(self, batch: OutgoingBatch, now: float) -> None:
        """Take in that a batch is about to have its outcome; hold what comes after it."""
        stream = batch.stream
        if batch.callbacks and batch.count > 1 and not stream.in_flight and not stream.is_held:
            if not self._streams:
                self._until = now + min(_LONGEST_HOLD, (now - batch.sent_at) / 2)
            stream.is_held = True
            self._streams.append(stream)

    def let_go(self) -> list[Stream]:
        """Hold nothing any more; return what was held."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.is_held = False
        return streams


class Dispatch:
    """The batches of one producer on their way to one broker. Guarded by the producer's lock.

    Args:
        options: How to send.
        producer_id: Who sends; the broker deduplicates by it.
        ids: Makes message ids; nobody else may use it.
        signal: Is put up when there is work.
        open_batches: By way: the batch that the next message without an order key goes into.
    """

    is_led = False
    """Whether the broker is the leader of its group: if it fails, another one may follow."""

    def __init__(  # noqa: PLR0915  # one line for each of what it has
        self,
        options: SendOptions,
        *,
        producer_id: int,
        ids: IdSource,
        signal: WorkSignal,
        open_batches: dict[Way, OutgoingBatch],
    ) -> None:
        self.options = options
        self.health: BrokerHealth | None = None
        """How the broker is doing; None while there is no other to go to."""
        self.go_elsewhere: Callable[[OutgoingBatch, float], bool] | None = None
        """Hands a batch over that this broker does not take; says whether another does."""
        self.on_quiet: Callable[[Way], None] | None = None
        """Called when a batch of a stream that is closing has its answer, with its way."""
        self.was_refused = False
        """Whether a batch was handed over, or would have been; until somebody looks."""
        self._signal = signal
        self.has_work = False
        """Something may be ready to be taken; may be read without the lock."""
        self.released = 0
        """Bytes of all messages that have an outcome, since the start."""
        self.problem: PulqueError | None = None
        """Why there is no connection."""
        self.open = open_batches
        self._producer_id = producer_id
        self._ids = ids
        self._lingering: deque[OutgoingBatch] = deque()
        self._unresolved: deque[OutgoingBatch] = deque()
        """By deadline; some have an outcome already."""
        self._sweep_at = _SWEEP_FROM
        self._active: deque[Stream] = deque()
        self._paused: list[tuple[float, int, Stream]] = []
        self._pauses = count()
        self._held = _HeldStreams()
        self._in_flight: dict[int, list[OutgoingBatch]] = {}
        self._finished: list[OutgoingBatch] = []
        self._ghosts: list[OutgoingBatch] = []
        """Without a promise: one for a partition at most."""

    def check_waiter(self) -> None:
        """Raise ``UsageError`` where nobody may wait for an outcome."""
        if self._signal.check_waiter is not None:
            self._signal.check_waiter()

    # ── batches open and close ─────────────────────────────────────────────────────────────

    def opened(self, batch: OutgoingBatch) -> None:
        """Take note of a new batch."""
        # Behind others it is not the next one to linger long enough, nor to run out of time:
        # whoever waits for these looks at it then.
        is_next = not self._lingering
        self._lingering.append(batch)
        self._put_by_deadline(batch)
        if is_next or self._unresolved[0] is batch:
            self.has_work = self._signal.is_up = True
        batch.stream.open = batch

    def _put_by_deadline(self, batch: OutgoingBatch) -> None:
        unresolved = self._unresolved
        if len(unresolved) >= self._sweep_at:
            # Those with a late deadline stay behind all others, also when they are done.
            waiting = [each for each in unresolved if not each.is_done]
            unresolved.clear()
            unresolved.extend(waiting)
            self._sweep_at = max(_SWEEP_FROM, 2 * len(waiting))
        if not unresolved or unresolved[-1].deadline <= batch.deadline:
            unresolved.append(batch)
        else:
            insort(unresolved, batch, key=lambda each: each.deadline)

    def discard(self, batch: OutgoingBatch) -> None:
        """Forget a batch whose first message turned out to be no message."""
        batch.is_done = True
        self.no_longer_open(batch)

    def close(self, batch: OutgoingBatch) -> None:
        """Take no more messages into a batch; it is ready to go."""
        self.no_longer_open(batch)
        stream = batch.stream
        stream.ready.append(batch)
        self.activate(stream)
        # Where the order is strict nothing goes before the last answer is read: whoever reads
        # it should not have to wait for the interpreter.
        if stream.is_strict or len(stream.ready) % _FAR_AHEAD == 0:
            self._signal.is_up = self._signal.is_ahead = True

    def no_longer_open(self, batch: OutgoingBatch) -> None:
        """Take care that no message comes into a batch."""
        stream = batch.stream
        if stream.open is batch:
            # Nobody may add to it from here on, even if this is interrupted.
            if self.open.get(batch.way) is batch:
                del self.open[batch.way]
            stream.open = None
            stream.is_due = False

    def activate(self, stream: Stream) -> None:
        """Have a look at a stream at the next occasion, if there is something to send.

        One that has all in flight that it may have comes here again with the next answer.
        """
        if stream.is_active or stream.is_full(self.options.max_in_flight):
            return
        if stream.ready or (stream.is_due and not stream.is_held):
            stream.is_active = True
            self._active.append(stream)
            self.has_work = self._signal.is_up = True

    def mend(self) -> None:
        """Put every batch where it belongs, after an interrupt (Ctrl-C) in the middle of a change.

        ``_unresolved`` has all batches without an outcome, and ``_in_flight`` those that were
        written; everything else follows from these.
        """
        in_flight = [batch for batches in self._in_flight.values() for batch in batches]
        waiting = [*self.unresolved(), *(each for each in self._ghosts if not each.is_done)]
        streams = dict.fromkeys(batch.stream for batch in (*waiting, *in_flight))
        for way, batch in list(self.open.items()):
            if batch.stream.open is not batch:
                del self.open[way]
        for stream in (*streams, *self._active):
            stream.in_flight = 0
            stream.is_active = False
        self._active.clear()
        for batch in in_flight:
            batch.stream.in_flight += 1
        for batch in waiting:
            self._put_where_it_belongs(batch, in_flight)
        self._lingering = deque(each for each in waiting if each.stream.open is each)
        for stream in streams:
            self.activate(stream)
        self.has_work = self._signal.is_up = True

    def _put_where_it_belongs(
        self, batch: OutgoingBatch, in_flight: Sequence[OutgoingBatch]
    ) -> None:
        stream = batch.stream
        if batch.number >= 0 and batch not in stream.unresolved:
            stream.unresolved.append(batch)
        if not batch.bodies and not batch.data:
            self.discard(batch)  # it was opened for a message that never came
        elif stream.open is batch or batch in in_flight or batch in stream.ready:
            return
        elif batch.number >= 0:
            stream.put_back(batch)
        else:
            stream.ready.append(batch)

    def hurry(self) -> None:
        """Have what is held sent now, of all that the producer has. Takes the lock itself."""
        if self._signal.on_hurry is not None:
            self._signal.on_hurry()

    def let_loose(self) -> None:
        """Hold nothing any more."""
        for stream in self._held.let_go():
            self.activate(stream)

    # ── batches go out ─────────────────────────────────────────────────────────────────────

    def take(self, now: float) -> list[OutgoingBatch]:
        """Return batches to be sent in one request now.

        Of one partition there is more than one only if all are small together: then one
        request costs both sides little more than one for each batch would.
        """
        self.has_work = False
        self._find_due(now)
        taken: list[OutgoingBatch] = []
        size = 0
        for _ in range(len(self._active)):
            if size >= _MAX_REQUEST_BYTES or len(taken) >= _MAX_REQUEST_BATCHES:
                break
            stream = self._active.popleft()
            stream.is_active = False
            batch = self._next_of(stream, now)
            while batch is not None:
                taken.append(batch)
                size += len(batch.data)
                if size >= _SMALL_REQUEST_BYTES or len(taken) >= _MAX_REQUEST_BATCHES:
                    break
                batch = self._next_of(stream, now)
            # What has to wait for an answer, or for a pause to end, comes back with that: as
            # work to be done it would keep its sender from reading the answer.
            if stream.may_send(now, self.options.max_in_flight):
                self.activate(stream)
        self.has_work = bool(self._active)
        return taken

    def request(self, batches: Sequence[OutgoingBatch], now: float) -> Send:
        """Return the request that sends ``batches``."""
        # What is sent only to learn its fate has no deadline of its own.
        left = min(self.options.timeout, min(batch.deadline for batch in batches) - now)
        return Send(
            self.options.acks,
            max(1, int(left * 1000)),
            tuple((batch.stream.target.partition, batch.data) for batch in batches),
        )

    def sent(self, request_id: int, batches: list[OutgoingBatch]) -> None:
        """Take note that ``batches`` are on their way under this id."""
        self._in_flight[request_id] = batches

    def _find_due(self, now: float) -> None:
        held_until = self._held.ends_at
        if held_until is not None and held_until <= now:
            self.let_loose()
        while self._paused and self._paused[0][0] <= now:
            self.activate(heapq.heappop(self._paused)[2])
        lingering = self._lingering
        while lingering and (
            lingering[0].due_at <= now or lingering[0].stream.open is not lingering[0]
        ):
            batch = lingering.popleft()
            if batch.stream.open is batch:
                batch.stream.is_due = True
                self.activate(batch.stream)

    def _next_of(self, stream: Stream, now: float) -> OutgoingBatch | None:
        while stream.may_send(now, self.options.max_in_flight):
            if not stream.ready:
                if not stream.is_due or stream.is_held or stream.open is None:
                    return None
                batch = stream.open
                self.no_longer_open(batch)
                stream.ready.append(batch)
            batch = stream.ready.popleft()
            if not batch.is_done and (batch.number >= 0 or self._encode(batch)):
                stream.in_flight += 1
                batch.sent_at = now
                return batch
        return None

    def _encode(self, batch: OutgoingBatch) -> bool:
        """Number a batch and pack it; say whether that went well."""
        stream = batch.stream
        if batch.data:
            # It was meant for another broker, and is packed already.
            target = stream.target
            batch.data = renumber(batch.data, target.seed, self._producer_id, stream.next_number)
            self._number(batch)
            return True
        if not self.pack_now(batch):
            return False
        self._number(batch)
        return True

    @staticmethod
    def _number(batch: OutgoingBatch) -> None:
        stream = batch.stream
        number = stream.next_number
        stream.next_number = number + 1  # first: no number is given twice
        batch.number = number
        stream.unresolved.append(batch)

    def _pack(self, batch: OutgoingBatch) -> bytes:
        return _packed(batch, self._producer_id, self.options.codec)

    def _count(self, batch: OutgoingBatch) -> None:
        if batch.bodies:
            batch.count = len(batch.bodies)
            batch.size = batch.packer.size

    # ── answers come back ──────────────────────────────────────────────────────────────────

    def answered(self, request_id: int, response: Response | PulqueError, now: float) -> None:
        """Take in the answer to a request."""
        batches = self._in_flight.pop(request_id, None)
        if batches is None:
            return
        for batch in batches:
            batch.stream.in_flight -= 1
        if self.health is not None:
            self.health.answered(now, now - batches[0].sent_at)
        streams = [batch.stream for batch in batches]
        for batch, outcome in zip(batches, outcomes_of(response, len(batches)), strict=True):
            if isinstance(outcome, PulqueError):
                self._refused(batch, outcome, now)
            else:
                self._held.confirmed(batch, now)
                self._confirm(batch, outcome)
        for stream, batch in zip(streams, batches, strict=True):
            self.activate(stream)
            self._look_quiet(stream, batch)

    def disconnected(self) -> None:
        """Have everything without an answer sent again, in order and under the same numbers."""
        in_flight, self._in_flight = self._in_flight, {}
        for batches in in_flight.values():
            for batch in batches:
                batch.stream.in_flight -= 1
                batch.is_unanswered = batch.may_be_stored = True
                if not batch.is_done:
                    batch.stream.put_back(batch)
                self.activate(batch.stream)
                self._look_quiet(batch.stream, batch)

    def _look_quiet(self, stream: Stream, batch: OutgoingBatch) -> None:
        if stream.is_closing and self.on_quiet is not None:
            self.on_quiet(batch.way)

    def oldest_in_flight(self) -> float | None:
        """Return when the request was sent that waits for its answer for longest."""
        for batches in self._in_flight.values():
            return batches[0].sent_at
        return None

    # ── batches go over to another broker ──────────────────────────────────────────────────

    def unresolved(self) -> list[OutgoingBatch]:
        """Return the batches without an outcome, the oldest first; none may be in flight."""
        found = [batch for batch in self._unresolved if not batch.is_done]
        return sorted(found, key=lambda batch: batch.due_at)

    def let_go(self, batch: OutgoingBatch) -> None:
        """Forget a batch: another dispatch has it from now on."""
        self.no_longer_open(batch)
        stream = batch.stream
        for queue in (stream.ready, stream.unresolved, self._unresolved):
            if batch in queue:
                queue.remove(batch)
        batch.may_be_doubled = batch.may_be_doubled or batch.is_unanswered
        batch.is_unanswered = False
        batch.number = -1

    def pack_now(self, batch: OutgoingBatch) -> bool:
        """Have a batch packed that never was; say whether that went well."""
        if batch.data:
            return True
        self._count(batch)
        # Messages of a batch that was divided have their ids already.
        batch.ids = batch.ids or self._ids.many(batch.opened_at_ms, batch.count)
        try:
            batch.data = self._pack(batch)
        except Exception as error:  # noqa: BLE001  # whatever it is, the messages get an outcome
            reason = error if isinstance(error, PulqueError) else LocalProtocolError(str(error))
            self._fail(batch, reason)
            return False
        batch.forget_messages()
        return True

    def take_over(self, batch: OutgoingBatch) -> None:
        """Send a batch that another dispatch let go; its stream is one of ours now."""
        self._put_by_deadline(batch)
        batch.stream.has_keys |= batch.is_ordered
        batch.stream.ready.append(batch)
        self.activate(batch.stream)

    # ── the end of waiting ─────────────────────────────────────────────────────────────────

    def expire(self, now: float) -> bool:
        """Fail the batches whose time is up; say whether the broker owes one an answer."""
        unresolved = self._unresolved
        is_overdue = False
        sent_at = self.oldest_in_flight()
        while unresolved and (unresolved[0].is_done or unresolved[0].deadline <= now):
            batch = unresolved.popleft()
            if not batch.is_done:
                is_in_flight = any(batch in each for each in self._in_flight.values())
                # A caller in a hurry is no reason to cut the connection that all others use.
                is_overdue = is_overdue or (is_in_flight and batch.timeout is None)
                is_overdue = is_overdue or (
                    sent_at is not None and now - sent_at >= self.options.timeout
                )
                batch.may_be_stored = batch.may_be_stored or is_in_flight
                if batch.is_bound and batch.may_be_stored:
                    self._leave_ghost(batch)
                self._fail(batch, self._out_of_time(batch))
                self._look_quiet(batch.stream, batch)
        return is_overdue

    def _out_of_time(self, batch: OutgoingBatch) -> PulqueError:
        timeout = batch.timeout or self.options.timeout
        found = f"no outcome within {timeout:g} s for a batch to "
        return out_of_time(
            found + batch.stream.target.partition,
            batch.refusal,
            self.problem,
            may_be_stored=batch.may_be_stored,
        )

    def _leave_ghost(self, batch: OutgoingBatch) -> None:
        """Have a batch sent on whose outcome is unknown, so that none overtakes it."""
        ghost = batch.ghost()
        for queue in (*self._in_flight.values(), batch.stream.ready, batch.stream.unresolved):
            if batch in queue:
                queue[queue.index(batch)] = ghost
        self._ghosts = [*(each for each in self._ghosts if not each.is_done), ghost]

    def fail_all(self, error: PulqueError) -> None:
        """Give every batch without an outcome an error that says why, and what is known of it."""
        self.disconnected()
        for batch in (*self._unresolved, *self._ghosts):
            if not batch.is_done:
                batch.is_given_up = True
                self._fail(batch, self._ended(batch, error))
        self._unresolved.clear()
        self._ghosts.clear()

    def _ended(self, batch: OutgoingBatch, error: PulqueError) -> PulqueError:
        """Return the error of a batch that is not tried any more because of this one."""
        return ended(error, batch.refusal, may_be_stored=batch.may_be_stored)

    def flush(self) -> list[OutgoingBatch]:
        """Let no batch linger; return all that have no outcome yet."""
        self.let_loose()
        for batch in self._lingering:
            if batch.stream.open is batch:
                batch.stream.is_due = True
                self.activate(batch.stream)
        self._lingering.clear()
        return [batch for batch in self._unresolved if not batch.is_done]

    def next_wake(self) -> float | None:
        """Return when ``take`` or ``expire`` will have something to do, if nothing else comes."""
        lingering, unresolved = self._lingering, self._unresolved
        while lingering and lingering[0].stream.open is not lingering[0]:
            lingering.popleft()
        while unresolved and unresolved[0].is_done:
            unresolved.popleft()
        wakes = [unresolved[0].deadline] if unresolved else []
        if lingering:
            wakes.append(lingering[0].due_at)
        if self._paused:
            wakes.append(self._paused[0][0])
        if self._held.ends_at is not None:
            wakes.append(self._held.ends_at)
        return min(wakes, default=None)

    def take_finished(self) -> list[OutgoingBatch]:
        """Return the batches that got their outcome since the last call, for ``tell``."""
        finished, self._finished = self._finished, []
        return finished

    def _refused(self, batch: OutgoingBatch, error: PulqueError, now: float) -> None:
        if batch.is_done:
            return
        batch.refusal = error
        batch.may_be_stored = batch.may_be_stored or not error.outcome_known
        if batch.is_ordered and isinstance(error, StaleRouteError):
            # Its partition was split, and this broker has not stored it: another route will say
            # where it goes. Another broker that it was sent to before may have it all the same.
            batch.is_unanswered = False
            batch.may_be_stored = batch.may_be_doubled
            self.was_refused = True
        elif isinstance(error, NotLeaderError):
            # It may be stored all the same, and who leads next knows then.
            batch.is_unanswered = self.was_refused = True
        elif self.go_elsewhere is not None and may_go_elsewhere(error):
            batch.is_unanswered = batch.is_unanswered or leaves_unknown(error)
            if not batch.is_bound:
                batch.stream.target.refused(now)
            self.was_refused = True
            if self.go_elsewhere(batch, now):
                return
        is_unknown = batch.is_bound and isinstance(error, StorageError)
        if error.retryable or is_unknown:
            self._try_again(batch, now)
        else:
            error.outcome_known = error.outcome_known and not batch.may_be_stored
            self._fail(batch, error)

    def _try_again(self, batch: OutgoingBatch, now: float) -> None:
        stream = batch.stream
        if stream.paused_until <= now:
            until = now + stream.backoff.next_wait()
            room = answer_room(batch.timeout or self.options.timeout)
            if until < batch.deadline + room and until > batch.deadline - room:
                until = batch.deadline + room  # it fails with its refusal before
            stream.paused_until = until
            heapq.heappush(self._paused, (stream.paused_until, next(self._pauses), stream))
        stream.put_back(batch)

    def _confirm(self, batch: OutgoingBatch, outcome: Outcome) -> None:
        batch.stream.backoff.reset()
        # The first outcome counts: a batch that failed for lack of time may be stored late.
        if not batch.is_done:
            batch.outcome = outcome
            self._finish(batch)

    def _fail(self, batch: OutgoingBatch, error: PulqueError) -> None:
        if not batch.is_done:
            batch.error = error
            self._finish(batch)

    def _finish(self, batch: OutgoingBatch) -> None:
        self.no_longer_open(batch)
        self._count(batch)
        self.released += batch.size + OBJECT_BYTES * batch.count
        batch.data = b""
        batch.forget_messages()
        batch.is_done = True
        self._finished.append(batch)
        whole = batch.whole
        while whole is not None:
            whole.pieces_left -= 1
            if whole.pieces_left:
                return
            whole.is_done = True
            self._finished.append(whole)
            whole = whole.whole


def _packed(batch: OutgoingBatch, producer_id: int, codec: Codec) -> bytes:
    """Return a batch as it is sent, with the next number of its stream."""
    stream = batch.stream
    target = stream.target
    if batch.is_plain and batch.count == 1 and not codec and target.level == DEFAULT_LEVEL:
        return pack_single(
            batch.bodies[0],
            seed=target.seed,
            message_id=batch.ids,
            created_at_ms=batch.opened_at_ms,
            producer_id=producer_id,
            producer_sequence=stream.next_number,
        )
    return batch.packer.encode(
        seed=target.seed,
        ids=batch.ids,
        created_at_ms=batch.opened_at_ms,
        produced_by=ProducedBy(producer_id, 0, stream.next_number),
        priority=target.level,
        codec=codec,
    )

"""What a producer does, without I/O: collect messages, send batches, find every outcome.

::

    add → open batch → (full, or lingered) → ready → take → in flight → answered → outcome
                                               ↑                          │
                                               └── refused for now, or the connection was lost

A batch gets its number when it is first taken and keeps it, so that a broker that stored it
already knows it again. Every batch has a deadline; whatever happens, its messages have an
outcome by then. The shell brings the clock, the bytes and the lock::

    with core.lock:
        batches = core.take(now)
        request_id, buffers = session.ask(core.request(batches, now))
        core.sent(request_id, batches)
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from pulque.client.backoff import Backoff
from pulque.client.batches import OutgoingBatch, Stream
from pulque.client.pending import Promise, Span
from pulque.client.receipt import Outgoing, as_body, ms_of
from pulque.client.routes import Targets
from pulque.errors import (
    ErrorCode,
    LocalProtocolError,
    MessageTooLargeError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UsageError,
    error_from_wire,
)
from pulque.model.batch import Codec
from pulque.model.ids import IdSource
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Outcome, Response, Sent

__all__ = ["NoRouteError", "OutgoingCore", "SendOptions"]

P = TypeVar("P", bound=Promise)
_MAX_REQUEST_BYTES = 1024 * 1024
_MAX_REQUEST_BATCHES = 200
_OBJECT_BYTES = 64
"""What a body costs in memory beside its bytes."""
_NO_LIMIT = 2**31
_EMPTY = BatchPacker()
"""Stands in for the messages of a batch that is packed, so that their memory is free."""


class NoRouteError(Exception):
    """The core does not know the partitions of this subject yet."""


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a producer sends."""

    acks: Acks
    linger: float
    """How long a batch waits for more messages, in seconds."""
    max_batch: int
    """A batch of this many messages goes at once."""
    max_batch_bytes: int
    """So does one of this many bytes."""
    max_in_flight: int
    """How many batches of one partition may wait for their answer."""
    max_buffered_bytes: int
    """How much may wait altogether before ``send`` blocks."""
    timeout: float
    """How long until a message has an outcome, in seconds."""
    codec: Codec


class SubjectStreams:
    """The streams of one subject: a batch to one partition, the next batch to the next."""

    __slots__ = ("_by_target", "_targets", "current")

    def __init__(self, targets: Targets, streams: Sequence[Stream]) -> None:
        self._targets = targets
        self._by_target = {stream.target.partition: stream for stream in streams}
        self.current = streams[0]

    def pick(self, order_key: str | None) -> Stream:
        """Return the stream for a message."""
        if not order_key:
            return self.current
        return self._by_target[self._targets.pick(order_key).partition]

    def turn(self) -> Stream:
        """Have the next batch go to the next partition; return its stream."""
        self.current = self._by_target[self._targets.pick(None).partition]
        return self.current


class OutgoingCore(Generic[P]):
    """The batches of one producer. Where not said otherwise, call it with ``lock`` held.

    Args:
        options: How to send.
        producer_id: Who sends; the broker deduplicates by it.
        ids: Makes message ids; nobody else may use it.
        promise: Makes the promise for one message of a batch.
        monotonic: The clock for waits, in seconds.
        now_ms: The clock on the wall.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(  # noqa: PLR0913  # ports, by keyword
        self,
        options: SendOptions,
        *,
        producer_id: int,
        ids: IdSource,
        promise: Callable[[OutgoingBatch, int], P],
        monotonic: Callable[[], float],
        now_ms: Callable[[], int],
        draw: Callable[[], float],
    ) -> None:
        self.lock = threading.Lock()
        self.options = options
        self.buffered = 0
        """Bytes of all messages without an outcome; may be read without the lock."""
        self.has_work = False
        """Something may be ready to be taken; may be read without the lock."""
        self.max_message = _NO_LIMIT
        self.problem = ""
        """Why there is no connection, for the texts of errors."""
        self._promise = promise
        self._producer_id = producer_id
        self._ids = ids
        self._monotonic = monotonic
        self._now_ms = now_ms
        self._draw = draw
        self._last = options.max_batch - 1
        self._full = options.max_batch_bytes
        self._subjects: dict[str, SubjectStreams] = {}
        self._lingering: deque[OutgoingBatch] = deque()
        self._unresolved: deque[OutgoingBatch] = deque()
        self._active: deque[Stream] = deque()
        self._paused: list[tuple[float, int, Stream]] = []
        self._pauses = count()
        self._in_flight: dict[int, list[OutgoingBatch]] = {}
        self._finished: list[OutgoingBatch] = []
        self._closed_by: PulqueError | None = None

    # ── messages come in ───────────────────────────────────────────────────────────────────

    def limit_messages(self, max_message: int) -> None:
        """Take in the largest message that the broker takes."""
        self.max_message = max_message
        self._full = min(self.options.max_batch_bytes, max_message)

    def check_size(self, size: int) -> None:
        """Raise ``MessageTooLargeError`` if the broker would refuse a message of ``size``."""
        if size > self.max_message:
            raise MessageTooLargeError(
                f"a message of {size} bytes; the broker takes at most {self.max_message}"
            )

    def knows(self, subject: str) -> bool:
        """Say whether messages for ``subject`` can be added."""
        return subject in self._subjects

    def add_subject(self, subject: str, targets: Targets) -> None:
        """Take in the partitions of a subject."""
        if subject not in self._subjects and self._closed_by is None:
            streams = [Stream(target, Backoff(self._draw)) for target in targets]
            self._subjects[subject] = SubjectStreams(targets, streams)

    def add(self, subject: str, body: bytes) -> P:
        """Add a message that is nothing but a body. Takes the lock itself.

        Raises:
            NoRouteError: ``add_subject`` must come first.
            UsageError: The producer is closed.
        """
        # The hot path of every producer: bench/micro/client.py.
        if type(body) is not bytes:
            body = as_body(body)
        size = len(body)
        with self.lock:
            streams = self._subjects.get(subject)
            if streams is None:
                raise self._no_route(subject)
            stream = streams.current
            batch = stream.open
            if batch is None or batch.size + size > self._full:
                batch = self._open_for(streams, stream, size)
            bodies = batch.bodies
            index = len(bodies)
            bodies.append(body)
            batch.size += size
            self.buffered += size + _OBJECT_BYTES
            if index == self._last:
                self._close(batch)
        return self._promise(batch, index)

    def add_message(self, subject: str, message: Outgoing) -> P:
        """Add a message with all that it has. Takes the lock itself; raises as ``add`` does."""
        body = as_body(message.body)
        expires_at_ms = ms_of(message.expires_at)
        with self.lock:
            streams = self._subjects.get(subject)
            if streams is None:
                raise self._no_route(subject)
            stream = streams.pick(message.order_key)
            batch = stream.open
            if batch is None or batch.size + len(body) > self._full:
                batch = self._open_for(streams, stream, len(body))
            packer = batch.packer
            index = len(batch.bodies)
            before = packer.extra_size
            try:
                packer.add(
                    body,
                    key=message.key,
                    order_key=message.order_key,
                    tags=message.tags,
                    headers=message.headers,
                    expires_at_ms=expires_at_ms,
                )
            except BaseException:
                if not index:
                    self._discard(batch)
                raise
            size = len(body) + packer.extra_size - before
            batch.size += size
            self.buffered += size + _OBJECT_BYTES
            if index == self._last:
                self._close(batch)
        return self._promise(batch, index)

    def add_many(self, subject: str, bodies: Sequence[bytes]) -> list[Span]:
        """Add many bodies, all of type bytes. Takes the lock itself; raises as ``add`` does."""
        spans: list[Span] = []
        at = 0
        with self.lock:
            streams = self._subjects.get(subject)
            if streams is None:
                raise self._no_route(subject)
            while at < len(bodies):
                batch = streams.current.open
                room = self._last + 1 - (len(batch.bodies) if batch else 0)
                some = bodies[at : at + room]
                size = sum(map(len, some))
                if size > self._full - (batch.size if batch else 0):
                    some = bodies[at : at + 1]
                    size = len(some[0])
                if batch is None or batch.size + size > self._full:
                    batch = self._open_for(streams, streams.current, size)
                start = len(batch.bodies)
                batch.bodies.extend(some)
                batch.size += size
                self.buffered += size + _OBJECT_BYTES * len(some)
                at += len(some)
                spans.append((batch, start, start + len(some)))
                if start + len(some) > self._last:
                    self._close(batch)
        return spans

    def _no_route(self, subject: str) -> Exception:
        return self._closed_by or NoRouteError(subject)

    def _open_for(self, streams: SubjectStreams, stream: Stream, size: int) -> OutgoingBatch:
        """Return a batch with room for a message of ``size``, after closing a full one."""
        self.check_size(size)
        if stream.open is not None:
            self._close(stream.open)
        if stream is streams.current:
            stream = streams.turn()
            if stream.open is not None:
                if stream.open.size + size <= self._full:
                    return stream.open
                self._close(stream.open)
        now = self._monotonic()
        options = self.options
        batch = OutgoingBatch(
            stream, self.lock, due_at=now + options.linger, deadline=now + options.timeout
        )
        batch.opened_at_ms = self._now_ms()
        stream.open = batch
        self._lingering.append(batch)
        self._unresolved.append(batch)
        self.has_work = True
        return batch

    def _discard(self, batch: OutgoingBatch) -> None:
        """Forget a batch whose first message turned out to be no message."""
        batch.is_done = True
        batch.stream.open = None

    def _close(self, batch: OutgoingBatch) -> None:
        """Take no more messages into a batch; it is ready to go."""
        stream = batch.stream
        stream.open = None
        stream.is_due = False
        stream.ready.append(batch)
        self._activate(stream)

    def _activate(self, stream: Stream) -> None:
        if not stream.is_active and (stream.ready or stream.is_due):
            stream.is_active = True
            self._active.append(stream)
            self.has_work = True

    # ── batches go out ─────────────────────────────────────────────────────────────────────

    def take(self, now: float) -> list[OutgoingBatch]:
        """Return batches to be sent in one request now: at most one for each partition."""
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
            if batch is not None:
                taken.append(batch)
                size += len(batch.data)
                self._activate(stream)
        self.has_work = bool(self._active)
        return taken

    def request(self, batches: Sequence[OutgoingBatch], now: float) -> Send:
        """Return the request that sends ``batches``."""
        left = min(batch.deadline for batch in batches) - now
        return Send(
            self.options.acks,
            max(1, int(left * 1000)),
            tuple((batch.stream.target.partition, batch.data) for batch in batches),
        )

    def sent(self, request_id: int, batches: list[OutgoingBatch]) -> None:
        """Take note that ``batches`` are on their way under this id."""
        self._in_flight[request_id] = batches

    def _find_due(self, now: float) -> None:
        while self._paused and self._paused[0][0] <= now:
            self._activate(heapq.heappop(self._paused)[2])
        lingering = self._lingering
        while lingering and (
            lingering[0].due_at <= now or lingering[0].stream.open is not lingering[0]
        ):
            batch = lingering.popleft()
            if batch.stream.open is batch:
                batch.stream.is_due = True
                self._activate(batch.stream)

    def _next_of(self, stream: Stream, now: float) -> OutgoingBatch | None:
        while stream.may_send(now, self.options.max_in_flight):
            if not stream.ready:
                if not stream.is_due or stream.open is None:
                    return None
                stream.ready.append(stream.open)
                stream.open = None
                stream.is_due = False
            batch = stream.ready.popleft()
            if not batch.is_done and (batch.number >= 0 or self._encode(batch)):
                stream.in_flight += 1
                return batch
        return None

    def _encode(self, batch: OutgoingBatch) -> bool:
        """Number a batch and pack it; say whether that went well."""
        stream = batch.stream
        batch.count = len(batch.bodies)
        now_ms = batch.opened_at_ms
        batch.ids = self._ids.many(now_ms, batch.count)
        produced_by = ProducedBy(self._producer_id, 0, stream.next_number)
        try:
            batch.data = batch.packer.encode(
                seed=stream.target.seed,
                ids=batch.ids,
                created_at_ms=now_ms,
                produced_by=produced_by,
                codec=self.options.codec,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the messages get an outcome
            reason = error if isinstance(error, PulqueError) else LocalProtocolError(str(error))
            self._fail(batch, reason)
            return False
        batch.number = stream.next_number
        stream.next_number += 1
        stream.unresolved.append(batch)
        batch.packer, batch.bodies = _EMPTY, _EMPTY.bodies
        return True

    # ── answers come back ──────────────────────────────────────────────────────────────────

    def answered(self, request_id: int, response: Response | PulqueError, now: float) -> None:
        """Take in the answer to a request."""
        batches = self._in_flight.pop(request_id, None)
        if batches is None:
            return
        for batch in batches:
            batch.stream.in_flight -= 1
        for batch, outcome in zip(batches, _outcomes(response, len(batches)), strict=True):
            if isinstance(outcome, PulqueError):
                self._refused(batch, outcome, now)
            else:
                self._confirm(batch, outcome)
            self._activate(batch.stream)

    def disconnected(self) -> None:
        """Have everything without an answer sent again, in order and under the same numbers."""
        in_flight, self._in_flight = self._in_flight, {}
        for batches in in_flight.values():
            for batch in batches:
                batch.stream.in_flight -= 1
                if not batch.is_done:
                    batch.stream.put_back(batch)
                self._activate(batch.stream)

    def expire(self, now: float) -> bool:
        """Fail the batches whose time is up; say whether the broker owes an answer to one."""
        unresolved = self._unresolved
        is_overdue = False
        while unresolved and (unresolved[0].is_done or unresolved[0].deadline <= now):
            batch = unresolved.popleft()
            if not batch.is_done:
                was_sent = batch.number >= 0
                is_overdue = is_overdue or was_sent
                state = "the outcome is unknown" if was_sent else "it was never sent"
                problem = f" ({self.problem})" if self.problem else ""
                self._fail(
                    batch,
                    RequestTimeoutError(
                        f"no outcome within {self.options.timeout:g} s for a batch to "
                        f"{batch.stream.target.partition}; {state}{problem}"
                    ),
                )
        return is_overdue

    def close(self) -> list[OutgoingBatch]:
        """Refuse new messages; those that are here go on. Return the batches of them."""
        self._closed_by = UsageError("this producer is closed")
        self._subjects.clear()
        return self.flush()

    def fail_all(self, error: PulqueError) -> None:
        """Give every batch without an outcome this one."""
        for batch in self._unresolved:
            if not batch.is_done:
                self._fail(batch, error)
        self._unresolved.clear()
        self._in_flight.clear()

    def flush(self) -> list[OutgoingBatch]:
        """Let no batch linger; return all that have no outcome yet."""
        for batch in self._lingering:
            if batch.stream.open is batch:
                batch.stream.is_due = True
                self._activate(batch.stream)
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
        return min(wakes, default=None)

    def take_finished(self) -> list[OutgoingBatch]:
        """Return the batches that got their outcome since the last call, for ``tell``."""
        finished, self._finished = self._finished, []
        return finished

    def _refused(self, batch: OutgoingBatch, error: PulqueError, now: float) -> None:
        if batch.is_done:
            return
        if not error.retryable:
            self._fail(batch, error)
            return
        stream = batch.stream
        if stream.paused_until <= now:
            stream.paused_until = now + stream.backoff.next_wait()
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
        stream = batch.stream
        if stream.open is batch:
            stream.open = None
            stream.is_due = False
        batch.count = batch.count or len(batch.bodies)
        self.buffered -= batch.size + _OBJECT_BYTES * batch.count
        batch.data = b""
        batch.packer, batch.bodies = _EMPTY, _EMPTY.bodies
        batch.is_done = True
        self._finished.append(batch)


def _outcomes(response: Response | PulqueError, length: int) -> Sequence[Outcome | PulqueError]:
    """Return what became of each batch of a request."""
    if isinstance(response, PulqueError):
        return [response] * length
    if not isinstance(response, Sent) or len(response.outcomes) != length:
        return [RemoteProtocolError(f"a send of {length} batches got {response!r}")] * length
    return [
        outcome if outcome.code is ErrorCode.NONE else error_from_wire(outcome.code, outcome.text)
        for outcome in response.outcomes
    ]

"""What a producer does with messages, without I/O: collect them in batches.

The shell brings the clock, the bytes and the lock::

    pending = core.add(subject, body)
    with core.lock:
        batches = core.dispatch.take(now)
        request_id, buffers = session.ask(core.dispatch.request(batches, now))
        core.dispatch.sent(request_id, batches)

``dispatch`` leads to the first broker that a message went to, which is often the only one. Each
other has one of its own, and ``on_place`` tells the shell of it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

from pulque.client.arguments.due_times import AT_ONCE, check_longest, ms_of
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.fork_safety import free
from pulque.client.routing.broker_health import BrokerHealth
from pulque.client.routing.failover_rules import awaits_leader
from pulque.client.routing.targets import (
    Delayed,
    NoRouteError,
    Target,
    Targets,
    Way,
    is_delay_server,
)
from pulque.client.sending.dispatch import OBJECT_BYTES, Dispatch, WorkSignal
from pulque.client.sending.outgoing_batch import OutgoingBatch, Stream
from pulque.client.sending.outgoing_message import Outgoing, as_body, check_priority
from pulque.client.sending.partition_split import divide
from pulque.client.sending.partitioner import WayStreams
from pulque.client.sending.producer_options import SendOptions
from pulque.client.sending.promises import Promise, Span
from pulque.errors import MessageTooLargeError, PulqueError, UsageError
from pulque.model.ids import IdSource
from pulque.model.names import DEFAULT_LEVEL

__all__ = ["OutgoingCore"]

P = TypeVar("P", bound=Promise)
_NO_LIMIT = 2**31


class OutgoingCore(Generic[P]):
    """The batches of one producer. Where not said otherwise, call it with ``lock`` held.

    Args:
        options: How to send.
        producer_id: Who sends; the broker deduplicates by it.
        ids: Makes message ids; nobody else may use it.
        promise: What the promise for one message is.
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
        promise: type[P],
        monotonic: Callable[[], float],
        now_ms: Callable[[], int],
        draw: Callable[[], float],
    ) -> None:
        self.lock = threading.Lock()
        self.options = options
        self.signal = WorkSignal()
        """Is up when there may be something to send; may be looked at without the lock."""
        self.on_place: Callable[[str, Dispatch], None] | None = None
        """Called with the lock held when messages go to a broker for the first time."""
        self.was_dealt_anew = False
        """Whether batches came to brokers' dispatches whose links may sleep; until one looks."""
        self._open: dict[Way, OutgoingBatch] = {}
        self._producer_id = producer_id
        self._ids = ids
        self.dispatch = self._new_dispatch()
        self.dispatches: dict[str, Dispatch] = {}
        """By place."""
        self._healths: dict[str, BrokerHealth] = {}
        self._promise = promise
        self._new_promise: Callable[[type[P]], P] = promise.__new__
        self._monotonic = monotonic
        self._now_ms = now_ms
        self._draw = draw
        self._last = options.max_batch - 1
        self._added = 0
        self._ceiling = options.max_buffered_bytes
        self._ways: dict[Way, WayStreams] = {}
        self._streams: dict[Way, WayStreams] = {}
        """The same, also when the producer is closed and takes nothing more."""
        self.closed_by: PulqueError | None = None
        """Why nothing more is taken in, if so."""
        self.limit_messages(_NO_LIMIT)

    def limit_messages(self, max_message: int) -> None:
        """Take in the largest message that the broker takes; 0 is what meta servers say."""
        if not max_message:
            return
        self.max_message = max_message
        self._full = min(self.options.max_batch_bytes, max_message)
        self._small = self._full // self.options.max_batch

    def check_size(self, size: int) -> None:
        """Raise ``MessageTooLargeError`` if the broker would refuse a message of ``size``."""
        if size > self.max_message:
            raise MessageTooLargeError(
                f"a message of {size} bytes; the broker takes at most {self.max_message}"
            )

    def knows(self, way: Way) -> bool:
        """Say whether messages of one way can be added."""
        return way in self._ways

    def add_way(self, way: Way, targets: Targets) -> None:
        """Take in where messages of one way go, or that this has changed."""
        streams = self._ways.get(way)
        if streams is not None:
            if targets not in {streams.targets, streams.pending}:
                self._change(streams, targets)
        elif self.closed_by is None:
            streams = WayStreams(targets, self._new_stream, self._monotonic)
            self._ways[way] = self._streams[way] = streams

    def _change(self, streams: WayStreams, targets: Targets) -> None:
        """Take in another route, and deal out anew what waits for partitions that were split."""
        now = self._monotonic()
        for stream in streams.change(targets):
            waiting = [*stream.ready, *([stream.open] if stream.open is not None else [])]
            for batch in waiting:
                if not batch.is_done and stream.dispatch.pack_now(batch):
                    stream.dispatch.let_go(batch)
                    for piece in divide(batch, targets, streams.stream, now):
                        piece.stream.dispatch.take_over(piece)
                        self.was_dealt_anew = True

    def _quiet(self, way: Way) -> None:
        streams = self._streams[way]
        if streams.pending is not None:
            self._change(streams, streams.pending)

    def ways_of(self, subject: str, messages: Iterable[object]) -> list[Way]:
        """Return where messages of a subject would have to be added to now.

        Raises:
            UsageError: One of them is due when nothing can be.
        """
        now_ms = self._now_ms()
        dues = [each.due_at_ms(now_ms) for each in messages if isinstance(each, Outgoing)]
        return [subject, Delayed(subject)] if any(dues) else [subject]

    def check_many(self, subject: str, messages: Sequence[bytes | Outgoing]) -> None:
        """Refuse messages of known ways before any of them is taken in.

        Raises:
            UsageError: One of them is due further ahead than the delay servers allow, or has a
                priority that there is not.
            MessageTooLargeError: The broker would refuse one.
        """
        now_ms = self._now_ms()
        for each in messages:
            if type(each) is not bytes:
                message = each if isinstance(each, Outgoing) else Outgoing(each)
                check_priority(message.priority)
                self.check_size(len(as_body(message.body)))
                self._check_longest(Delayed(subject), message.due_at_ms(now_ms), now_ms)
        self.check_size(max([len(each) for each in messages if type(each) is bytes], default=0))

    # ── brokers ────────────────────────────────────────────────────────────────────────────

    def add_place(self, place: str) -> Dispatch:
        """Return what leads to a broker, made if need be."""
        found = self.dispatches.get(place)
        if found is None:
            found = self._new_dispatch() if self.dispatches else self.dispatch
            # First: if that is interrupted, the place is not known, and the next one tries again.
            if self.on_place is not None:
                self.on_place(place, found)
            self.dispatches[place] = found
        return found

    def unreachable(self, dispatch: Dispatch, now: float, lasted: float) -> bool:
        """Take in that a broker cannot be reached, and for how long that was tried.

        Its batches go to others if that is not the first time; say whether there are any. None
        of them may be in flight.
        """
        if dispatch.health is None:
            return False
        dispatch.health.failed(now, lasted)
        if not dispatch.health.is_open(now):
            return False
        batches = dispatch.unresolved()
        moved = [self._go_elsewhere(batch, now) for batch in batches]
        for way in {batch.way for batch in batches}:
            self._quiet(way)  # a partition that was split may have waited for them
        return any(moved)

    def _new_dispatch(self) -> Dispatch:
        made = Dispatch(
            self.options,
            producer_id=self._producer_id,
            ids=self._ids,
            signal=self.signal,
            open_batches=self._open,
        )
        made.on_quiet = self._quiet
        return made

    def _new_stream(self, target: Target) -> Stream:
        dispatch = self.add_place(target.place)
        self._healths[target.place] = target.health
        if len(self.dispatches) > 1:
            self._watch_health()
        return Stream(target, Backoff(self._draw), dispatch)

    def _watch_health(self) -> None:
        """Have brokers given up for others where there are others, and delay servers likewise."""
        alike = Counter(map(is_delay_server, self.dispatches))
        for place, each in self.dispatches.items():
            if alike[is_delay_server(place)] > 1:
                each.health = self._healths.get(place)
                each.go_elsewhere = self._go_elsewhere

    def _go_elsewhere(self, batch: OutgoingBatch, now: float) -> bool:
        """Hand a batch over to another broker; say whether there is one that takes it."""
        if batch.is_bound or self._stays(batch, now):
            return False
        streams = self._streams[batch.way]
        is_ordered = batch.is_ordered
        other = streams.targets.pick_other(batch.stream.target, now, is_ordered=is_ordered)
        if other is None:
            return False
        batch.stream.dispatch.let_go(batch)
        batch.stream = streams.stream(other)
        batch.stream.dispatch.take_over(batch)
        return True

    def _stays(self, batch: OutgoingBatch, now: float) -> bool:
        """Say whether only its broker group can tell for now whether a batch is stored."""
        if not batch.is_unanswered or not batch.stream.dispatch.is_led:
            return False
        timeout = batch.timeout or self.options.timeout
        return awaits_leader(now - batch.sent_at, timeout)

    # ── messages come in ───────────────────────────────────────────────────────────────────

    def add(self, subject: str, body: object) -> P:
        """Add a message that is nothing but a body. Takes the lock itself.

        Raises:
            NoRouteError: ``add_way`` must come first.
            UsageError: The producer is closed.
            MessageTooLargeError: The broker would refuse it.
        """
        # The hot path of every producer. bench/micro/client.py shows what each choice gains:
        # no count of bytes for each batch, no call of a constructor. ``with`` takes the lock in
        # one step: an interrupt (Ctrl-C) after ``acquire()`` would leave it taken for ever.
        if type(body) is not bytes:
            return self.add_message(subject, Outgoing(body))
        size = len(body)
        with self.lock:
            try:
                batch = self._open.get(subject)
                if batch is None or size > self._small:
                    batch = self._batch_for(subject, None, size)
                bodies = batch.bodies
                index = len(bodies)
                bodies.append(body)
                self._added = added = self._added + size + OBJECT_BYTES
                if index >= self._last:
                    batch.stream.dispatch.close(batch)
                elif added > self._ceiling:
                    self._raise_ceiling()
            except BaseException as error:
                self._mend_after(error)
                raise
        promise = self._new_promise(self._promise)
        promise._batch = batch  # noqa: SLF001
        promise._index = index  # noqa: SLF001
        return promise

    def add_keyed(  # noqa: C901, PLR0915  # without calls, as it is the hot path
        self, subject: str, body: object, order_key: str
    ) -> P:
        """Add a message that has an order key and nothing else. Takes the lock itself.

        Raises as ``add`` does. As short as can be, where the batch has such messages only.
        """
        if type(body) is not bytes:
            return self.add_message(subject, Outgoing(body, order_key=order_key))
        batch, index = None, 0
        with self.lock:
            try:
                streams = self._ways.get(subject)
                found = streams and (streams.keyed.get(order_key) or streams.remember(order_key))
                if found:
                    stream, key, size = found
                    open_batch = stream.open
                    if (
                        open_batch is not None
                        and open_batch.large <= self._full
                        and open_batch.timeout is None
                    ):
                        bodies, keys = open_batch.bodies, open_batch.keys
                        index, size = len(bodies), size + len(body)
                        if 0 < index == len(keys) and size <= self._small:
                            batch = open_batch
                            keys.append(key)
                            bodies.append(body)
                            self._added = added = self._added + size + OBJECT_BYTES
                            if index >= self._last:
                                stream.dispatch.close(batch)
                            elif added > self._ceiling:
                                self._raise_ceiling()
            except BaseException as error:
                if batch is not None and len(batch.bodies) == index < len(batch.keys):
                    batch.packer.cut(index)
                self._mend_after(error)
                raise
        if batch is None:
            return self.add_message(subject, Outgoing(body, order_key=order_key))
        promise = self._new_promise(self._promise)
        promise._batch = batch  # noqa: SLF001
        promise._index = index  # noqa: SLF001
        return promise

    def add_message(self, subject: str, message: Outgoing, timeout: float | None = None) -> P:
        """Add a message with all that it has. Takes the lock itself; raises as ``add`` does.

        Args:
            subject: Where to.
            message: It.
            timeout: Within how many seconds it must have an outcome, if not the producer's.
        """
        body = as_body(message.body)
        expires_at_ms = ms_of(message.expires_at)
        level = check_priority(message.priority)
        now_ms = self._now_ms()
        due_at_ms = message.due_at_ms(now_ms)
        way: Way = Delayed(subject) if due_at_ms else subject
        with self.lock:
            if due_at_ms:
                self._check_longest(way, due_at_ms, now_ms)
            try:
                batch = self._batch_for(way, message.order_key, len(body), level, timeout)
                index = len(batch.bodies)
                self._put_in(batch, index, message, body, expires_at_ms, due_at_ms)
            except BaseException as error:
                self._mend_after(error)
                raise
        return self._promise(batch, index)

    def _put_in(  # what add_message found out
        self,
        batch: OutgoingBatch,
        index: int,
        message: Outgoing,
        body: bytes,
        expires_at_ms: int,
        due_at_ms: int,
    ) -> None:
        """Put a message into a batch; whole, or not at all if that fails or is interrupted."""
        try:
            extra = batch.packer.add(
                body,
                key=message.key,
                order_key=message.order_key,
                tags=message.tags,
                headers=message.all_headers(),
                expires_at_ms=expires_at_ms,
                due_at_ms=due_at_ms,
            )
            if due_at_ms != AT_ONCE:
                batch.dues.append(due_at_ms)
            if message.order_key:
                batch.is_ordered = batch.stream.has_keys = True
        except BaseException:
            batch.packer.cut(index)
            del batch.dues[index:]
            if not index:
                batch.stream.dispatch.discard(batch)
            raise
        batch.large += extra
        self._added += len(body) + extra + OBJECT_BYTES
        self._raise_ceiling()
        if index >= self._last:
            batch.stream.dispatch.close(batch)

    def add_many(
        self, subject: str, bodies: Sequence[bytes], timeout: float | None = None
    ) -> list[Span]:
        """Add many bodies, all of type bytes. Takes the lock itself; raises as ``add`` does."""
        spans: list[Span] = []
        at = 0
        with self.lock:
            try:
                while at < len(bodies):
                    batch = self._open.get(subject) if timeout is None else None
                    batch = batch or self._batch_for(subject, None, 0, timeout=timeout)
                    start = len(batch.bodies)
                    some = bodies[at : at + self._last + 1 - start]
                    size = sum(map(len, some))
                    if size > self._full - self._small * start - batch.large:
                        # Not all of them fit: one by one, then.
                        some = some[:1]
                        size = len(some[0])
                        batch = self._batch_for(subject, None, size, timeout=timeout)
                        start = len(batch.bodies)
                    batch.bodies.extend(some)
                    self._added += size + OBJECT_BYTES * len(some)
                    at += len(some)
                    spans.append((batch, start, start + len(some)))
                    if start + len(some) > self._last:
                        batch.stream.dispatch.close(batch)
                self._raise_ceiling()
            except BaseException as error:
                self._mend_after(error)
                raise
        return spans

    def _mend_after(self, error: BaseException) -> None:
        """Put batches in order if a change of them was interrupted; ours are raised before it."""
        if not isinstance(error, Exception):
            self.mend()

    def mend(self) -> None:
        """Put every batch where it belongs, after an interrupt in the middle of a change."""
        for each in self._all():
            each.mend()
        self._raise_ceiling()

    def add_in_steps(
        self, subject: str, messages: Iterable[object], timeout: float | None = None
    ) -> Iterator[list[Span]]:
        """Add messages of both kinds, a batch's worth at a time, so that the shell can send.

        Takes the lock itself. Raises as ``add`` does: for bodies before the first is added,
        else with a note that says how many were.
        """
        items = messages if isinstance(messages, list) else list(messages)
        step = self.options.max_batch
        if set(map(type, items)) <= {bytes}:
            self.check_size(max(map(len, items), default=0))
            for at in range(0, len(items), step):
                yield self.add_many(subject, cast(list[bytes], items[at : at + step]), timeout)
            return
        for at, item in enumerate(items):
            try:
                message = item if isinstance(item, Outgoing) else Outgoing(item)
                yield [self.add_message(subject, message, timeout).span]
            except PulqueError as error:
                error.add_note(f"{at} of {len(items)} messages were taken in")
                raise

    @property
    def buffered(self) -> int:
        """Bytes of all messages without an outcome; may be asked without the lock."""
        return self._added - self._released()

    @property
    def is_crowded(self) -> bool:
        """Whether more waits than may; may be asked without the lock."""
        return self.buffered > self.options.max_buffered_bytes

    def _raise_ceiling(self) -> None:
        """Find out how much more may be added now; if nothing, the shell must have a look."""
        self._ceiling = self._released() + self.options.max_buffered_bytes
        if self._added > self._ceiling:
            self.signal.is_up = True

    def _released(self) -> int:
        if len(self.dispatches) <= 1:
            return self.dispatch.released
        return sum(each.released for each in list(self.dispatches.values()))

    def _check_longest(self, way: Way, due_at_ms: int, now_ms: int) -> None:
        """Refuse one message here: the delay server would refuse all that travel with it."""
        streams = self._ways.get(way)
        if streams is not None:
            check_longest(due_at_ms, now_ms, streams.targets.longest_delay_ms)

    def _batch_for(
        self,
        way: Way,
        order_key: str | None,
        size: int,
        level: int = DEFAULT_LEVEL,
        timeout: float | None = None,
    ) -> OutgoingBatch:
        """Return an open batch of one timeout with room for a message of ``size``.

        Small messages always have room where their number has, so that nobody counts their
        bytes; ``large`` counts what a batch has beyond them. So a batch may have up to twice
        the bytes that it should.
        """
        streams = self._ways.get(way)
        if streams is None:
            raise self.closed_by or NoRouteError(way)
        self.check_size(size)
        # Picked once: to pick is to take a turn, and the next turn may be another broker's.
        stream = streams.pick(order_key, level)
        batch = self._open_with_room(stream, size, timeout)
        if batch is None and not order_key:
            stream = streams.turn(level)
            batch = self._open_with_room(stream, size, timeout)
        if batch is None:
            batch = self._open_batch(way, stream, timeout)
        if size > self._small:
            batch.large += size - self._small
        if batch.large > self._full:
            # It is full with this one: the next message has to come here first.
            self._open.pop(way, None)
        elif not order_key and level == DEFAULT_LEVEL and timeout is None:
            self._open[way] = batch
        return batch

    def _open_with_room(
        self, stream: Stream, size: int, timeout: float | None
    ) -> OutgoingBatch | None:
        """Return the open batch of a stream; close it instead if the message does not fit.

        All messages of a batch have one outcome, so that they must want it at the same time.
        """
        batch = stream.open
        if batch is None:
            return None
        if not batch.bodies and batch.timeout != timeout:
            stream.dispatch.discard(batch)
            return None
        if not batch.bodies:
            return batch
        has_room = batch.large + self._small * len(batch.bodies) + size <= self._full
        if has_room and batch.timeout == timeout:
            return batch
        stream.dispatch.close(batch)
        return None

    def _open_batch(self, way: Way, stream: Stream, timeout: float | None = None) -> OutgoingBatch:
        now = self._monotonic()
        due_at, deadline = now + self.options.linger, now + (timeout or self.options.timeout)
        batch = OutgoingBatch(way, stream, self.lock, due_at=due_at, deadline=deadline)
        batch.timeout = timeout
        batch.opened_at_ms = self._now_ms()
        stream.dispatch.opened(batch)
        return batch

    def close(self) -> list[OutgoingBatch]:
        """Refuse new messages; those that are here go on. Return the batches of them."""
        self.closed_by = UsageError("this producer is closed")
        self._ways = {}
        self._open.clear()
        return self.flush()

    @property
    def is_quiet(self) -> bool:
        """Whether every message has an outcome."""
        return not any(each.unresolved() for each in self._all())

    def fork(self, error: PulqueError) -> None:
        """Refuse everything in a child. What is on its way is the parent's, and stays untouched.

        Without the lock: a thread that the child does not have may hold it.
        """
        self.closed_by = error
        self._ways = {}
        self._open.clear()
        for batch in [each for dispatch in self._all() for each in dispatch.unresolved()]:
            batch.disown(error)
        free(self.lock)

    def flush(self) -> list[OutgoingBatch]:
        """Let no batch linger; return all that have no outcome yet."""
        return [batch for each in self._all() for batch in each.flush()]

    def let_loose(self) -> None:
        """Hold no batch back for messages that might come."""
        for each in self._all():
            each.let_loose()

    def fail_all(self, error: PulqueError) -> None:
        """Give every batch without an outcome this one."""
        for each in self._all():
            each.fail_all(error)

    def take_finished(self) -> list[OutgoingBatch]:
        """Return the batches that got their outcome since the last call, for ``tell``."""
        return [batch for each in self._all() for batch in each.take_finished()]

    def _all(self) -> list[Dispatch]:
        return list(self.dispatches.values()) or [self.dispatch]

"""A producer that keeps its messages in a file until they have an outcome; without I/O but that.

What ``add`` takes in is in the spool when it returns. A batch is noted there before it is sent,
and one batch of a partition is under way at a time. After a restart the broker is asked first
what became of each batch that was under way (by sending it again: under its producer's name and
number it is stored once); then the rest goes, and then what is new. So the order of a partition
holds over the restart, and nothing is stored twice.

No message runs out of time here. The outcome is a receipt, or the broker's refusal; when the
producer ends before that, they stay in the spool.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from pulque.client.arguments.due_times import AT_ONCE, ms_of
from pulque.client.connection.call_outcomes import last_answer, restated
from pulque.client.persistence.message_spool import BatchNote, KeptMessage, SendSpool
from pulque.client.routing.targets import Delayed, Way
from pulque.client.sending.dispatch import OBJECT_BYTES, Dispatch
from pulque.client.sending.outgoing_batch import OutgoingBatch, Stream
from pulque.client.sending.outgoing_message import Outgoing, as_body, check_priority
from pulque.client.sending.producer_core import OutgoingCore
from pulque.client.sending.producer_options import SendOptions
from pulque.client.sending.promises import Promise, Span
from pulque.errors import (
    FencedError,
    LocalProtocolError,
    PulqueError,
    RejectedError,
    RemoteProtocolError,
    StaleRouteError,
    StorageError,
    UsageError,
    error_from_wire,
)
from pulque.model.ids import IdSource
from pulque.model.pack import ProducedBy, encode_headers, encode_key, encode_order_key, encode_tags
from pulque.wire.requests import Send
from pulque.wire.responses import Response, Sent

__all__ = ["SPOOL_LIMIT", "SpoolingCore", "core_of", "is_stored"]

log = logging.getLogger("pulque.client")

P = TypeVar("P", bound=Promise)
SPOOL_LIMIT = 64 * 1024 * 1024
_FOR_EVER = float("inf")
_GRACE = 1.0
"""How much longer an answer may take than the request says, in seconds."""


class BatchRecorder(Protocol):
    """Writes down what becomes of batches, so that a restart knows it."""

    incarnation: int
    """Which start of the producer this is."""

    def numbered(self, batch: OutgoingBatch) -> None:
        """Take note of a batch that will be sent now; if this raises, it is not."""

    def finished(self, batch: OutgoingBatch) -> None:
        """Take note that a batch has its outcome."""


class KeepingDispatch(Dispatch):
    """The batches of a producer with a spool. No batch of it has a deadline."""

    ledger: BatchRecorder

    def _encode(self, batch: OutgoingBatch) -> bool:
        if not super()._encode(batch):
            return False
        try:
            self.ledger.numbered(batch)
        except StorageError as error:
            self._fail(batch, error)
            return False
        return True

    def _pack(self, batch: OutgoingBatch) -> bytes:
        target = batch.stream.target
        number = batch.stream.next_number
        return batch.packer.encode(
            seed=target.seed,
            ids=batch.ids,
            created_at_ms=batch.opened_at_ms,
            # A name: brokers remember it, however long the producer is away.
            produced_by=ProducedBy(self._producer_id, self.ledger.incarnation, number, named=True),
            priority=target.level,
            codec=self.options.codec,
        )

    def expire(self, now: float) -> bool:
        """Say whether the broker owes an answer for too long."""
        ends = self._answer_ends()
        return super().expire(now) or (ends is not None and ends <= now)

    def next_wake(self) -> float | None:
        """Return when ``take`` or ``expire`` will have something to do, if nothing else comes."""
        wakes = (super().next_wake(), self._answer_ends())
        found = min((each for each in wakes if each is not None), default=_FOR_EVER)
        return None if found == _FOR_EVER else found

    def _answer_ends(self) -> float | None:
        sent_at = self.oldest_in_flight()
        return None if sent_at is None else sent_at + self.options.timeout + _GRACE

    def _ended(self, batch: OutgoingBatch, error: PulqueError) -> PulqueError:
        # Nobody may send it anew: the next producer with this spool does.
        text = f"{error}; the spool keeps it{last_answer(batch.refusal)}"
        return restated(error, text, outcome_known=False)

    def _finish(self, batch: OutgoingBatch) -> None:
        super()._finish(batch)
        self.ledger.finished(batch)


class SpoolingCore(OutgoingCore[P]):
    """The batches of a producer with a spool; as ``OutgoingCore``, and a ``BatchRecorder``.

    Args:
        options: How to send; of a partition one batch at a time.
        spool: Where messages are kept.
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
        spool: SendSpool,
        ids: IdSource,
        promise: type[P],
        monotonic: Callable[[], float],
        now_ms: Callable[[], int],
        draw: Callable[[], float],
    ) -> None:
        self._spool = spool
        self.incarnation = spool.incarnation
        super().__init__(
            replace(options, max_in_flight=1),
            producer_id=spool.producer_id,
            ids=ids,
            promise=promise,
            monotonic=monotonic,
            now_ms=now_ms,
            draw=draw,
        )

    @property
    def is_crowded(self) -> bool:
        """Whether the spool is full; may be asked without the lock."""
        return self._spool.is_full

    # ── what the last run left ─────────────────────────────────────────────────────────────

    def undecided(self) -> list[tuple[Way, BatchNote]]:
        """Return the batches of which nobody knows whether they are stored."""
        return [(self._spool.way_of(note), note) for note in self._spool.notes()]

    def question(self, note: BatchNote, timeout: float) -> Send:
        """Return the request that finds out about a batch, or else has it stored."""
        batch = (note.partition, self._spool.pack(note))
        return Send(self.options.acks, max(1, int(timeout * 1000)), (batch,))

    def decide(self, note: BatchNote, *, is_stored: bool) -> None:
        """Take in what became of a batch."""
        if is_stored:
            self._spool.done(note.messages)
        else:
            self._spool.free(note)

    def ways_left(self) -> set[Way]:
        """Return the ways of what is left; they must be known before ``resume``."""
        return {message.way for _, message in self._spool.messages()}

    def resume(self) -> list[Span]:
        """Add what the last run left, in its order, before anything new. Takes the lock itself."""
        left = self._spool.messages()
        # The broker knows what was decided: after a power cut nobody may ask again, when batches
        # of this run have made it forget the last one's.
        self._spool.sync()
        with self.lock:
            return [self._resume(number, message).span for number, message in left]

    def _resume(self, number: int, message: KeptMessage) -> P:
        batch = self._open_for(message)
        message.put_into(batch.packer, is_old=True)
        batch.may_be_doubled = batch.may_be_doubled or self._spool.may_be_doubled
        return self._put(batch, number, message)

    # ── messages come in ───────────────────────────────────────────────────────────────────

    def add(self, subject: str, body: object) -> P:
        """Add a message that is nothing but a body, as ``add_message`` does."""
        return self.add_message(subject, Outgoing(body))

    def add_keyed(self, subject: str, body: object, order_key: str) -> P:
        """Add a message that has an order key and nothing else, as ``add_message`` does."""
        return self.add_message(subject, Outgoing(body, order_key=order_key))

    def add_message(self, subject: str, message: Outgoing, timeout: float | None = None) -> P:
        """Keep a message and add it. Takes the lock itself; ``timeout`` means nothing here.

        Raises:
            NoRouteError: ``add_way`` must come first.
            UsageError: It is no message, or the producer is closed.
            MessageTooLargeError: The broker would refuse it.
            SpoolFullError: Too much is kept already.
            StorageError: The disk failed, now or before: the spool has to be opened anew.
        """
        with self.lock:
            try:
                promise = self._keep(subject, message)
                self._spool.settle()
            except BaseException as error:
                self._mend_after(error)
                raise
        return promise

    def add_many(
        self, subject: str, bodies: Sequence[bytes], timeout: float | None = None
    ) -> list[Span]:
        """Add many bodies, as ``add_message`` does; what was kept is synced once."""
        with self.lock:
            try:
                return [self._keep(subject, Outgoing(body)).span for body in bodies]
            except BaseException as error:
                self._mend_after(error)
                raise
            finally:
                self._settle_what_may_be()

    def add_in_steps(
        self, subject: str, messages: Iterable[object], timeout: float | None = None
    ) -> Iterator[list[Span]]:
        """Add messages of both kinds, a batch's worth at a time; what was kept is synced then."""
        items = messages if isinstance(messages, list) else list(messages)
        step = self.options.max_batch
        for first in range(0, len(items), step):
            spans: list[Span] = []
            with self.lock:
                try:
                    for item in items[first : first + step]:
                        message = item if isinstance(item, Outgoing) else Outgoing(item)
                        spans.append(self._keep(subject, message).span)
                    self._spool.settle()
                except PulqueError as error:
                    self._settle_what_may_be()
                    error.add_note(f"{first + len(spans)} of {len(items)} messages were taken in")
                    raise
                except BaseException as error:
                    self._mend_after(error)
                    raise
            yield spans

    def _settle_what_may_be(self) -> None:
        if self._spool.error is None and self.closed_by is None:
            self._spool.settle()

    def _keep(self, subject: str, message: Outgoing) -> P:
        now_ms = self._now_ms()
        kept = _encoded(subject, message, now_ms, self._ids)
        if kept.due_at_ms:
            self._check_longest(kept.way, kept.due_at_ms, now_ms)
        batch = self._open_for(kept)
        index, ids = len(batch.bodies), batch.ids
        try:
            number = self._spool.keep(kept)
            kept.put_into(batch.packer)
            return self._put(batch, number, kept)
        except BaseException:
            # Interrupted, perhaps: what the spool has and no batch, the next producer sends.
            batch.packer.cut(index)
            batch.ids = ids
            del batch.dues[index:]
            if batch.kept is not None:
                del batch.kept[index:]
            if not index:
                batch.stream.dispatch.discard(batch)
            raise

    def _open_for(self, message: KeptMessage) -> OutgoingBatch:
        order_key = message.order_key.decode() or None
        return self._batch_for(message.way, order_key, len(message.body), message.level)

    def _put(self, batch: OutgoingBatch, number: int, message: KeptMessage) -> P:
        """Take in a message that is packed by now."""
        index = len(batch.bodies) - 1
        batch.ids += message.message_id
        batch.kept = [number] if batch.kept is None else batch.kept
        if index:
            batch.kept.append(number)
        if message.due_at_ms != AT_ONCE:
            batch.dues.append(message.due_at_ms)
        parts = (message.key, message.order_key, message.tags, message.headers)
        extra = sum(map(len, parts))
        batch.large += extra
        self._added += len(message.body) + extra + OBJECT_BYTES
        if message.order_key:
            batch.is_ordered = batch.stream.has_keys = True
        if index == self._last:
            batch.stream.dispatch.close(batch)
        if self._spool.is_full:
            self.signal.is_up = True
        return self._promise(batch, index)

    def _open_batch(self, way: Way, stream: Stream, timeout: float | None = None) -> OutgoingBatch:
        batch = super()._open_batch(way, stream, timeout)
        batch.deadline = _FOR_EVER
        return batch

    def _new_dispatch(self) -> Dispatch:
        made = KeepingDispatch(
            self.options,
            producer_id=self._producer_id,
            ids=self._ids,
            signal=self.signal,
            open_batches=self._open,
        )
        made.on_quiet = self._quiet
        made.ledger = self
        return made

    # ── what becomes of batches ────────────────────────────────────────────────────────────

    def numbered(self, batch: OutgoingBatch) -> None:
        """Note a batch that will be sent now; if this raises, it is not."""
        target = batch.stream.target
        self._spool.note(
            BatchNote(
                target.place,
                target.partition,
                self.incarnation,
                batch.number,
                batch.opened_at_ms,
                target.level,
                tuple(batch.kept or ()),
            )
        )

    def finished(self, batch: OutgoingBatch) -> None:
        """Forget the messages of a batch that has its outcome, unless they have to go again."""
        error = batch.error
        if error is not None and (batch.is_given_up or not _is_refusal(error)):
            # Nothing may overtake them: the next run sends all that is left, in order.
            self.closed_by = self.closed_by or restated(
                error, f"the message was not taken in, after: {error}", outcome_known=True
            )
            self._ways = {}
            self._open.clear()
            return
        try:
            if batch.kept:
                self._spool.done(batch.kept)
        except StorageError as problem:
            # They will be sent again, and the broker will know them.
            log.warning("a spool failed: %s", problem)


def core_of(  # noqa: PLR0913  # ports, by keyword
    options: SendOptions,
    *,
    spool: SendSpool | None,
    producer_id: int,
    ids: IdSource,
    promise: type[P],
    monotonic: Callable[[], float],
    now_ms: Callable[[], int],
    draw: Callable[[], float],
) -> OutgoingCore[P]:
    """Return the core of a producer that may have a spool; if so, that says who sends."""
    if spool is None:
        return OutgoingCore(
            options,
            producer_id=producer_id,
            ids=ids,
            promise=promise,
            monotonic=monotonic,
            now_ms=now_ms,
            draw=draw,
        )
    return SpoolingCore(
        options,
        spool=spool,
        ids=ids,
        promise=promise,
        monotonic=monotonic,
        now_ms=now_ms,
        draw=draw,
    )


def _is_refusal(error: PulqueError) -> bool:
    return isinstance(error, RejectedError | LocalProtocolError) and not isinstance(
        error, FencedError
    )


def is_stored(answer: Response | PulqueError) -> bool:
    """Say what the answer to a question means: stored, or never to be stored as it was.

    Raises:
        PulqueError: Neither; if it is retryable, another try may tell.
    """
    if isinstance(answer, PulqueError):
        raise answer
    if not isinstance(answer, Sent) or len(answer.outcomes) != 1:
        raise RemoteProtocolError(f"a send of one batch got {answer!r}")
    outcome = answer.outcomes[0]
    if not outcome.code:
        return True
    error = error_from_wire(outcome.code, outcome.text)
    if isinstance(error, FencedError):
        raise FencedError(
            f"the spool was used elsewhere, perhaps as a copy, and may not be any more: {error}"
        )
    if isinstance(error, StorageError) or (
        error.retryable and not isinstance(error, StaleRouteError)
    ):
        raise error
    # It is not stored, and its partition was split, or it never can be.
    return False


def _encoded(subject: str, message: Outgoing, now_ms: int, ids: IdSource) -> KeptMessage:
    """Return a message as it is kept.

    Raises:
        UsageError: A part of it is not allowed.
    """
    due_at_ms = message.due_at_ms(now_ms)
    headers = message.all_headers()
    expires_at_ms = ms_of(message.expires_at)
    if expires_at_ms < 0:
        raise UsageError(f"{expires_at_ms} is not an instant in milliseconds since 1970")
    return KeptMessage(
        Delayed(subject) if due_at_ms else subject,
        as_body(message.body),
        ids.one(now_ms),
        check_priority(message.priority),
        encode_key(message.key, "key") if message.key else b"",
        encode_order_key(message.order_key) if message.order_key else b"",
        encode_tags(message.tags) if message.tags else b"",
        encode_headers(headers) if headers else b"",
        expires_at_ms,
        due_at_ms,
    )

"""Batches on their way, and the stream of them that leads to one partition."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from pulque.client.arguments.due_times import AT_ONCE
from pulque.client.connection.backoff import Backoff
from pulque.client.routing.targets import Target, Way
from pulque.client.sending.outgoing_message import Receipt
from pulque.errors import PulqueError
from pulque.model.ids import ID_SIZE, show_id
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.wire.responses import Outcome

if TYPE_CHECKING:
    from pulque.client.sending.dispatch import Dispatch

__all__ = ["WINDOW", "OutgoingBatch", "Stream"]

log = logging.getLogger("pulque.client")

WINDOW = 32
"""How far batches without an outcome may be apart; a broker remembers the last 64 it stored."""


_EMPTY = BatchPacker()
"""Stands in for the messages of a batch that is packed."""


class Stream:
    """The batches on their way to one partition, in order. Its owner's lock guards it."""

    __slots__ = (
        "backoff",
        "dispatch",
        "has_keys",
        "in_flight",
        "is_active",
        "is_closing",
        "is_due",
        "is_held",
        "is_strict",
        "next_number",
        "open",
        "paused_until",
        "ready",
        "target",
        "unresolved",
    )

    def __init__(self, target: Target, backoff: Backoff, dispatch: "Dispatch") -> None:
        self.target = target
        self.dispatch = dispatch
        """Sends to the broker that has the partition."""
        self.backoff = backoff
        self.open: OutgoingBatch | None = None
        """Takes new messages."""
        self.is_due = False
        """Whether the open batch should go as soon as it may."""
        self.is_held = False
        """Whether it had better not yet: those who are told of the last one add more to it."""
        self.ready: deque[OutgoingBatch] = deque()
        """Full, or to be sent again; those with a number first."""
        self.in_flight = 0
        self.has_keys = False
        """Whether messages with an order key ever took it."""
        self.is_closing = False
        """Whether its partition was split: nothing new is sent there."""
        self.is_strict = False
        """Whether what fails stays at the head: one batch at a time, so that none overtakes."""
        self.next_number = 0
        self.unresolved: deque[OutgoingBatch] = deque()
        """Numbered and without an outcome, and some with one that were not cleared yet."""
        self.paused_until = 0.0
        self.is_active = False

    def is_full(self, max_in_flight: int) -> bool:
        """Say whether as many batches are in flight as may be."""
        return self.in_flight >= (1 if self.is_strict else max_in_flight)

    def may_send(self, now: float, max_in_flight: int) -> bool:
        """Say whether one more batch may go now."""
        if self.is_full(max_in_flight) or self.paused_until > now:
            return False
        if self.is_closing:
            # Only to learn whether it is stored already.
            return any(each.is_unanswered for each in self.ready)
        unresolved = self.unresolved
        while unresolved and unresolved[0].is_done:
            unresolved.popleft()
        # A batch that is sent again has its number; only new ones widen the window.
        if self.ready and self.ready[0].number >= 0:
            return True
        return not unresolved or self.next_number - unresolved[0].number < WINDOW

    def put_back(self, batch: "OutgoingBatch") -> None:
        """Have a batch sent again, in the place that its number gives it."""
        place = 0
        for other in self.ready:
            if not 0 <= other.number < batch.number:
                break
            place += 1
        self.ready.insert(place, batch)


class OutgoingBatch:
    """Messages for one partition that travel together. Its owner's lock guards it."""

    __slots__ = (
        "bodies",
        "callbacks",
        "count",
        "data",
        "deadline",
        "due_at",
        "dues",
        "error",
        "ids",
        "is_done",
        "is_given_up",
        "is_ordered",
        "is_unanswered",
        "kept",
        "keys",
        "large",
        "lock",
        "may_be_doubled",
        "may_be_stored",
        "number",
        "opened_at_ms",
        "outcome",
        "packer",
        "pieces",
        "pieces_left",
        "refusal",
        "sent_at",
        "size",
        "stream",
        "timeout",
        "way",
        "whole",
    )

    def __init__(  # noqa: PLR0915  # one line for each of what it has
        self,
        way: Way,
        stream: "Stream",
        lock: threading.Lock,
        *,
        due_at: float,
        deadline: float,
    ) -> None:
        self.way = way
        self.stream = stream
        self.lock = lock
        self.due_at = due_at
        """When it has lingered for long enough, by the monotonic clock."""
        self.deadline = deadline
        self.timeout: float | None = None
        """Within how many seconds its callers want an outcome, if not the producer's timeout."""
        self.take_from(BatchPacker())
        self.dues: list[int] = []
        """When each message is due, where they are due later."""
        self.size = 0
        self.large = 0
        self.count = 0
        self.opened_at_ms = 0
        self.number = -1
        self.data = b""
        self.ids = b""
        self.sent_at = 0.0
        self.is_done = False
        self.is_given_up = False
        """Whether its error is not about its messages: the producer ended, or has no connection
        and gets none."""
        self.is_ordered = False
        """Whether a message in it has an order key."""
        self.is_unanswered = False
        """Whether it was sent, and the connection lost before there was an answer."""
        self.may_be_doubled = False
        """Whether that was with another broker than the one that has it now."""
        self.may_be_stored = False
        """Whether it was sent to any broker without a definite answer."""
        self.refusal: PulqueError | None = None
        """Why a broker did not store it, the last time that one said so."""
        self.kept: list[int] | None = None
        """By which numbers the producer's spool knows its messages, if there is one."""
        self.outcome: Outcome | None = None
        self.error: PulqueError | None = None
        self.callbacks: list[Callable[[], object]] | None = None
        self.pieces: list[tuple[OutgoingBatch, int]] = []
        """For each message the batch that it went over to, and its index there; or nothing."""
        self.pieces_left = 0
        """How many of these have no outcome."""
        self.whole: OutgoingBatch | None = None
        """The batch that this one is a piece of."""

    def take_from(self, packer: BatchPacker) -> None:
        """Have the messages that a packer has."""
        self.packer = packer
        self.bodies = packer.bodies
        self.keys = packer.order_keys

    def forget_messages(self) -> None:
        """Let go of the messages, now that they are packed, so that their memory is free."""
        self.take_from(_EMPTY)

    @property
    def is_bound(self) -> bool:
        """Whether it goes to its own partition or nowhere, as its order is strict."""
        return self.is_ordered and self.stream.is_strict

    def ghost(self) -> "OutgoingBatch":
        """Return what is sent in its place after its messages got their outcome.

        Nobody knows whether the broker stores it, perhaps late: until it says so, no other batch
        of a strict stream may go.
        """
        found = OutgoingBatch(self.way, self.stream, self.lock, due_at=0.0, deadline=float("inf"))
        found.take_from(self.packer)
        for name in ("number", "data", "ids", "is_ordered", "is_unanswered", "sent_at"):
            setattr(found, name, getattr(self, name))
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the messages are nothing but bodies."""
        return self.packer.is_plain

    def error_of(self, index: int) -> PulqueError | None:
        """Return what went wrong with one message, if anything; it must be done."""
        if self.pieces:
            piece, at = self.pieces[index]
            return piece.error_of(at)
        return self.error

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of one message, or raise what went wrong; it must be done."""
        if self.pieces:
            piece, index = self.pieces[index]
            return piece.receipt(index)
        outcome = self.outcome
        if outcome is None:
            assert self.error is not None  # noqa: S101  # done means one of the two
            # It is raised for each message: the trace of the last time must not stay on it.
            raise self.error.with_traceback(None)
        target = self.stream.target
        return Receipt(
            show_id(self.ids[ID_SIZE * index : ID_SIZE * index + ID_SIZE]),
            target.partition,
            ConsumeSequence(outcome.first_sequence + index),
            outcome.stored_at_ms,
            target.broker_group,
            outcome.is_duplicate,
            self.may_be_doubled,
            self.dues[index] if self.dues else AT_ONCE,
        )

    def disown(self, error: PulqueError) -> None:
        """End it, and what it is a piece of, for a forked child; the parent goes on with it."""
        found: OutgoingBatch | None = self
        while found is not None:
            found.error = error
            found.is_done = True
            found = found.whole

    def hurry(self) -> None:
        """Take note that somebody is about to wait for it, and so adds nothing more meanwhile."""
        if self.stream.is_held:
            self.stream.dispatch.hurry()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once there is an outcome: now, or by whoever brings it."""
        with self.lock:
            if not self.is_done:
                if self.callbacks is None:
                    self.callbacks = []
                self.callbacks.append(callback)
                return
        callback()

    def tell(self) -> None:
        """Call those who wait; without the lock, after the batch is done."""
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                log.exception("a done callback failed")

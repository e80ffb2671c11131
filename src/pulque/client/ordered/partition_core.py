"""What an ordered consumer does with one partition, without I/O: lock, pull, hand out, settle.

A partition is the consumer's alone while it has the broker's lock for it; every pull and settle
carries the lock's token and makes it last longer. Messages are handed out only while both the
lock and what the meta server authorised last, by this consumer's own clock: one that was cut off
has stopped before its partitions are given away, and one that was paused finds its time over.

To hand a partition over, nothing more is handed out or pulled; what runs ends and is settled, or
is abandoned; then the lock is released.
"""

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pulque.client.ordered.window import DELAYS, BlocksName, OrderedMessage, Window
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.error_policy import problem_of
from pulque.client.receiving.partition_deliveries import PartitionDeliveries
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import ReceivedBatch, expire
from pulque.errors import ErrorCode, LockLostError, PulqueError
from pulque.model.names import PartitionName
from pulque.model.ordered import OrderStrategy
from pulque.wire.ordered import NO_TOKEN, Lock, Locked, Unlock
from pulque.wire.requests import Pull, Request, Settle
from pulque.wire.responses import Pulled, Response, State

__all__ = ["OrderedCore", "OrderedOptions", "Permit", "RetryCore"]

log = logging.getLogger("pulque.client")

_RETRY_LOCK = 0.05
"""A lock that another has is asked for again after so many seconds."""
_KEPT_PART = 3
"""A lock is made to last longer when a third of its time is over."""


class OrderedOptions(NamedTuple):
    """What an ordered consumer was told beside what every consumer is."""

    blocks: BlocksName = "key"
    delays: tuple[float, ...] = DELAYS


class Permit:
    """Until when the meta server lets a consumer go on, by the consumer's own clock."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0


class OrderedCore(IncomingCore):
    """The deliveries of one partition to one consumer. Its owner's lock guards it.

    Args:
        options: Who pulls, and how.
        partition: Which one.
        order: What a failure may do to the order.
        permit: Until when the consumer may go on.
        wishes: What it was told beside.
        monotonic: The clock, in seconds.
    """

    def __init__(
        self,
        options: PullOptions,
        partition: PartitionName,
        *,
        order: OrderStrategy,
        permit: Permit,
        wishes: OrderedOptions,
        monotonic: Callable[[], float],
    ) -> None:
        super().__init__(options)
        self.partition = partition
        self.window = Window()
        self.window.close()
        self.on_ended: Callable[[], None] | None = None
        """Called when a message ended that others wait for, in the thread that says so."""
        self.is_leaving = False
        """Whether the partition is another's by now, or soon."""
        self._order = order
        self._permit = permit
        self._wishes = wishes
        self._monotonic = monotonic
        self._before: Window | None = None
        """An earlier lock's, while something of it still runs."""
        self._locked_until = 0.0
        self._lock_time = 0.0
        self._asked_at = 0.0
        self._retry_at = 0.0
        self._is_locking = False
        self._kept_at = 0.0
        self._covers = ()
        self.subscribe([partition])

    def after_fork(self) -> None:
        """Refuse acks and nacks in a child, and hand out nothing more there."""
        super().after_fork()
        self.window.close()

    # ── the lock ───────────────────────────────────────────────────────────────────────────

    @property
    def token(self) -> int:
        """Of the lock; 0 if there is none."""
        return self._token

    @property
    def is_pulling(self) -> bool:
        """Whether a pull, or a request for the lock, has no answer yet."""
        return self._is_locking or self._pull is not None

    def connected(self) -> None:
        """Take note of a new connection; a lock does not depend on it."""
        self._is_locking = False

    def next_route(self) -> Request | None:
        """Return the request for the lock, if there is none and it is time to ask."""
        now = self._monotonic()
        if self._token or self._is_locking or self.is_leaving or now < self._retry_at:
            return None
        self._is_locking = True
        self._asked_at = now
        return self._lock()

    def routed(self, answer: Response | PulqueError) -> None:
        """Take in the answer to it.

        Raises:
            PulqueError: There is none.
        """
        self._is_locking = False
        if not isinstance(answer, Locked):
            raise problem_of(answer)
        if answer.token:
            self._locked(answer, self._asked_at)
        else:
            self._retry_at = self._monotonic() + _RETRY_LOCK

    def pull_failed(self) -> None:
        """Take note that what is on its way gets no answer."""
        super().pull_failed()
        self._is_locking = False

    def next_upkeep(self) -> Request | None:
        """Return what makes the lock last longer, if it is time: not all pull all the time."""
        now = self._monotonic()
        if not self._token or now < self._kept_at + self._lock_time / _KEPT_PART:
            return None
        self._kept_at = now
        return self._lock()

    def upkept(self, response: Response | PulqueError) -> None:
        """Take in the answer to that."""
        if isinstance(response, Locked) and self._token:
            if response.token:
                self._locked(response, self._kept_at)
            else:
                self._lose_lock("%s has it", response.holder)
        elif isinstance(response, LockLostError):
            self._lose_lock("%s", response)

    def farewell(self) -> Request | None:
        """Give up what is not finished, and return what releases the lock."""
        token = self._token
        self._give_up()
        if not token:
            return None
        who = self.options
        return Unlock(self.partition, who.group, who.consumer, who.incarnation, token)

    def _lock(self) -> Lock:
        # It does not wait at the broker: an answer that nobody waits for would be a lock that
        # nobody uses.
        who, order = self.options, self._order
        return Lock(self.partition, who.group, who.consumer, who.incarnation, order, self._token)

    def _locked(self, answer: Locked, asked_at: float) -> None:
        if answer.token != self._token:
            if self._token:
                self._lose_lock("it was granted anew")
            self._begin(answer.token)
        self._lock_time = answer.lock_ms / 1000
        self._locked_until = max(self._locked_until, asked_at + self._lock_time)

    def _begin(self, token: int) -> None:
        log.info("locked: %s token=%d", self.partition, token)
        self._token = token
        self._kept_at = self._asked_at
        self._locked_until = 0.0
        self.window = Window(
            token=token,
            in_place=self._order is OrderStrategy.STRICT,
            blocks=self._wishes.blocks,
            delays=self._wishes.delays,
        )
        self.window.on_ended = self.on_ended

    def _lose_lock(self, why: str, *details: object) -> None:
        log.warning("lock lost: %s: " + why, self.partition, *details)  # noqa: G003
        self._give_up()

    def begin_anew(self) -> None:
        """Abandon everything, after an interrupt in the middle of a change, and lock again.

        What was about to be handed out never ends, as nobody has it: it is not waited for.
        """
        self.pull_failed()
        self._give_up()
        self._before = None

    def _give_up(self) -> None:
        """Abandon everything: it is, or may be, another's."""
        self._token = NO_TOKEN
        self._locked_until = 0.0
        self._pull = None
        if not self.window.is_idle:
            self._before = self.window
        self.window.close()
        self._abandon(self._by_partition[self.partition].forget())

    # ── handing out ────────────────────────────────────────────────────────────────────────

    def may_hand_out(self, now: float) -> bool:
        """Say whether messages may be handed to the application at this moment."""
        if not (now < self._locked_until and now < self._permit.until) or self.is_leaving:
            return False
        if self._before is not None:
            if not self._before.is_idle:
                return False  # a handler still works on what was ours before
            self._before = None
        return True

    def take(self, now: float) -> OrderedMessage | None:
        """Return the next message, if there is one that may be handed out now."""
        while self.may_hand_out(now):
            message = self.window.take(now)
            if message is None or not expire(message):
                return message
        return None

    def take_many(self, most: int) -> list[OrderedMessage]:
        """Return messages that may be handed out side by side, each at its own moment."""
        messages: list[OrderedMessage] = []
        while len(messages) < most:
            message = self.take(self._monotonic())
            if message is None:
                break
            messages.append(message)
        return messages

    def follow(self, message: OrderedMessage, most: int) -> Iterator[OrderedMessage]:
        """Yield what comes behind a message that ``take`` returned; see ``Window.follow``."""
        return message.followers(most, self._instant)

    def _instant(self) -> float:
        """Return what time it is, if messages may be handed out at this moment; else 0."""
        now = self._monotonic()
        if now < self._locked_until and now < self._permit.until and not self.is_leaving:
            return now
        return 0.0

    @property
    def has_waiting(self) -> bool:
        """Whether ``take`` may have something."""
        now = self._monotonic()
        return self.may_hand_out(now) and self.window.has_ready(now)

    def next_due(self) -> float | None:
        """Return when a failed message is to be tried again."""
        return self.window.next_due()

    @property
    def is_drained(self) -> bool:
        """Whether all that was handed out has ended, and the broker knows."""
        if self._is_locking:
            return False
        return not self._token or (self.window.is_idle and self.is_told)

    # ── pulling ────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        """How many more deliveries may be held: the window's length, less what is in it."""
        if not self._token or self.is_leaving:
            return 0
        return super().room

    def next_pull(self, max_messages: int, timeout: float) -> Pull:
        """Return the next pull; it waits no longer than the lock can do without."""
        self._asked_at = self._monotonic()
        return super().next_pull(max_messages, min(timeout, self._lock_time / _KEPT_PART))

    def pulled(self, answer: Pulled) -> None:
        """Take in the answer to the pull on its way."""
        if self._pull is None or self._pull.wanted[0].token != self._token:
            self._pull = None  # it belongs to a lock that is gone, and is perhaps asked for anew
            return
        super().pulled(answer)
        if self._token:
            self._locked_until = max(self._locked_until, self._asked_at + self._lock_time)
            self._kept_at = max(self._kept_at, self._asked_at)

    def _agree(self, each: PartitionDeliveries, state: State) -> bool:
        if state.code is ErrorCode.LOCK_LOST:
            self._lose_lock("the broker has a newer one")
            return False
        return super()._agree(each, state)

    def _hold(self, each: PartitionDeliveries, batch: ReceivedBatch) -> None:
        self.held += batch.end - batch.start
        each.held.append(batch)
        self.window.add(batch)

    # ── settling ───────────────────────────────────────────────────────────────────────────

    def settle_answered(self, settle: Settle, response: Response | PulqueError) -> None:
        """Take in the answer to a settle."""
        if isinstance(response, LockLostError):
            if settle.token == self._token:
                self._lose_lock("%s", response)
            return
        super().settle_answered(settle, response)

    def lose_contact(self) -> None:
        """Nothing is lost by silence alone: it is the lock that counts, and it ends by itself."""


class RetryCore(OrderedCore):
    """The messages of a best-effort group that failed, and come again.

    Nobody needs a lock for them: whoever has a partition of a broker shares that broker's.
    """

    def __init__(
        self,
        options: PullOptions,
        partition: PartitionName,
        *,
        order: OrderStrategy,
        permit: Permit,
        wishes: OrderedOptions,
        monotonic: Callable[[], float],
    ) -> None:
        super().__init__(
            options, partition, order=order, permit=permit, wishes=wishes, monotonic=monotonic
        )
        self.window = Window(blocks=wishes.blocks)

    def may_hand_out(self, now: float) -> bool:
        """Say whether messages may be handed to the application at this moment."""
        return now < self._permit.until and not self.is_leaving

    def take(self, now: float) -> OrderedMessage | None:
        """Return the next message, if there is one that may be handed out now."""
        self.window.on_ended = self.on_ended
        return super().take(now)

    def _instant(self) -> float:
        now = self._monotonic()
        return now if self.may_hand_out(now) else 0.0

    @property
    def is_drained(self) -> bool:
        """Whether all that was handed out has ended, and the broker knows."""
        return self.window.is_idle and self.is_told

    @property
    def room(self) -> int:
        """How many more deliveries may be held."""
        return 0 if self.is_leaving else self.max_held - self.held

    def next_route(self) -> Request | None:
        """There is nothing to ask before."""
        return None

    def next_upkeep(self) -> Request | None:
        """The lease is enough."""
        return None

    def next_pull(self, max_messages: int, timeout: float) -> Pull:
        """Return the next pull."""
        return IncomingCore.next_pull(self, max_messages, timeout)

    def pulled(self, answer: Pulled) -> None:
        """Take in the answer to the pull on its way."""
        IncomingCore.pulled(self, answer)

    def lose_contact(self) -> None:
        """Abandon what is not finished: the broker gives it to others."""
        IncomingCore.lose_contact(self)

    def begin_anew(self) -> None:
        """Abandon everything, after an interrupt in the middle of a change."""
        self.window.close()
        self.window = Window(blocks=self._wishes.blocks)
        IncomingCore.begin_anew(self)

    def farewell(self) -> Request | None:
        """Hand back the rest; all locks at that broker must be released by then."""
        self.window.close()
        return IncomingCore.farewell(self)

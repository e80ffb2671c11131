"""What an ordered consumer may hand out of one partition: keys side by side, each key in order.

::

      settled                                             pulled
         │                                                   │
    ─────┼──A──B──A──C──B──D──A──E───────────────────────────┼──→ store order
         │  │  │  └ waits for the first A
         │  │  └ in flight
         │  └ in flight, or waiting for its next attempt

A message is handed out when no earlier one of its order key is unfinished; a message without an
order key waits for nobody. What is finished beyond an unfinished message is not settled yet: the
window is as long as what the consumer may hold, and when it is full, its partition waits.

No I/O and no clock: whoever takes says what time it is. ``ack`` and ``nack`` may be called from
any thread; all else is for one at a time.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal, NamedTuple

from pulque.client.receiving.received_message import (
    ACKED,
    NACKED,
    OPEN,
    ReceivedBatch,
    ReceivedMessage,
    text_of,
)
from pulque.model.actions import GROUP_DECIDES, NO_RETRY
from pulque.model.batch import Flag

__all__ = ["DELAYS", "BlocksName", "OrderedMessage", "Window"]

log = logging.getLogger("pulque.client")

BlocksName = Literal["key", "partition"]
DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each further attempt in place; the last one counts for all that follow."""
_ORDER_KEYS = int(Flag.ORDER_KEYS)
_FOR_GOOD = NO_RETRY
"""As the fate of an attempt: there is no other in its place."""


class OrderedMessage(ReceivedMessage):
    """A message of an ordered group: while it is not finished, no other of its order key comes.

    Under the strict strategy a nack does not send it away: it comes again in its place, after a
    while, and the others of its key wait for it. ``reject`` makes it a dead letter instead.
    """

    __slots__ = ("_fate", "_handed_at", "_key", "_retries", "_window")

    def __init__(
        self,
        batch: ReceivedBatch,
        index: int,
        window: "Window",
        key: bytes | None,
        retries: int = 0,
    ) -> None:
        # Window.follow does the same without calling this.
        self._batch = batch
        self._index = index
        self._window = window
        self._key = key
        """None if nobody needed to know it."""
        self._retries = retries
        self._fate: int | None = None
        """How this attempt ended: for good, or with another after so many milliseconds."""
        self._handed_at = 0.0

    def ack(self) -> None:
        """Say that it is done. Nothing happens if it is another consumer's by now."""
        if self._fate is None:
            self._batch.states[self._index] = ACKED  # first, as a forked child may not
            self._fate = _FOR_GOOD
            window = self._window
            window.ended.append(self)
            if window.is_starved:
                window.tell_ended()

    def _nack(self, reason: str, delay_ms: int) -> None:
        if self._fate is not None:
            return
        window, batch, index = self._window, self._batch, self._index
        if window.in_place and delay_ms != NO_RETRY:
            batch.states[index] = OPEN  # as it is, but a forked child may not
            log.info("%r failed, and is tried again in its place: %s", self, reason)
            self._fate = delay_ms
        else:
            batch.nacks[index] = (text_of(reason), delay_ms)
            # No call from here to the end: Ctrl-C finds all of it done, or nothing.
            batch.states[index] = NACKED
            self._fate = _FOR_GOOD
        window.ended.append(self)
        if window.is_starved:
            window.tell_ended()

    @property
    def attempt(self) -> int:
        """Which delivery to this group it is, from 1; those in place to this consumer count."""
        return super().attempt + self._retries

    @property
    def is_finished(self) -> bool:
        """Whether this attempt ended: it was acked or nacked here."""
        return self._fate is not None or super().is_finished

    @property
    def is_abandoned(self) -> bool:
        """Whether it is no longer this consumer's: to ack or nack it has no effect."""
        return super().is_abandoned or not self._window.is_open

    def followers(self, most: int, instant: Callable[[], float]) -> "Iterator[OrderedMessage]":
        """Yield what comes behind it, one after the other; see ``Window.follow``."""
        return self._window.follow(self, most, instant)

    @property
    def handed_at(self) -> float:
        """When it was certainly this consumer's to handle, by the monotonic clock."""
        return self._handed_at

    @property
    def token(self) -> int:
        """The token of the lock under which it was handed out; it grows with every owner."""
        return self._window.token


class Window:
    """What one consumer holds of one partition under one lock.

    Args:
        token: The lock's.
        in_place: Whether a failed message is tried again in its place (strict).
        blocks: What waits for it meanwhile: its order key, or the whole partition.
        delays: Seconds before each further attempt.
    """

    def __init__(
        self,
        *,
        token: int = 0,
        in_place: bool = False,
        blocks: BlocksName = "key",
        delays: tuple[float, ...] = DELAYS,
    ) -> None:
        self.token = token
        self.in_place = in_place
        self.is_open = True
        """Whether what was handed out is still ours."""
        self.ended: deque[OrderedMessage] = deque()
        """Handed out and ended since; for ``ack`` and ``nack``."""
        self.is_starved = False
        """Whether ``take`` found nothing: who ends a message has to tell."""
        self.on_ended: Callable[[], None] | None = None
        """Called by ``ack`` and ``nack``, in their thread, when ``take`` found nothing before."""
        self._blocks_all = blocks == "partition"
        self._delays = delays or DELAYS
        self._fresh: deque[ReceivedBatch] = deque()
        self._next = 0
        """The index of the next message in the first of them."""
        self._released: deque[_Behind] = deque()
        """Their key is free for them now."""
        self._busy: dict[bytes, OrderedMessage | None] = {}
        """By order key: which one is handed out or waits for its next attempt; None if the next
        one is released."""
        self._behind: dict[bytes, deque[_Behind]] = {}
        """By order key: those that wait for it."""
        self._alone: OrderedMessage | None = None
        """The only one in flight, while nobody needed to know its key."""
        self._retries: list[tuple[float, int, OrderedMessage]] = []
        self._order = count()
        self._again = 0
        """How many of those in flight failed before."""
        self.in_flight = 0
        """How many are handed out and not finished."""

    # ── messages come in, and end ──────────────────────────────────────────────────────────

    def add(self, batch: ReceivedBatch) -> None:
        """Take in ``start..end`` of a batch; it follows what is here."""
        if not self._fresh:
            self._next = batch.start
        self._fresh.append(batch)

    def tell_ended(self) -> None:
        """Tell whoever waits for a message to end that one has."""
        if self.is_starved and self.on_ended is not None:
            self.is_starved = False
            self.on_ended()

    def close(self) -> None:
        """Hand out nothing more; what is handed out is no longer ours."""
        self.is_open = False
        self._fresh.clear()
        self._released.clear()
        self._busy.clear()
        self._behind.clear()
        self._retries.clear()
        self._alone = None

    # ── messages go out ────────────────────────────────────────────────────────────────────

    def has_ready(self, now: float) -> bool:
        """Say whether it is worth a ``take``."""
        if self.ended or (self._retries and self._retries[0][0] <= now):
            return True
        return bool(self._fresh or self._released) and not self._is_blocked

    def next_due(self) -> float | None:
        """Return when a failed message is to be tried again."""
        return self._retries[0][0] if self._retries else None

    @property
    def is_idle(self) -> bool:
        """Whether all that was handed out has ended."""
        return self.in_flight == len(self.ended)

    def take(self, now: float) -> OrderedMessage | None:
        """Return the next message to be handled, or None if all have to wait."""
        found = self._take(now)
        if found is None:
            self.is_starved = True
            if self.ended:  # since then, and nobody was told
                found = self._take(now)
        return found

    def follow(
        self, message: OrderedMessage, most: int, instant: Callable[[], float]
    ) -> Iterator[OrderedMessage]:
        """Yield the messages behind one, each when the one before has ended: the short way.

        Whoever handles one after the other never needs to know their keys. It ends wherever
        anything else is to be decided; ``take`` goes on then.

        No lock is needed. A message that ended is claimed first, so that the window is not idle;
        only then is ``instant`` asked. Whoever makes it say no, and finds the window idle after
        that, knows that nothing goes out any more.

        Args:
            message: As ``take`` returned it last.
            most: How many, at most.
            instant: Returns what time it is if messages may be handed out, else 0.
        """
        batch, ended = message._batch, self.ended  # noqa: SLF001  # its own
        start = message._index + 1  # noqa: SLF001
        new = OrderedMessage.__new__
        if self._retries or batch.may_expire:
            return
        for index in range(start, start + most):
            # The last one of a batch goes the long way: another batch comes after it.
            if self._alone is not message or not batch.settled <= index < batch.end - 1:
                return
            if not ended or message._fate != _FOR_GOOD:  # noqa: SLF001
                return
            ended.popleft()
            now = instant()
            if not now or not self.is_open:
                ended.append(message)
                return
            message = new(OrderedMessage)  # the one before, from now on
            message._batch = batch  # noqa: SLF001
            message._index = index  # noqa: SLF001
            message._window = self  # noqa: SLF001
            message._key = message._fate = None  # noqa: SLF001
            message._retries = 0  # noqa: SLF001
            message._handed_at = now  # noqa: SLF001
            self._next = index + 1
            self._alone = message
            yield message

    def _take(self, now: float) -> OrderedMessage | None:
        if self.ended:
            self._take_in_ended(now)
        found = self._take_due(now) if self._retries else None
        if found is None and not self._is_blocked:
            found = self._take_released() or self._take_fresh()
        if found is not None:
            found._handed_at = now  # noqa: SLF001  # its own
            self.in_flight += 1
        return found

    @property
    def _is_blocked(self) -> bool:
        return self._blocks_all and bool(self._retries or self._again)

    def _take_in_ended(self, now: float) -> None:
        ended = self.ended
        while ended:
            message = ended.popleft()
            self.in_flight -= 1
            if message._retries:  # noqa: SLF001
                self._again -= 1
            if message._fate != _FOR_GOOD:  # noqa: SLF001
                self._try_again(message, now)
            elif message is self._alone:
                self._alone = None
            else:
                self._free_key(message)

    def _try_again(self, message: OrderedMessage, now: float) -> None:
        retries, delay_ms = message._retries, message._fate  # noqa: SLF001  # its own
        if delay_ms is None or delay_ms == GROUP_DECIDES:
            wait = self._delays[min(retries, len(self._delays) - 1)]
        else:
            wait = delay_ms / 1000
        if message is self._alone:
            self._name_alone()
        heapq.heappush(self._retries, (now + wait, next(self._order), message))

    def _free_key(self, message: OrderedMessage) -> None:
        """Let the next one of a finished message's key go."""
        key = message._key  # noqa: SLF001
        if key and self._busy.get(key) is message:
            self._release_next(key)

    def _release_next(self, key: bytes) -> None:
        behind = self._behind.get(key)
        if behind is None:
            del self._busy[key]
            return
        self._busy[key] = None
        self._released.append(behind.popleft())
        if not behind:
            del self._behind[key]

    def _take_due(self, now: float) -> OrderedMessage | None:
        while self._retries and self._retries[0][0] <= now:
            failed = heapq.heappop(self._retries)[2]
            batch, index, key = failed._batch, failed._index, failed._key  # noqa: SLF001
            if not _is_open(batch, index):
                self._free_key(failed)  # it was skipped meanwhile
                continue
            again = OrderedMessage(batch, index, self, key, failed._retries + 1)  # noqa: SLF001
            if key:
                self._busy[key] = again
            self._again += 1
            return again
        return None

    def _take_released(self) -> OrderedMessage | None:
        while self._released:
            batch, index, key = self._released.popleft()
            if _is_open(batch, index):
                self._busy[key] = message = OrderedMessage(batch, index, self, key)
                return message
            self._release_next(key)
        return None

    def _take_fresh(self) -> OrderedMessage | None:
        if self._alone is not None:
            self._name_alone()
        while self._fresh:
            batch = self._fresh[0]
            index = max(self._next, batch.settled)
            if index >= batch.end:
                self._drop_first()
                continue
            self._next = index + 1
            message = self._deal(batch, index)
            if self._next >= batch.end:
                self._drop_first()
            if message is not None:
                return message
        return None

    def _drop_first(self) -> None:
        self._fresh.popleft()
        if self._fresh:
            self._next = self._fresh[0].start

    def _deal(self, batch: ReceivedBatch, index: int) -> OrderedMessage | None:
        """Return a message if it may go; else put it behind those of its key."""
        busy = self._busy
        if not busy and not self.in_flight:
            self._alone = message = OrderedMessage(batch, index, self, None)
            return message
        key = _key_of(batch, index)
        if key in busy:
            behind = self._behind.get(key)
            if behind is None:
                behind = self._behind[key] = deque()
            behind.append(_Behind(batch, index, key))
            return None
        message = OrderedMessage(batch, index, self, key)
        if key:
            busy[key] = message
        return message

    def _name_alone(self) -> None:
        """Find out the key of the only one in flight: others are to go beside it."""
        message, self._alone = self._alone, None
        if message is not None:
            key = _key_of(message._batch, message._index)  # noqa: SLF001
            message._key = key  # noqa: SLF001
            if key:
                self._busy[key] = message


class _Behind(NamedTuple):
    """A message that waits for others of its key."""

    batch: ReceivedBatch
    at: int
    key: bytes


def _key_of(batch: ReceivedBatch, index: int) -> bytes:
    return batch.part(index, _ORDER_KEYS)


def _is_open(batch: ReceivedBatch, index: int) -> bool:
    """Say whether a message is still to be handled: it was not settled, skipped or lost."""
    return batch.settled <= index < batch.end and batch.states[index] == OPEN

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
from collections.abc import Callable
from itertools import count
from typing import Literal

from pulque.client.received import ACKED, OPEN, ReceivedBatch, ReceivedMessage
from pulque.model.actions import GROUP_DECIDES, NO_RETRY
from pulque.model.batch import Flag

__all__ = ["DELAYS", "BlocksName", "OrderedMessage", "Window"]

log = logging.getLogger("pulque.client")

BlocksName = Literal["key", "partition"]
DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each further attempt in place; the last one counts for all that follow."""
_ORDER_KEYS = int(Flag.ORDER_KEYS)


class OrderedMessage(ReceivedMessage):
    """A message of an ordered group: while it is not finished, no other of its order key comes.

    Under the strict strategy a nack does not send it away: it comes again in its place, after a
    while, and the others of its key wait for it. ``reject`` makes it a dead letter instead.
    """

    __slots__ = ("_handed_at", "_has_ended", "_retries", "_window")

    def __init__(
        self, batch: ReceivedBatch, index: int, window: "Window", retries: int = 0
    ) -> None:
        self._batch = batch
        self._index = index
        self._window = window
        self._retries = retries
        self._has_ended = False
        self._handed_at = 0.0

    def ack(self) -> None:
        """Say that it is done. Nothing happens if it is another consumer's by now."""
        if not self._has_ended:
            self._has_ended = True
            self._batch.states[self._index] = ACKED
            self._window.ended(self, None)

    def _nack(self, reason: str, delay_ms: int) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._window.in_place and delay_ms != NO_RETRY:
            log.info("%r failed, and is tried again in its place: %s", self, reason)
            self._window.ended(self, delay_ms)
            return
        super()._nack(reason, delay_ms)
        self._window.ended(self, None)

    @property
    def attempt(self) -> int:
        """Which delivery to this group it is, from 1; those in place to this consumer count."""
        return super().attempt + self._retries

    @property
    def is_finished(self) -> bool:
        """Whether this attempt ended: it was acked or nacked here."""
        return self._has_ended or super().is_finished

    @property
    def is_abandoned(self) -> bool:
        """Whether it is no longer this consumer's: to ack or nack it has no effect."""
        return super().is_abandoned or not self._window.is_open

    @property
    def handed_at(self) -> float:
        """When it was certainly this consumer's to handle, by the monotonic clock."""
        return self._handed_at

    @property
    def token(self) -> int:
        """The token of the lock under which it was handed out; it grows with every owner."""
        return self._window.token


class _Line:
    """The messages of one order key: one that is handed out or waits, and those behind it."""

    __slots__ = ("behind", "current")

    def __init__(self, current: OrderedMessage | None) -> None:
        self.current = current
        self.behind: deque[tuple[ReceivedBatch, int]] = deque()


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
        self.on_ended: Callable[[], None] | None = None
        """Called by ``ack`` and ``nack``, in their thread, when ``take`` found nothing before."""
        self._blocks_all = blocks == "partition"
        self._delays = delays or DELAYS
        self._fresh: deque[ReceivedBatch] = deque()
        self._next = 0
        """The index of the next message in the first of them."""
        self._released: deque[tuple[ReceivedBatch, int]] = deque()
        """Their key is free for them now."""
        self._lines: dict[bytes, _Line] = {}
        self._alone: OrderedMessage | None = None
        """The only one in flight, while nobody needed to know its key."""
        self._retries: list[tuple[float, int, OrderedMessage]] = []
        self._order = count()
        self._again = 0
        """How many of those in flight failed before."""
        self._ended: deque[tuple[OrderedMessage, int | None]] = deque()
        self._is_starved = False
        self.in_flight = 0
        """How many are handed out and not finished."""

    # ── messages come in, and end ──────────────────────────────────────────────────────────

    def add(self, batch: ReceivedBatch) -> None:
        """Take in ``start..end`` of a batch; it follows what is here."""
        if not self._fresh:
            self._next = batch.start
        self._fresh.append(batch)

    def ended(self, message: OrderedMessage, delay_ms: int | None) -> None:
        """Take note that an attempt ended: for good, or with another after a delay."""
        self._ended.append((message, delay_ms))
        if self._is_starved and self.on_ended is not None:
            self._is_starved = False
            self.on_ended()

    def close(self) -> None:
        """Hand out nothing more; what is handed out is no longer ours."""
        self.is_open = False
        self._fresh.clear()
        self._released.clear()
        self._lines.clear()
        self._retries.clear()
        self._alone = None

    # ── messages go out ────────────────────────────────────────────────────────────────────

    def has_ready(self, now: float) -> bool:
        """Say whether it is worth a ``take``."""
        if self._ended or (self._retries and self._retries[0][0] <= now):
            return True
        return bool(self._fresh or self._released) and not self._is_blocked

    def next_due(self) -> float | None:
        """Return when a failed message is to be tried again."""
        return self._retries[0][0] if self._retries else None

    @property
    def is_idle(self) -> bool:
        """Whether all that was handed out has ended."""
        return self.in_flight == len(self._ended)

    def take(self, now: float) -> OrderedMessage | None:
        """Return the next message to be handled, or None if all have to wait."""
        found = self._take_following(now) or self._take(now)
        if found is None:
            self._is_starved = True
            if self._ended:  # since then, and nobody was told
                found = self._take(now)
        return found

    def _take_following(self, now: float) -> OrderedMessage | None:
        """Return the message after the only one that was in flight: the short way.

        Whoever handles one after the other never needs to know their keys.
        """
        alone, ended = self._alone, self._ended
        if alone is None or len(ended) != 1 or ended[0][0] is not alone:
            return None
        batch = alone._batch  # noqa: SLF001
        index = self._next
        if not self._fresh or self._fresh[0] is not batch or index + 1 >= batch.end:
            return None
        if ended[0][1] is not None or index < batch.settled or self._retries:
            return None
        ended.clear()
        self._next = index + 1
        self._alone = message = OrderedMessage(batch, index, self)
        message._handed_at = now  # noqa: SLF001
        return message

    def _take(self, now: float) -> OrderedMessage | None:
        if self._ended:
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
        ended = self._ended
        while ended:
            message, delay_ms = ended.popleft()
            self.in_flight -= 1
            if message._retries:  # noqa: SLF001
                self._again -= 1
            if delay_ms is not None:
                self._try_again(message, delay_ms, now)
            elif message is self._alone:
                self._alone = None
            else:
                self._free_key(message)

    def _try_again(self, message: OrderedMessage, delay_ms: int, now: float) -> None:
        retries = message._retries  # noqa: SLF001  # its own
        if delay_ms == GROUP_DECIDES:
            wait = self._delays[min(retries, len(self._delays) - 1)]
        else:
            wait = delay_ms / 1000
        if message is self._alone:
            self._name_alone()
        heapq.heappush(self._retries, (now + wait, next(self._order), message))

    def _free_key(self, message: OrderedMessage) -> None:
        """Let the next one of a finished message's key go."""
        key = _key_of(message._batch, message._index)  # noqa: SLF001
        line = self._lines.get(key)
        if line is None or line.current is not message:
            return
        line.current = None
        self._release_next(key, line)

    def _release_next(self, key: bytes, line: _Line) -> None:
        if line.behind:
            self._released.append(line.behind.popleft())
        else:
            del self._lines[key]

    def _take_due(self, now: float) -> OrderedMessage | None:
        while self._retries and self._retries[0][0] <= now:
            failed = heapq.heappop(self._retries)[2]
            batch, index = failed._batch, failed._index  # noqa: SLF001
            if not _is_open(batch, index):
                self._free_key(failed)  # it was skipped meanwhile
                continue
            again = OrderedMessage(batch, index, self, failed._retries + 1)  # noqa: SLF001
            line = self._lines.get(_key_of(batch, index))
            if line is not None:
                line.current = again
            self._again += 1
            return again
        return None

    def _take_released(self) -> OrderedMessage | None:
        while self._released:
            batch, index = self._released.popleft()
            key = _key_of(batch, index)
            line = self._lines[key]
            if _is_open(batch, index):
                line.current = message = OrderedMessage(batch, index, self)
                return message
            self._release_next(key, line)
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
        lines = self._lines
        if not lines and not self.in_flight:
            self._alone = message = OrderedMessage(batch, index, self)
            return message
        key = _key_of(batch, index)
        if not key:
            return OrderedMessage(batch, index, self)
        line = lines.get(key)
        if line is not None:
            line.behind.append((batch, index))
            return None
        message = OrderedMessage(batch, index, self)
        lines[key] = _Line(message)
        return message

    def _name_alone(self) -> None:
        """Find out the key of the only one in flight: others are to go beside it."""
        message, self._alone = self._alone, None
        if message is not None:
            key = _key_of(message._batch, message._index)  # noqa: SLF001
            if key:
                self._lines[key] = _Line(message)


def _key_of(batch: ReceivedBatch, index: int) -> bytes:
    return batch.part(index, _ORDER_KEYS)


def _is_open(batch: ReceivedBatch, index: int) -> bool:
    """Say whether a message is still to be handled: it was not settled, skipped or lost."""
    return batch.settled <= index < batch.end and batch.states[index] == OPEN

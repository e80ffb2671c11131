"""A message that a consumer holds, and the batch it came in.

To ack a message is to store one byte: the consumer finds later, batch by batch, how far the
prefix of finished messages reaches.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from math import ceil
from typing import NoReturn

from pulque.client.arguments.due_times import instant_of
from pulque.client.connection.fork_safety import forked
from pulque.client.receiving.log_records import Single
from pulque.clock import wall_ms
from pulque.errors import UsageError
from pulque.model.actions import EXPIRED, GROUP_DECIDES, NO_RETRY
from pulque.model.batch import Flag
from pulque.model.gathered import Gathered
from pulque.model.groups import Filter
from pulque.model.message import Message, StoredBatch, tags_in, unreadable_in
from pulque.model.names import Group, PartitionName, is_broadcast
from pulque.model.positions import ConsumeSequence, PullSequence, Tenure

__all__ = [
    "ACKED",
    "DEFERRED",
    "NACKED",
    "OPEN",
    "DeliveryGap",
    "ReceivedBatch",
    "ReceivedMessage",
    "ToDefer",
    "UnreadableRange",
    "expire",
    "text_of",
]

log = logging.getLogger("pulque.client")

OPEN = 0
ACKED = 1
NACKED = 2
DEFERRED = 3
"""As a state: it is to be delivered again at a certain time, and a delay server is to have it."""
ANY_DELAY_MS = 2**62
"""As the longest delay, until a broker says what it allows."""
_MAX_REASON = 1000
LONGEST_DEFERRED_MS = 2 * 366 * 24 * 3600 * 1000
"""How far ahead a message may be wanted again: as delay servers have it by default."""
_EXPIRES = int(Flag.EXPIRES)
_HAS_TAGS = int(Flag.TAGS)
_TAGGED_ONLY = int(Flag.TAGS | Flag.KEYS | Flag.ORDER_KEYS)
"""If only the first of these is there, a message begins with its tags."""


@lru_cache(maxsize=4096)
def _matches(wanted: Filter, encoded: bytes) -> bool:
    """Compare the tags of a message: most have those of another."""
    return wanted.matches(tags_in(encoded))


class _ParentStates(bytearray):
    """The states of messages in a child of fork: only the parent can change them."""

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise forked(
            "message", "ack, nack or reject it in the process that pulled it, which still holds it"
        )


class ReceivedBatch(StoredBatch):
    """A batch of which a consumer holds messages ``settled..end``.

    Attributes:
        states: For each message ``OPEN``, ``ACKED`` or ``NACKED``.
        nacks: Reason and delay of the nacked ones, by index.
        pull_base: The pull sequence that the message at index 0 has or would have.
        reach: Where the deliveries end that this stands for, counted from ``pull_base``, if the
            messages do not follow each other: those between them are nothing for the group.
        settled: Messages before this index are settled, or were never delivered.
        start: Messages before this index are handed out.
        lost: Ranges of indices that the broker gave to others.
        max_delay_ms: The longest delay that a nack may ask for.
        deferred: Reason and due time of those that a delay server is to have, by index.
        to_defer: Where to leave word of them; None if there are no delay servers.
    """

    __slots__ = (
        "__weakref__",
        "deferred",
        "end",
        "lost",
        "max_delay_ms",
        "nacks",
        "pull_base",
        "reach",
        "settled",
        "start",
        "states",
        "tenure",
        "to_defer",
    )

    def __init__(  # noqa: PLR0913  # a stored batch, and what of it was delivered
        self,
        data: bytes,
        *,
        partition: PartitionName,
        first_sequence: ConsumeSequence,
        stored_at_ms: int,
        pull_base: int,
        start: int,
        end: int,
        tenure: Tenure,
    ) -> None:
        super().__init__(
            data,
            partition=partition,
            first_sequence=first_sequence,
            stored_at_ms=stored_at_ms,
        )
        self.states = bytearray(len(self))
        self.nacks: dict[int, tuple[str, int]] = {}
        self.pull_base = pull_base
        self.start = start
        self.settled = start
        self.end = end
        self.tenure = tenure
        self.lost: tuple[range, ...] = ()
        self.max_delay_ms = ANY_DELAY_MS
        self.deferred: dict[int, tuple[str, int]] = {}
        self.to_defer: ToDefer | None = None
        self.reach = 0

    @classmethod
    def of_single(
        cls, single: Single, partition: PartitionName, ahead: int, tenure: Tenure
    ) -> "ReceivedBatch":
        """Return a batch of one message, without looking at it again.

        Args:
            single: It.
            partition: Where it is stored.
            ahead: By how much its pull sequence is ahead of its consume sequence.
            tenure: Of the broker that handed it out.
        """
        data, header, first, stored_at_ms, data_start, _ = single
        batch = cls.__new__(cls)
        batch.header = header
        batch.data = data
        batch.partition = partition
        batch.first_sequence = first
        batch.stored_at_ms = stored_at_ms
        batch.broker_group = batch.group = ""
        batch.places = batch.stored_times = None
        batch.reach = 0
        batch._columns = {}  # noqa: SLF001  # its own
        batch._body_starts = None  # noqa: SLF001
        batch.starts = [data_start, len(data)]
        batch.states = bytearray(1)
        batch.nacks = {}
        batch.pull_base = ahead + first
        batch.start = batch.settled = 0
        batch.end = 1
        batch.tenure = tenure
        batch.lost = ()
        batch.max_delay_ms = ANY_DELAY_MS
        batch.deferred = {}
        batch.to_defer = None
        return batch

    @property
    def may_expire(self) -> bool:
        """Whether any message in it has an expiry."""
        return bool(self.header.flags & _EXPIRES)

    def after_fork(self) -> None:
        """Refuse acks and nacks in a child: nobody would tell the broker.

        An iteration that goes on there hands out none of these messages: the parent does.
        """
        self.states = _ParentStates(self.states)
        self.lost = (range(len(self)),)

    def gather(self, found: Gathered) -> None:
        """Take note that the messages were gathered out of many batches, with gaps between."""
        self.places, self.stored_times = found.places, found.stored_at_ms
        self.reach = found.places[self.end - 1] + 1

    @property
    def first_pull(self) -> int:
        """The pull sequence of the first message that is not handed out."""
        return self.pull_of(self.start)

    def pull_of(self, index: int) -> int:
        """Return the pull sequence of the message at an index."""
        return self.pull_base + (index if self.places is None else self.places[index])

    def pull_until(self, index: int) -> int:
        """Return where the deliveries end that belong to the messages before an index."""
        if self.places is None:
            return self.pull_base + index
        return self.pull_base + (self.reach if index >= self.end else self.places[index])

    def index_at(self, pull: int) -> int:
        """Return the index of the first message at or after a pull sequence."""
        place = pull - self.pull_base
        return place if self.places is None else bisect_left(self.places, place)

    def cut(self, pull: int) -> None:
        """End before a pull sequence."""
        self.end = max(self.index_at(pull), self.settled)
        self.reach = min(self.reach, max(pull - self.pull_base, 0))

    def finished_until(self) -> int:
        """Return the index after the last of the finished ones that follow the settled ones."""
        found = self.states.find(OPEN, self.settled, self.end)
        until = self.end if found < 0 else found
        if self.deferred:
            # A copy, as another thread may nack meanwhile.
            return min(until, *(at for at in tuple(self.deferred) if at >= self.settled), until)
        return until

    def window(self, start: int, end: int) -> "ReceivedBatch":
        """Return a part of it that goes its own way; nothing may be handed out yet."""
        part = ReceivedBatch.__new__(ReceivedBatch)
        for name in _SLOTS:
            setattr(part, name, getattr(self, name))
        part.states = bytearray(len(self))
        part.nacks = {}
        part.deferred = {}
        part.start = part.settled = start
        part.end = end
        if self.places is not None and end < self.end:
            part.reach = self.places[end]
        return part

    def is_wanted(self, wanted: Filter) -> bool:
        """Say whether a filter wants all that was delivered: that is how a broker gathers it."""
        if self.places is None and self.end - self.start > 1:
            return False
        return all(_matches(wanted, tags) for tags in set(self._encoded_tags()))

    def _encoded_tags(self) -> Iterable[bytes]:
        """Return the tags of each message that was delivered."""
        start, end = self.start, self.end
        flags = self.header.flags
        if flags & _TAGGED_ONLY != _HAS_TAGS:
            return [self.part(index, _HAS_TAGS) for index in range(start, end)]
        data, starts, sizes = self.data, self.starts, self.column("tags_size")
        self.body_starts()  # it checks the sizes
        return [data[starts[i] : starts[i] + sizes[i]] for i in range(start, end)]

    def unreadable(self) -> list[tuple[int, int, str]]:
        """Return runs of delivered messages that cannot be decoded: start, end, and why."""
        runs: list[tuple[int, int, str]] = []
        for index, problem in unreadable_in(self, self.start, self.end).items():
            if runs and runs[-1][1:] == (index, problem) and self.places is None:
                runs[-1] = runs[-1][0], index + 1, problem
            else:
                runs.append((index, index + 1, problem))
        return runs

    def rejected(self, start: int, end: int, problem: str) -> "UnreadableRange":
        """Return what stands for messages of one of these runs."""
        first, length = self.pull_of(start), end - start
        return UnreadableRange(first, length, self.tenure, self.sequence_of(start), problem)

    def without(self, unreadable: Iterable[tuple[int, int, str]]) -> "Iterator[ReceivedBatch]":
        """Yield the parts of what was delivered between such runs; nothing is handed out yet."""
        at = self.start
        for start, end in (*((s, e) for s, e, _ in unreadable), (self.end, self.end)):
            if at < start:
                yield self if start - at == self.end - self.start else self.window(at, start)
            at = end

    def runs(self, wanted: Filter) -> Iterator[tuple[int, int, bool]]:
        """Divide what was delivered into runs that a filter wants and runs that it does not.

        Yields:
            Start, end, and whether they are wanted.
        """
        at, end = self.start, self.end
        for start, stop in self._wanted_runs(wanted):
            if at < start:
                yield at, start, False
            yield start, stop, True
            at = stop
        if at < end:
            yield at, end, False

    def _wanted_runs(self, wanted: Filter) -> Iterator[tuple[int, int]]:
        if not self.header.flags & _HAS_TAGS:
            return
        first = last = self.start
        for index in self._may_match(wanted):
            if wanted.matches(Message(self, index).tags):
                if index > last:
                    if last > first:
                        yield first, last
                    first = index
                last = index + 1
        if last > first:
            yield first, last

    def _may_match(self, wanted: Filter) -> Iterable[int]:
        """Return those whose tag bits allow it: that tells most of them apart, and is cheap."""
        bits = self.column("tag_bits")
        found: Iterable[int] = range(self.start, self.end)
        if all_bits := wanted.all_bits:
            found = [i for i in found if bits[i] & all_bits == all_bits]
        any_bits = wanted.any_bits
        if len(any_bits) == 1:
            (one,) = any_bits
            return [i for i in found if bits[i] & one == one]
        if any_bits:
            return [i for i in found if any(bits[i] & one == one for one in any_bits)]
        return found

    def lose(self, start: int, end: int) -> int:
        """Take note that the broker gave ``start..end`` to others; return how many they are."""
        if start < end:
            self.lost += (range(start, end),)
        return end - start


ToDefer = dict[tuple[ReceivedBatch, int], None]
"""Messages that a delay server is to have, in order: batch and index."""
_SLOTS = (*StoredBatch.__slots__, *(set(ReceivedBatch.__slots__) - {"__weakref__"}))


class DeliveryGap:
    """Deliveries without messages: there is nothing to do but settle them.

    They are not stored any more, or are nothing that the group wants. It stands in the place of
    a ``ReceivedBatch``, and its attributes are those.
    """

    __slots__ = ("end", "nacks", "pull_base", "settled", "states", "tenure")

    def __init__(self, pull_base: int, length: int, tenure: Tenure) -> None:
        self.pull_base = pull_base
        self.settled = 0
        self.end = length
        self.tenure = tenure
        self.states = b""
        self.nacks: dict[int, tuple[str, int]] = {}

    @property
    def first_pull(self) -> int:
        """The pull sequence of the first of them."""
        return self.pull_base

    def finished_until(self) -> int:
        """Return the index after the last: all are finished."""
        return self.end

    def pull_until(self, index: int) -> int:
        """Return the pull sequence at an index."""
        return self.pull_base + index

    def index_at(self, pull: int) -> int:
        """Return the index of a pull sequence."""
        return pull - self.pull_base

    def cut(self, pull: int) -> None:
        """End before a pull sequence."""
        self.end = max(pull - self.pull_base, self.settled)

    def lose(self, start: int, end: int) -> int:
        """There is nothing to lose."""
        del start, end
        return 0


class UnreadableRange(DeliveryGap):
    """Deliveries whose messages cannot be decoded: they are rejected, not handed out.

    The broker makes a dead letter of them, which has their bytes. After a restart they are
    delivered and rejected again, so that nothing need be kept.
    """

    __slots__ = ("first_sequence", "reason")

    def __init__(
        self,
        pull_base: int,
        length: int,
        tenure: Tenure,
        first_sequence: int,
        problem: str,
    ) -> None:
        super().__init__(pull_base, length, tenure)
        self.first_sequence = first_sequence
        self.reason = text_of(f"unreadable: {problem}")
        self.states = bytes([NACKED]) * length
        self.nacks = dict.fromkeys(range(length), (self.reason, NO_RETRY))


class ReceivedMessage(Message):
    """A message to be handled, and to be acked or nacked when that is done.

    ``ack`` and ``nack`` may be called from any thread. They cost next to nothing and do not
    wait: the consumer tells the broker with its next pull, or within 200 ms.
    """

    __slots__ = ()
    _batch: ReceivedBatch

    def ack(self) -> None:
        """Say that it is done. Nothing happens if the broker gave it to another meanwhile."""
        self._batch.states[self._index] = ACKED

    def nack(
        self,
        reason: str = "",
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
    ) -> None:
        """Say that it could not be done, and is to be delivered again.

        After the last attempt that the group allows it becomes a dead letter instead.

        Args:
            reason: Why; it is kept with the message.
            delay: How long to wait, in seconds or as a timedelta; 0 is at once, and None leaves
                it to the group's policy. What is longer than the broker's own limit (half of its
                retention, say) waits at a delay server.
            at: When to deliver it again; with a time zone. Until then a delay server has it.

        Raises:
            UsageError: The delay is negative, no number, or longer than is allowed; the instant
                has no time zone, or is too far ahead.
        """
        batch = self._batch
        if at is not None:
            if delay is not None:
                raise UsageError(f"delay={delay!r} and at={at!r}: only one of them is allowed")
            self._nack_at(reason, at)
            return
        longest_ms = batch.max_delay_ms
        if batch.to_defer is not None:
            longest_ms = max(longest_ms, LONGEST_DEFERRED_MS)
        delay_ms = _delay_ms_of(delay, longest_ms)
        if delay_ms > batch.max_delay_ms:
            self._defer(reason, wall_ms() + delay_ms)
        else:
            self._nack(reason, delay_ms)

    def reject(self, reason: str = "") -> None:
        """Say that it can never be done: there is no other attempt, it is a dead letter at once.

        Args:
            reason: Why; it is kept with the message.
        """
        self._nack(reason, NO_RETRY)

    def _nack(self, reason: str, delay_ms: int) -> None:
        self._batch.nacks[self._index] = (text_of(reason), delay_ms)
        self._batch.states[self._index] = NACKED

    def _nack_at(self, reason: str, at: datetime) -> None:
        batch = self._batch
        due_ms, now_ms = instant_of(at, "at"), wall_ms()
        longest_ms = batch.max_delay_ms if batch.to_defer is None else LONGEST_DEFERRED_MS
        if due_ms - now_ms > longest_ms:
            hint = "" if batch.to_defer is not None else ", as there is no delay server here"
            raise UsageError(
                f"at is {at!r}, {(due_ms - now_ms) / 1000:,.0f} s ahead; at most "
                f"{longest_ms / 1000:,.0f} s are allowed{hint}"
            )
        if due_ms > now_ms and batch.to_defer is not None:
            self._defer(reason, due_ms)
        else:
            self._nack(reason, max(0, due_ms - now_ms))

    def _defer(self, reason: str, due_ms: int) -> None:
        batch, index = self._batch, self._index
        assert batch.to_defer is not None  # noqa: S101  # the callers looked
        batch.deferred[index] = (text_of(reason), due_ms)
        batch.states[index] = DEFERRED
        batch.to_defer[batch, index] = None

    @property
    def is_finished(self) -> bool:
        """Whether it was acked or nacked here."""
        return self._batch.states[self._index] != OPEN

    @property
    def is_abandoned(self) -> bool:
        """Whether it is no longer this consumer's: to ack or nack it has no effect.

        The broker gave it to another, as this consumer was silent for its lease; or the broker
        was, and will deliver it again.
        """
        return any(self._index in lost for lost in self._batch.lost)

    @property
    def pull_sequence(self) -> PullSequence:
        """Its ordinal among all deliveries of this partition to this consumer."""
        return PullSequence(self._batch.pull_of(self._index))


def expire(message: ReceivedMessage) -> bool:
    """Return whether a message is not to be handed out, as it has expired.

    It becomes a dead letter of its group. A broadcast consumer only passes it over: nobody looks
    for dead letters of a single consumer.
    """
    batch, index = message._batch, message._index  # noqa: SLF001  # of this module
    if batch.states[index] != OPEN:
        return True  # as was found before
    if not 0 < message.expires_at_ms <= wall_ms():
        return False
    log.info("expired, and not handed out: %r", message)
    if is_broadcast(Group(batch.group)):
        message.ack()
    else:
        message.reject(EXPIRED)
    return True


def text_of(reason: str) -> str:
    """Return the reason of a nack as it is sent."""
    if not isinstance(reason, str):
        raise UsageError(f"reason is {reason!r}; a str is allowed, as str(error)")
    # The names of files may hold what is no UTF-8, and errors are full of such names.
    return reason[:_MAX_REASON].encode(errors="backslashreplace").decode()


def _delay_ms_of(delay: object, longest_ms: int) -> int:
    if delay is None:
        return GROUP_DECIDES
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # What is no number at all, NaN, compares to nothing.
    if not is_number or not 0 <= seconds * 1000 <= longest_ms:  # type: ignore[operator]
        raise UsageError(
            f"a delay of {delay!r}; 0 to {longest_ms / 1000:g} seconds are allowed, also as a "
            "timedelta, and None leaves it to the group"
        )
    return ceil(seconds * 1000)  # type: ignore[operator]

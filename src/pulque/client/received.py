"""A message that a consumer holds, and the batch it came in.

To ack a message is to store one byte: the consumer finds later, batch by batch, how far the
prefix of finished messages reaches.
"""

import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from math import ceil

from pulque.client.due import instant_of
from pulque.client.records import Served, Single, check_count, read_record, read_single
from pulque.errors import UsageError
from pulque.model.actions import GROUP_DECIDES, NO_RETRY
from pulque.model.batch import Flag, seed_of
from pulque.model.groups import Filter
from pulque.model.message import Message, StoredBatch, tags_in
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, PullSequence, Tenure
from pulque.wire.responses import Delivered

__all__ = [
    "ACKED",
    "DEFERRED",
    "NACKED",
    "OPEN",
    "Hole",
    "ReceivedBatch",
    "ReceivedMessage",
    "ToDefer",
    "batches_of",
]

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
_HAS_TAGS = int(Flag.TAGS)


@lru_cache(maxsize=4096)
def _matches(wanted: Filter, encoded: bytes) -> bool:
    """Compare the tags of a message: most have those of another."""
    return wanted.matches(tags_in(encoded))


class ReceivedBatch(StoredBatch):
    """A batch of which a consumer holds messages ``settled..end``.

    Attributes:
        states: For each message ``OPEN``, ``ACKED`` or ``NACKED``.
        nacks: Reason and delay of the nacked ones, by index.
        pull_base: The pull sequence that the message at index 0 has or would have.
        settled: Messages before this index are settled, or were never delivered.
        start: Messages before this index are handed out.
        lost: Ranges of indices that the broker gave to others.
        max_delay_ms: The longest delay that a nack may ask for.
        deferred: Reason and due time of those that a delay server is to have, by index.
        to_defer: Where to leave word of them; None if there are no delay servers.
    """

    __slots__ = (
        "deferred",
        "end",
        "lost",
        "max_delay_ms",
        "nacks",
        "pull_base",
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
        batch.broker_group = ""
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
        return part

    def is_wanted(self, wanted: Filter) -> bool:
        """Say whether it is one message that a filter wants: that is what a broker cuts out."""
        return self.end - self.start == 1 and _matches(wanted, self.part(self.start, _HAS_TAGS))

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
_SLOTS = (*StoredBatch.__slots__, *ReceivedBatch.__slots__)


class Hole:
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

    def finished_until(self) -> int:
        """Return the index after the last: all are finished."""
        return self.end

    def lose(self, start: int, end: int) -> int:
        """There is nothing to lose."""
        del start, end
        return 0


def batches_of(partition: PartitionName, delivered: Delivered) -> Iterator[ReceivedBatch]:
    """Yield the batches of a run of deliveries, each with what of it was delivered.

    Raises:
        CorruptionError: A batch is not what its producer packed.
        InvalidBatchError: Its producer packed nonsense.
        RemoteProtocolError: The records are out of order, or of another run.
    """
    assert not isinstance(delivered.records, tuple)  # noqa: S101  # decoded, not encoded
    records = bytes(delivered.records)
    seed = seed_of(partition)
    expected: int = delivered.first_sequence
    last = expected + delivered.count
    ahead = delivered.first_pull - expected
    at = 0
    while at < len(records) and expected < last:
        single = read_single(records, at, seed)
        if single is not None and expected <= single[2] < last:
            batch = ReceivedBatch.of_single(single, partition, ahead, delivered.tenure)
            at += single[-1]
        else:
            served = read_record(records, at, partition, expected, last)
            batch = _received(served, partition, ahead, delivered.tenure)
            at += served.envelope.size
        expected = batch.first_sequence + batch.end
        yield batch


def _received(
    served: Served, partition: PartitionName, ahead: int, tenure: Tenure
) -> ReceivedBatch:
    first = served.envelope.first_sequence
    batch = ReceivedBatch(
        served.data,
        partition=partition,
        first_sequence=first,
        stored_at_ms=served.envelope.stored_at_ms,
        pull_base=ahead + first,
        start=served.start,
        end=served.end,
        tenure=tenure,
    )
    check_count(len(batch), served.envelope.count)
    return batch


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
            self._defer(reason, _now_ms() + delay_ms)
        else:
            self._nack(reason, delay_ms)

    def reject(self, reason: str = "") -> None:
        """Say that it can never be done: there is no other attempt, it is a dead letter at once.

        Args:
            reason: Why; it is kept with the message.
        """
        self._nack(reason, NO_RETRY)

    def _nack(self, reason: str, delay_ms: int) -> None:
        self._batch.nacks[self._index] = (_text_of(reason), delay_ms)
        self._batch.states[self._index] = NACKED

    def _nack_at(self, reason: str, at: datetime) -> None:
        batch = self._batch
        due_ms, now_ms = instant_of(at, "at"), _now_ms()
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
        batch.deferred[index] = (_text_of(reason), due_ms)
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
        return PullSequence(self._batch.pull_base + self._index)


def _text_of(reason: str) -> str:
    # The names of files may hold what is no UTF-8, and errors are full of such names.
    return reason[:_MAX_REASON].encode(errors="backslashreplace").decode()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


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

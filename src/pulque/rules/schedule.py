"""The due index: a compact index from due times to waiting messages.

The messages themselves are in waiting partitions; the index holds only their sequences,
by partition and *tick*, here 0.1 s. Due times are rounded up to their tick, so that
no message is early::

    tick 17_000_000_123   partition 4   [881, 882, 907, …]   8 bytes each, ascending
    tick 17_000_000_123   partition 9   [12]
    tick 17_000_000_160   partition 4   [883, 884]

It is derived: from the due times in waiting partitions, and from the records
that say which messages were forwarded. A due message stays in the index until such a record is in
the log, so that a checkpoint in between loses nothing.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from struct import Struct
from typing import NamedTuple

from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["TICK_MS", "Due", "Schedule"]

TICK_MS = 100
_KEY = Struct("<1sIQ")
_PREFIX = b"w"
_Key = tuple[PartitionId, int]
"""Partition and tick."""


class Due(NamedTuple):
    """Due messages of one partition."""

    partition: PartitionId
    due_ms: int
    """When, rounded up to a tick."""
    sequences: list[ConsumeSequence]
    """In ascending order."""


class Schedule:
    """All waiting messages. Sees every stored batch, live and in replay."""

    def __init__(self) -> None:
        self._buckets: dict[_Key, array[int]] = {}
        self._counts: dict[PartitionId, int] = {}
        self._ticks: list[tuple[int, PartitionId]] = []
        """A heap of ticks that are not due yet."""
        self._queued: set[tuple[int, PartitionId]] = set()
        """The ticks in the heap; their buckets may already be gone."""
        self._ready: dict[PartitionId, list[int]] = {}
        """Heaps of due ticks. Partitions take turns, so that none waits for all others."""
        self._postponed: list[tuple[int, PartitionId, int]] = []
        """A heap of due ticks that are postponed: until when, and which."""
        self._passed: dict[_Key, ConsumeSequence] = {}
        """Up to where the messages of a tick are postponed; the later ones go first."""
        self._changed: set[_Key] = set()

    def __len__(self) -> int:
        return sum(self._counts.values())

    def waiting_in(self, partition: PartitionId) -> int:
        """Return the number of waiting messages of a partition."""
        return self._counts.get(partition, 0)

    def add(
        self, partition: PartitionId, first_sequence: ConsumeSequence, due_ms: Iterable[int]
    ) -> None:
        """Add consecutive messages of a partition, with their due times."""
        changed: set[int] = set()
        sequence = int(first_sequence)
        for due in due_ms:
            tick = _tick_of(due)
            bucket = self._buckets.get((partition, tick))
            if bucket is None:
                bucket = self._new_bucket(partition, tick)
            self._put(partition, bucket, sequence)
            changed.add(tick)
            sequence += 1
        self._changed.update((partition, tick) for tick in changed)

    def extend(
        self, partition: PartitionId, due_ms: int, sequences: "Sequence[ConsumeSequence]"
    ) -> None:
        """Add messages that are due at one time, in ascending order."""
        tick = _tick_of(due_ms)
        bucket = self._buckets.get((partition, tick))
        if bucket is None:
            bucket = self._new_bucket(partition, tick)
        if bucket and bucket[-1] >= sequences[0]:
            for sequence in sequences:
                self._put(partition, bucket, sequence)
        else:
            bucket.extend(sequences)
            self._counts[partition] = self._counts.get(partition, 0) + len(sequences)
        self._changed.add((partition, tick))

    def take(self, now_ms: int, most: int) -> Due | None:
        """Return some due messages, as ``due`` does, and remove them."""
        found = self.due(now_ms, most)
        if found is not None:
            self.remove(found.partition, found.due_ms, found.sequences)
        return found

    def due(self, now_ms: int, most: int) -> Due | None:
        """Return some due messages of one partition; None if there are none.

        The next call begins with the next partition. Messages are returned until removed.
        """
        last = now_ms // TICK_MS
        while self._ticks and self._ticks[0][0] <= last:
            tick, partition = heappop(self._ticks)
            self._queued.discard((tick, partition))
            if (partition, tick) in self._buckets:
                heappush(self._ready.setdefault(partition, []), tick)
        while self._postponed and self._postponed[0][0] <= now_ms:
            _, partition, tick = heappop(self._postponed)
            heappush(self._ready.setdefault(partition, []), tick)
        while self._ready:
            partition = next(iter(self._ready))
            ticks = self._ready.pop(partition)
            while ticks and (partition, ticks[0]) not in self._buckets:
                heappop(ticks)
            if ticks:
                self._ready[partition] = ticks  # at the end: the others come first
                bucket = self._buckets[partition, ticks[0]]
                passed = self._passed.get((partition, ticks[0]), -1)
                at = bisect_right(bucket, passed) if bucket[-1] > passed else 0
                found = bucket[at : at + most]
                return Due(partition, ticks[0] * TICK_MS, [ConsumeSequence(s) for s in found])
        return None

    def postpone(self, due: Due, until_ms: int) -> None:
        """Postpone the rest of some messages, so that others of their partition go first.

        Later messages that are due at the same time go first, and are then postponed, too.
        """
        partition, tick = due.partition, _tick_of(due.due_ms)
        bucket = self._buckets.get((partition, tick))
        if bucket is None:
            return
        if bucket[-1] > due.sequences[-1]:
            self._passed[partition, tick] = due.sequences[-1]
            return
        self._passed.pop((partition, tick), None)
        ready = self._ready.get(partition, [])
        if tick in ready:
            ready[:] = [each for each in ready if each != tick]
            heapify(ready)
            heappush(self._postponed, (until_ms, partition, tick))

    def next_due_ms(self) -> int | None:
        """Return the next due time; it may be in the past."""
        while self._ticks and self._ticks[0][::-1] not in self._buckets:
            self._queued.discard(heappop(self._ticks))
        while self._postponed and self._postponed[0][1:] not in self._buckets:
            heappop(self._postponed)
        ready = [
            tick
            for partition, ticks in self._ready.items()
            for tick in ticks
            if (partition, tick) in self._buckets
        ]
        ticks = ready + [tick for tick, _ in self._ticks[:1]]
        found = [tick * TICK_MS for tick in ticks] + [each[0] for each in self._postponed[:1]]
        return min(found, default=None)

    def remove(
        self, partition: PartitionId, due_ms: int, sequences: Sequence[ConsumeSequence]
    ) -> None:
        """Remove forwarded messages that were due at the same time."""
        key = (partition, _tick_of(due_ms))
        bucket = self._buckets.get(key)
        if bucket is None:
            return
        before = len(bucket)
        if bucket[: len(sequences)] == array("Q", sequences):
            del bucket[: len(sequences)]
        else:
            gone = set(sequences)
            bucket[:] = array("Q", (s for s in bucket if s not in gone))
        self._shrunk(key, bucket, before)

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> bool:
        """Drop state beyond the recovered end of its partition, or of a deleted partition.

        Returns:
            Whether anything was dropped.
        """
        is_changed = False
        for key, bucket in list(self._buckets.items()):
            before = len(bucket)
            del bucket[bisect_left(bucket, ends.get(key[0], 0)) :]
            if len(bucket) < before:
                is_changed = True
                self._shrunk(key, bucket, before)
        return is_changed

    def encode_changes(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call, for a checkpoint."""
        changes: dict[bytes, bytes | None] = {}
        for key in self._changed:
            bucket = self._buckets.get(key)
            changes[_KEY.pack(_PREFIX, *key)] = None if bucket is None else bucket.tobytes()
        self._changed = set()
        return changes

    def load(self, state: Mapping[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        for name, value in state.items():
            if name[:1] == _PREFIX and len(name) == _KEY.size:
                _, number, tick = _KEY.unpack(name)
                partition = PartitionId(number)
                bucket = self._new_bucket(partition, tick)
                bucket.frombytes(value)
                self._counts[partition] = self._counts.get(partition, 0) + len(bucket)

    def buckets(self) -> Iterator[Due]:
        """Yield all buckets of waiting messages."""
        for (partition, tick), bucket in self._buckets.items():
            yield Due(partition, tick * TICK_MS, [ConsumeSequence(s) for s in bucket])

    def _new_bucket(self, partition: PartitionId, tick: int) -> "array[int]":
        bucket = self._buckets[partition, tick] = array("Q")
        if (tick, partition) not in self._queued:
            self._queued.add((tick, partition))
            heappush(self._ticks, (tick, partition))
        return bucket

    def _put(self, partition: PartitionId, bucket: "array[int]", sequence: int) -> None:
        if bucket and bucket[-1] >= sequence:
            self._insert(partition, bucket, sequence)
        else:
            bucket.append(sequence)
            self._counts[partition] = self._counts.get(partition, 0) + 1

    def _insert(self, partition: PartitionId, bucket: "array[int]", sequence: int) -> None:
        """Add out-of-order sequences, without duplicates."""
        at = bisect_left(bucket, sequence)
        if bucket[at] != sequence:
            bucket.insert(at, sequence)
            self._counts[partition] += 1

    def _shrunk(self, key: _Key, bucket: "array[int]", before: int) -> None:
        partition = key[0]
        self._counts[partition] -= before - len(bucket)
        if not self._counts[partition]:
            del self._counts[partition]
        if not bucket:
            del self._buckets[key]
            self._passed.pop(key, None)
        self._changed.add(key)


def _tick_of(due_ms: int) -> int:
    return max(-(-due_ms // TICK_MS), 0)

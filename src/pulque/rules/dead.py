"""Dead letters: which of them were resent or purged.

A dead letter stays in the log until retention removes it. Ranges record which letters were resent
or purged; those are not listed any more. A letter is resent if a message names it as its origin,
and purged if a fact says so.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from pulque.model.actions import DeadPurged
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["DeadLetterState", "SequenceRange"]

_KEY = Struct("<1sI")
_PREFIX = b"x"
_RANGE = Struct("<QQ")


class SequenceRange(NamedTuple):
    """Sequences ``start..end`` of a partition."""

    start: ConsumeSequence
    end: ConsumeSequence


class DeadLetterState:
    """The resent and purged letters of all dead-letter partitions."""

    def __init__(self) -> None:
        self._resolved: dict[PartitionId, list[SequenceRange]] = {}
        """Disjoint ranges, in order."""
        self._changed: set[PartitionId] = set()

    def handle(self, fact: DeadPurged) -> None:
        """Apply a fact."""
        self.resolve(fact.partition, fact.first, ConsumeSequence(fact.last + 1))

    def resolve(
        self, partition: PartitionId, start: ConsumeSequence, end: ConsumeSequence
    ) -> None:
        """Record that letters ``start..end`` were resent or purged."""
        if start >= end:
            return
        ranges = self._resolved.setdefault(partition, [])
        first = bisect_left(ranges, start, key=lambda r: r.end)
        last = bisect_right(ranges, end, key=lambda r: r.start)
        if first < last:
            start = min(start, ranges[first].start)
            end = max(end, ranges[last - 1].end)
        ranges[first:last] = [SequenceRange(start, end)]
        self._changed.add(partition)

    def is_resolved(self, partition: PartitionId, sequence: ConsumeSequence) -> bool:
        """Return whether a letter was resent or purged."""
        ranges = self._resolved.get(partition, [])
        at = bisect_right(ranges, sequence, key=lambda r: r.start) - 1
        return at >= 0 and sequence < ranges[at].end

    def open_ranges(
        self, partition: PartitionId, start: ConsumeSequence, end: ConsumeSequence
    ) -> Iterator[SequenceRange]:
        """Yield the letters of ``start..end`` that were neither resent nor purged, in order."""
        ranges = self._resolved.get(partition, [])
        at = bisect_right(ranges, start, key=lambda r: r.end)
        for resolved in ranges[at:]:
            if resolved.start >= end:
                break
            if start < resolved.start:
                yield SequenceRange(start, resolved.start)
            start = max(start, resolved.end)
        if start < end:
            yield SequenceRange(start, end)

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> bool:
        """Drop state beyond the recovered end of its partition, or of a deleted partition.

        Returns:
            Whether anything was dropped.
        """
        is_changed = False
        for partition, ranges in list(self._resolved.items()):
            end = ends.get(partition, ConsumeSequence(0))
            kept = [SequenceRange(r.start, min(r.end, end)) for r in ranges if r.start < end]
            if kept != ranges:
                is_changed = True
                self._changed.add(partition)
                if kept:
                    self._resolved[partition] = kept
                else:
                    del self._resolved[partition]
        return is_changed

    def encode_changes(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call, for a checkpoint."""
        changes: dict[bytes, bytes | None] = {}
        for partition in self._changed:
            ranges = self._resolved.get(partition)
            changes[_KEY.pack(_PREFIX, partition)] = (
                None if ranges is None else b"".join(_RANGE.pack(*each) for each in ranges)
            )
        self._changed = set()
        return changes

    def load(self, state: Mapping[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        for key, value in state.items():
            if key[:1] == _PREFIX and len(key) == _KEY.size:
                partition = PartitionId(_KEY.unpack(key)[1])
                self._resolved[partition] = [
                    SequenceRange(ConsumeSequence(start), ConsumeSequence(end))
                    for start, end in _RANGE.iter_unpack(value)
                ]

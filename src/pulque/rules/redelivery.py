"""Pending redeliveries of a group: single messages, and ranges that a filter narrows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pulque.model.names import Group
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["Redeliver", "Redelivery", "RedeliveryState"]


@dataclass(frozen=True, slots=True)
class Redelivery:
    """One message to redeliver to its group, or the messages of a range that its filter wants."""

    sequence: ConsumeSequence
    delay_ms: int
    """The delay of the retry; -1 for the group's policy."""
    reason: str
    at_ms: int = 0
    """When it failed, or was handed back."""
    is_failure: bool = True
    """Whether it counts as an attempt; not if the consumer handed it back unhandled."""
    length: int = 1
    """The number of messages from the sequence on. If there is more than one, the group's filter
    selects: ``Consumption.narrowed``."""
    matched: int = 1
    """About how many of them the filter wants."""

    @property
    def end(self) -> ConsumeSequence:
        """The sequence after the last message."""
        return ConsumeSequence(self.sequence + self.length)

    def part(self, first: int, end: int) -> "Redelivery":
        """Return the part of a range in ``first..end``, which is not empty."""
        first, end = max(first, self.sequence), min(end, self.end)
        matched = -(-self.matched * (end - first) // self.length)
        return replace(self, sequence=ConsumeSequence(first), length=end - first, matched=matched)

    def without(self, sequences: Iterable[int]) -> "Iterator[Redelivery]":
        """Yield the rest of a range without some sequences, which ascend and lie in it."""
        first: int = self.sequence
        for sequence in (*sequences, self.end):
            if first < sequence:
                yield self.part(first, sequence)
            first = sequence + 1


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Retry each of these messages, or make it a dead letter, exactly once."""

    partition: PartitionId
    group: Group
    redeliveries: tuple[Redelivery, ...]


class RedeliveryState:
    """One group in one partition: the next undelivered message, and pending redeliveries."""

    __slots__ = ("next_sequence", "pending", "ranges")

    def __init__(self, next_sequence: ConsumeSequence) -> None:
        self.next_sequence = next_sequence
        self.pending: dict[ConsumeSequence, Redelivery] = {}
        """Messages to redeliver whose retry is not in the message log yet."""
        self.ranges: list[Redelivery] = []
        """The same for ranges that the filter has not narrowed yet."""

    @property
    def pending_count(self) -> int:
        """About how many messages are pending."""
        return len(self.pending) + sum(each.matched for each in self.ranges)

    def add(self, redeliveries: Iterable[Redelivery]) -> None:
        """Add pending redeliveries."""
        for each in redeliveries:
            if each.length == 1:
                self.pending[each.sequence] = each
            else:
                self.ranges.append(each)

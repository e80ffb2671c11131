"""What must come to a group again: single messages, and ranges of which a filter wants some."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pulque.model.names import Group
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["GroupState", "Redeliver", "Redelivery"]


@dataclass(frozen=True, slots=True)
class Redelivery:
    """One message that must come to its group again, or those of a range that the group wants."""

    sequence: ConsumeSequence
    delay_ms: int
    """How long to wait before; -1 leaves it to the group's policy."""
    reason: str
    at_ms: int = 0
    """When it failed, or was handed back."""
    is_failure: bool = True
    """Whether it counts as an attempt; not if it was handed back unread."""
    length: int = 1
    """How many messages there are from the sequence on. Which of more than one it is for, the
    group's filter says: ``Consumption.narrowed``."""
    matched: int = 1
    """About how many of them those are."""

    @property
    def end(self) -> ConsumeSequence:
        """The sequence after the last."""
        return ConsumeSequence(self.sequence + self.length)

    def part(self, first: int, end: int) -> "Redelivery":
        """Return what of a range lies in ``first..end``, which is not nothing."""
        first, end = max(first, self.sequence), min(end, self.end)
        matched = -(-self.matched * (end - first) // self.length)
        return replace(self, sequence=ConsumeSequence(first), length=end - first, matched=matched)

    def without(self, sequences: Iterable[int]) -> "Iterator[Redelivery]":
        """Yield what is left of a range; the sequences ascend and lie in it."""
        first: int = self.sequence
        for sequence in (*sequences, self.end):
            if first < sequence:
                yield self.part(first, sequence)
            first = sequence + 1


@dataclass(frozen=True, slots=True)
class Redeliver:
    """See to it that these messages come to their group again, or are kept as dead, each once."""

    partition: PartitionId
    group: Group
    redeliveries: tuple[Redelivery, ...]


class GroupState:
    """One group in one partition: the next message that nobody was handed, and what waits."""

    __slots__ = ("next_sequence", "pending", "ranges")

    def __init__(self, next_sequence: ConsumeSequence) -> None:
        self.next_sequence = next_sequence
        self.pending: dict[ConsumeSequence, Redelivery] = {}
        """Messages to be redelivered of which the message log does not tell yet."""
        self.ranges: list[Redelivery] = []
        """The same, where it is not known yet which messages of a range they are."""

    @property
    def pending_count(self) -> int:
        """About how many messages must be redelivered."""
        return len(self.pending) + sum(each.matched for each in self.ranges)

    def add(self, redeliveries: Iterable[Redelivery]) -> None:
        """Have more messages wait to be redelivered."""
        for each in redeliveries:
            if each.length == 1:
                self.pending[each.sequence] = each
            else:
                self.ranges.append(each)

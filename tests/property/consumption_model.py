"""Consumption as a child would keep it: one line per message and per delivery, no ranges.

``Book`` is what the rules are compared with. It knows what consumers said and who was handed
what, and works out everything else by looking at each message on its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pulque.model.names import ConsumerId, Group
from pulque.model.positions import PartitionId, Tenure

__all__ = [
    "Book",
    "Did",
    "DidCut",
    "DidLose",
    "DidOpen",
    "DidPull",
    "DidSettle",
    "DidStart",
    "Fate",
    "Hand",
    "Verdict",
]

Line = tuple[PartitionId, Group]
"""One group in one partition."""
Who = tuple[PartitionId, Group, ConsumerId]
"""One of its consumers."""


class Fate(Enum):
    """What became of a message that was handed out."""

    HELD = "held"
    ACKED = "acked"
    RETRIED = "retried"


class Verdict(Enum):
    """What must be said to a settle."""

    SETTLES = "settles"
    REPEATS = "repeats"
    INVALID = "invalid"
    STALE = "stale"


@dataclass(frozen=True)
class DidOpen:
    """A group came to a partition."""

    line: Line
    at: int


@dataclass(frozen=True)
class DidStart:
    """A consumer came, or came back."""

    who: Who
    incarnation: int


@dataclass(frozen=True)
class DidPull:
    """A consumer was handed messages."""

    who: Who
    tenure: Tenure
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class DidSettle:
    """A consumer said what it is done with, up to a delivery, and what not."""

    who: Who
    last: int
    nacked: frozenset[int]


@dataclass(frozen=True)
class DidLose:
    """A consumer was given up."""

    who: Who


@dataclass(frozen=True)
class DidCut:
    """A power cut took the ends of partitions, or whole ones."""

    ends: tuple[tuple[PartitionId, int], ...]


Did = DidOpen | DidStart | DidPull | DidSettle | DidLose | DidCut


@dataclass
class Hand:
    """Every delivery to one consumer out of one partition, in order."""

    incarnation: int
    pulled: list[tuple[int, Tenure]] = field(default_factory=list)
    """For each pull sequence: which message, and under which tenure."""
    settled: int = 0
    lost: frozenset[int] = frozenset()
    """The deliveries that were taken away last."""

    def unsettled(self) -> list[tuple[int, int, Tenure]]:
        return [
            (pull, sequence, tenure)
            for pull, (sequence, tenure) in enumerate(self.pulled)
            if pull >= self.settled
        ]

    def verdict(self, tenure: Tenure, first: int, last: int, nacked: Iterable[int]) -> Verdict:
        named = list(nacked)
        if (
            first > last
            or named != sorted(set(named))
            or not all(first <= n <= last for n in named)
        ):
            return Verdict.INVALID
        if any(first <= pull <= last for pull in self.lost):
            return Verdict.STALE
        if last < self.settled:
            return Verdict.REPEATS
        held = {pull: under for pull, _, under in self.unsettled()}
        asked = range(self.settled, last + 1)
        if first > self.settled or any(held.get(pull) != tenure for pull in asked):
            return Verdict.STALE
        return Verdict.SETTLES


@dataclass
class Book:
    """Who was handed what, and what became of it."""

    next: dict[Line, int] = field(default_factory=dict)
    hands: dict[Who, Hand] = field(default_factory=dict)
    fates: dict[tuple[PartitionId, Group, int], Fate] = field(default_factory=dict)

    @classmethod
    def of(cls, history: Iterable[Did]) -> "Book":
        book = cls()
        for did in history:
            book.note(did)
        return book

    def note(self, did: Did) -> None:
        match did:
            case DidOpen(line, at):
                self.next[line] = at
            case DidStart(who, incarnation):
                self.hands.setdefault(who, Hand(incarnation)).incarnation = incarnation
            case DidPull(who, tenure, sequences):
                self._pull(who, tenure, sequences)
            case DidSettle(who, last, nacked):
                self._settle(who, last, nacked)
            case DidLose(who):
                hand = self.hands[who]
                hand.lost = frozenset(range(hand.settled, len(hand.pulled)))
                self._settle(who, len(hand.pulled) - 1, hand.lost)
            case DidCut(ends):
                self._cut(dict(ends))

    def retried(self) -> set[tuple[PartitionId, Group, int]]:
        """Return every message that has to come again."""
        return {key for key, fate in self.fates.items() if fate is Fate.RETRIED}

    def _pull(self, who: Who, tenure: Tenure, sequences: tuple[int, ...]) -> None:
        partition, group, _ = who
        for sequence in sequences:
            self.hands[who].pulled.append((sequence, tenure))
            self.fates[partition, group, sequence] = Fate.HELD
        self.next[partition, group] = sequences[-1] + 1

    def _settle(self, who: Who, last: int, nacked: frozenset[int]) -> None:
        hand = self.hands[who]
        for pull in range(hand.settled, last + 1):
            sequence, _ = hand.pulled[pull]
            fate = Fate.RETRIED if pull in nacked else Fate.ACKED
            self.fates[who[0], who[1], sequence] = fate
        hand.settled = last + 1

    def _cut(self, ends: Mapping[PartitionId, int]) -> None:
        self.next = {
            line: min(at, ends[line[0]]) for line, at in self.next.items() if line[0] in ends
        }
        self.hands = {who: hand for who, hand in self.hands.items() if who[0] in ends}
        for who, hand in self.hands.items():
            for pull, sequence, _ in hand.unsettled():
                if sequence >= ends[who[0]]:
                    del hand.pulled[pull:]
                    break
        self.fates = {
            key: fate
            for key, fate in self.fates.items()
            if key[0] in ends and key[2] < ends[key[0]]
        }

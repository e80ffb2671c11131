"""What became of the messages of one partition for one group, out of the archived facts.

Facts are taken in the order of the log, each about a range of messages; what comes out are ranges
too. It knows nothing of the broker's own rules: it says what the facts say, and where they
contradict each other. Memory is what consumers hold at a time.

A pull sequence counts the deliveries of one consumer, without gaps; a settle names them. So a
fact that is missing leaves a hole: in the deliveries of a consumer, or in the messages of a group.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Break", "Fact", "FateSpan", "Flaw", "Ledger", "MessageFate", "Turn"]

_END = 1 << 62


class MessageFate(StrEnum):
    """What became of messages, as far as one partition can tell."""

    SETTLED = "settled"
    FAILED = "failed"
    """Nacked, or held by a consumer that was lost or left: it must come again, or be dead."""
    HELD = "held"
    NEW = "new"
    """Handed to nobody yet."""
    FILTERED = "filtered"
    """Passed over, as the group's filter does not want it."""
    BEFORE = "before"
    """Stored before the group's start."""
    SKIPPED = "skipped"
    """A reset went beyond it."""
    EXPIRED = "expired"
    """Retention took it before the group came to it."""
    UNKNOWN = "unknown"
    """Facts of that time are not archived."""


class Flaw(StrEnum):
    """In which way facts contradict each other."""

    FACT_TWICE = "fact_twice"
    NEVER_HANDED_OUT = "never_handed_out"
    HANDED_OUT_TWICE = "handed_out_twice"
    PULL_MISSING = "pull_missing"
    SETTLE_MISSING = "settle_missing"
    SETTLED_TWICE = "settled_twice"
    SETTLED_UNPULLED = "settled_unpulled"
    NACKED_UNSETTLED = "nacked_unsettled"


class Fact(NamedTuple):
    """One row of the table of consumption; times are microseconds."""

    kind: str
    offset: int
    at: int
    consumer: str = ""
    first_pull: int = 0
    first_sequence: int = 0
    count: int = 0  # type: ignore[assignment]  # nobody counts in this tuple
    matched: int = 0
    start: int = 0


class Turn(NamedTuple):
    """From an offset of the log on, what is said of messages from a sequence on is new."""

    offset: int
    sequence: int


class FateSpan(NamedTuple):
    """What became of messages ``first..end``."""

    state: MessageFate
    first: int
    end: int
    at: int = 0
    """When that was known; 0 for what is still so."""
    handed_at: int = 0
    """When they were handed out; 0 if they were not."""
    consumer: str = ""
    is_filtered: bool = False
    """Whether the group's filter may not want some of them."""
    is_current: bool = True
    """False if the group was set back behind them: what came later counts."""


class Break(NamedTuple):
    """Facts that contradict each other, and which messages or deliveries that is about."""

    flaw: Flaw
    first: int
    end: int
    offset: int
    consumer: str = ""
    are_pulls: bool = False
    """Whether it names deliveries of the consumer, as nobody knows which messages they were."""


class _Held(NamedTuple):
    first_pull: int
    first: int
    end: int
    handed_at: int
    is_filtered: bool

    @property
    def end_pull(self) -> int:
        return self.first_pull + self.end - self.first

    def split(self, pull: int) -> "tuple[_Held, _Held]":
        """Return what comes before a delivery, and the rest."""
        at = min(max(self.first + pull - self.first_pull, self.first), self.end)
        rest = self._replace(first_pull=self.first_pull + at - self.first, first=at)
        return self._replace(end=at), rest


class _How(NamedTuple):
    """What is known of a delivery and its end."""

    handed_at: int = 0
    is_filtered: bool = False
    consumer: str = ""
    at: int = 0


@dataclass(slots=True)
class _Consumer:
    """The deliveries ``settled..next_pull`` of one consumer."""

    settled: int = 0
    next_pull: int = 0
    start: int = 0
    held: deque[_Held] = field(default_factory=deque)

    def take(self, end: int) -> Iterator[_Held]:
        """Yield what is held before a delivery, and hold it no more."""
        while self.held and self.held[0].first_pull < end:
            done, rest = self.held.popleft().split(end)
            if rest.first < rest.end:
                self.held.appendleft(rest)
            yield done

    def forget_from(self, pull: int) -> None:
        """Forget deliveries that a recovery did not know any more."""
        parts = (each.split(pull)[0] for each in self.held)
        self.held = deque(part for part in parts if part.first < part.end)


class Ledger:
    """Takes the facts of one group in one partition.

    Args:
        is_direct: Whether the group is a broadcast consumer: its deliveries have the numbers of
            messages.
        is_whole: Whether the facts go back to the beginning.
        turns: Where the group was set back, in order.
        borders: Sequences that a segment of the message log begins with: retention ends there.
    """

    def __init__(
        self,
        *,
        is_direct: bool = False,
        is_whole: bool = True,
        turns: Sequence[Turn] = (),
        borders: Collection[int] = (),
    ) -> None:
        self._is_direct = is_direct
        self._is_whole = is_whole
        self._borders = borders
        self._next: int | None = None
        self._consumers: dict[str, _Consumer] = {}
        self._nacked: list[Fact] = []
        """Of the settle that comes next."""
        self._last: tuple[object, ...] = ()
        self._methods: Mapping[str, Callable[[Fact], Iterator[FateSpan | Break]]] = {
            "opened": self._opened,
            "passed": self._passed,
            "pulled": self._pulled,
            "settled": self._settled,
            "lost": self._lost,
            "left": self._lost,
            "reset": self._reset,
            "locked": self._handed_over,
            "unlocked": self._handed_over,
            "given_up": self._given_up,
        }
        self._turn_offsets = [turn.offset for turn in turns]
        self._limits = [_END] * (len(turns) + 1)
        for at in range(len(turns) - 1, -1, -1):
            self._limits[at] = min(self._limits[at + 1], turns[at].sequence)

    # -- in ----------------------------------------------------------------------------------

    def add(self, fact: Fact) -> Iterator[FateSpan | Break]:
        """Take in the next fact; yield what is known now."""
        mark = (fact.offset, fact.kind, fact.consumer, fact.first_pull, fact.first_sequence)
        if mark == self._last:
            yield Break(Flaw.FACT_TWICE, *self._about(fact), fact.offset, fact.consumer)
            return
        self._last = mark
        if fact.kind == "nacked":
            self._nacked.append(fact)
        elif fact.kind in self._methods:
            yield from self._methods[fact.kind](fact)

    def finish(self) -> Iterator[FateSpan | Break]:
        """Yield how things stand behind the last fact."""
        for name, consumer in self._consumers.items():
            for held in consumer.held:
                how = _How(held.handed_at, held.is_filtered, name)
                yield from self._spans(MessageFate.HELD, held.first, held.end, _END, how)
        yield from self._spans(MessageFate.NEW, self._next or 0, _END, _END)

    # -- one method per fact -----------------------------------------------------------------

    def _opened(self, fact: Fact) -> Iterator[FateSpan | Break]:
        if self._next is None:
            self._next = fact.first_sequence
            state = MessageFate.BEFORE if self._is_whole else MessageFate.UNKNOWN
            yield from self._spans(state, 0, self._next, fact.offset)

    def _passed(self, fact: Fact) -> Iterator[FateSpan | Break]:
        return self._moved(fact, MessageFate.FILTERED)

    def _moved(self, fact: Fact, state: MessageFate) -> Iterator[FateSpan | Break]:
        """Go on to another sequence; what lies between was not handed out."""
        if self._next is None and not self._is_whole:
            state = MessageFate.UNKNOWN
        yield from self._spans(state, self._next or 0, fact.first_sequence, fact.offset)
        self._next = fact.first_sequence

    def _begun(self, fact: Fact) -> Iterator[FateSpan | Break]:
        """Begin in the middle, as facts from before are missing."""
        yield from self._spans(MessageFate.UNKNOWN, 0, fact.first_sequence, fact.offset)
        if self._is_whole and fact.first_sequence:
            yield Break(Flaw.NEVER_HANDED_OUT, 0, fact.first_sequence, fact.offset)

    def _pulled(self, fact: Fact) -> Iterator[FateSpan | Break]:
        first = fact.first_sequence
        consumer = self._consumer(fact)
        if self._next is None:
            yield from self._begun(fact)
        elif first > self._next:
            yield from self._jumped(self._next, fact)
        elif first < self._next:
            yield from self._set_back(self._next, fact, consumer)
        yield from self._delivered(fact, consumer)
        self._next = first + fact.count

    def _jumped(self, expected: int, fact: Fact) -> Iterator[FateSpan | Break]:
        if fact.first_sequence in self._borders:
            yield from self._spans(MessageFate.EXPIRED, expected, fact.first_sequence, fact.offset)
            return
        yield from self._spans(MessageFate.UNKNOWN, expected, fact.first_sequence, fact.offset)
        yield Break(Flaw.NEVER_HANDED_OUT, expected, fact.first_sequence, fact.offset)

    def _set_back(
        self, expected: int, fact: Fact, consumer: _Consumer
    ) -> Iterator[FateSpan | Break]:
        """A recovery that lost messages set the group back; without one it cannot be."""
        if fact.start == max(each.start for each in self._consumers.values()):
            end = min(expected, fact.first_sequence + fact.count)
            flaw = Flaw.HANDED_OUT_TWICE
            yield Break(flaw, fact.first_sequence, end, fact.offset, fact.consumer)
            return
        for each in self._consumers.values():
            for held in each.held:
                if held.end > fact.first_sequence:
                    cut = held.first_pull + max(fact.first_sequence - held.first, 0)
                    each.next_pull = max(min(each.next_pull, cut), each.settled)
                    each.forget_from(cut)
                    break
        consumer.next_pull = max(consumer.next_pull, consumer.settled)

    def _delivered(self, fact: Fact, consumer: _Consumer) -> Iterator[FateSpan | Break]:
        pull = fact.first_pull
        if pull > consumer.next_pull and not self._is_direct:
            flaw = Flaw.PULL_MISSING
            yield Break(flaw, consumer.next_pull, pull, fact.offset, fact.consumer, are_pulls=True)
        elif pull < consumer.next_pull:
            if consumer.start == fact.start and not self._is_direct:
                end = min(consumer.next_pull, pull + fact.count)
                who = (fact.offset, fact.consumer)
                yield Break(Flaw.HANDED_OUT_TWICE, pull, end, *who, are_pulls=True)
            consumer.forget_from(pull)
            consumer.settled = min(consumer.settled, pull)
        if not consumer.held:
            consumer.settled = pull
        is_filtered = fact.matched < fact.count
        end = fact.first_sequence + fact.count
        consumer.held.append(_Held(pull, fact.first_sequence, end, fact.at, is_filtered))
        consumer.next_pull = pull + fact.count
        consumer.start = fact.start

    def _settled(self, fact: Fact) -> Iterator[FateSpan | Break]:
        consumer = self._consumer(fact)
        first, end = fact.first_pull, fact.first_pull + fact.count
        who = (fact.offset, fact.consumer)
        if first > consumer.settled:
            for held in list(consumer.take(first)):
                yield from self._spans(MessageFate.UNKNOWN, held.first, held.end, fact.offset)
                yield Break(Flaw.SETTLE_MISSING, held.first, held.end, *who)
        elif first < consumer.settled:
            twice = min(end, consumer.settled)
            yield Break(Flaw.SETTLED_TWICE, first, twice, *who, are_pulls=True)
        if end > consumer.next_pull:
            unpulled = max(first, consumer.next_pull)
            yield Break(Flaw.SETTLED_UNPULLED, unpulled, end, *who, are_pulls=True)
            consumer.next_pull = end
        nacked = sorted(each.first_pull for each in self._nacked)
        self._nacked = []
        for held in consumer.take(end):
            yield from self._done(held, nacked, fact)
        for pull in nacked:
            if not first <= pull < end:
                yield Break(Flaw.NACKED_UNSETTLED, pull, pull + 1, *who, are_pulls=True)
        consumer.settled = max(consumer.settled, end)

    def _done(self, held: _Held, nacked: list[int], fact: Fact) -> Iterator[FateSpan | Break]:
        """Yield what was acked and what was nacked of a range."""
        at = (fact.offset, _How(held.handed_at, held.is_filtered, fact.consumer, fact.at))
        first = held.first
        for pull in nacked[bisect_right(nacked, held.first_pull - 1) :]:
            if pull >= held.end_pull:
                break
            sequence = held.first + pull - held.first_pull
            yield from self._spans(MessageFate.SETTLED, first, sequence, *at)
            yield from self._spans(MessageFate.FAILED, sequence, sequence + 1, *at)
            first = sequence + 1
        yield from self._spans(MessageFate.SETTLED, first, held.end, *at)

    def _lost(self, fact: Fact) -> Iterator[FateSpan | Break]:
        consumer = self._consumer(fact)
        for held in consumer.take(_END):
            how = _How(held.handed_at, held.is_filtered, fact.consumer, fact.at)
            yield from self._spans(MessageFate.FAILED, held.first, held.end, fact.offset, how)
        consumer.settled = consumer.next_pull

    def _reset(self, fact: Fact) -> Iterator[FateSpan | Break]:
        # What a reset says of messages before its own sequence holds; the rest comes anew.
        before = fact.offset - 1
        for consumer in self._consumers.values():
            for held in list(consumer.take(_END)):
                yield from self._spans(MessageFate.SKIPPED, held.first, held.end, before)
            consumer.settled = consumer.next_pull
        yield from self._moved(fact._replace(offset=before), MessageFate.SKIPPED)

    def _handed_over(self, fact: Fact) -> Iterator[FateSpan | Break]:
        """The partition of an ordered group goes to another: what is not settled comes anew."""
        del fact
        self._is_direct = True
        held = [each.held[0].first for each in self._consumers.values() if each.held]
        self._next = min(held, default=self._next)
        for consumer in self._consumers.values():
            consumer.held.clear()
        yield from ()

    def _given_up(self, fact: Fact) -> Iterator[FateSpan | Break]:
        """The message that an ordered group waited for is a dead letter, by command."""
        yield from self._handed_over(fact)
        end = fact.first_sequence + fact.count
        yield from self._spans(
            MessageFate.FAILED, fact.first_sequence, end, fact.offset, _How(at=fact.at)
        )
        self._next = end

    # -- inside ------------------------------------------------------------------------------

    def _consumer(self, fact: Fact) -> _Consumer:
        found = self._consumers.get(fact.consumer)
        if found is None:
            known_from = 0 if self._is_whole and not self._is_direct else fact.first_pull
            found = _Consumer(known_from, known_from)
            if not self._is_whole and fact.kind == "settled":
                # It was pulled when nobody archived yet.
                found.next_pull = fact.first_pull + fact.count
            self._consumers[fact.consumer] = found
        return found

    @staticmethod
    def _about(fact: Fact) -> tuple[int, int]:
        first = fact.first_sequence if fact.kind == "pulled" else fact.first_pull
        return first, first + max(fact.count, 1)

    def _spans(
        self, state: MessageFate, first: int, end: int, offset: int, how: "_How | None" = None
    ) -> Iterator[FateSpan]:
        """Yield a span as far as it counts; failures also where they do not, as they happened."""
        limit = self._limits[bisect_right(self._turn_offsets, offset)]
        counts_to = min(end, max(limit, first))
        handed_at, is_filtered, consumer, at = how or _How()
        if first < counts_to:
            yield FateSpan(state, first, counts_to, at, handed_at, consumer, is_filtered)
        if counts_to < end and state is MessageFate.FAILED:
            told = (at, handed_at, consumer, is_filtered)
            yield FateSpan(state, counts_to, end, *told, is_current=False)

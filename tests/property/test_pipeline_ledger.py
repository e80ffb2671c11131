"""The ledger of the audit against a model that keeps a word for every message.

The model plays a group with two consumers, writes down the facts as a broker would, and knows the
state of each message. The ledger must come to the same from the facts alone; and when one fact is
taken away, it must say so.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from pulque.pipeline.audit.ledger import Break, Fact, FateSpan, Flaw, Ledger, MessageFate, Turn

MESSAGES = 60
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("pull", "pull", "settle", "settle", "lose", "leave", "reset", "pass")),
        st.sampled_from(("ana", "ben")),
        st.integers(1, 12),
        st.integers(0, 2**12),
    ),
    max_size=40,
)


@dataclass
class Consumer:
    next_pull: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)
    """Pull sequence and sequence."""


@dataclass
class Model:
    """A group in a partition, message by message."""

    start: int
    states: list[MessageFate] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    consumers: dict[str, Consumer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next = self.start
        self.states = [
            MessageFate.BEFORE if n < self.start else MessageFate.NEW for n in range(MESSAGES)
        ]
        self._tell("opened", first_sequence=self.start)

    def _tell(self, kind: str, **fields: object) -> None:
        offset = 10 * (len(self.facts) + 1)
        self.facts.append(Fact(kind, offset, 1000 + offset, **fields))  # type: ignore[arg-type]

    def pull(self, name: str, count: int, _: int) -> None:
        count = min(count, MESSAGES - self.next)
        if not count:
            return
        consumer = self.consumers.setdefault(name, Consumer())
        who = {"consumer": name, "first_pull": consumer.next_pull}
        self._tell("pulled", **who, first_sequence=self.next, count=count, matched=count)
        for number in range(self.next, self.next + count):
            consumer.held.append((consumer.next_pull, number))
            consumer.next_pull += 1
            self.states[number] = MessageFate.HELD
        self.next += count

    def settle(self, name: str, count: int, nacked: int) -> None:
        consumer = self.consumers.get(name, Consumer())
        done, consumer.held = consumer.held[:count], consumer.held[count:]
        if not done:
            return
        offset = 10 * (len(self.facts) + 1)
        for bit, (pull, sequence) in enumerate(done):
            is_nacked = nacked >> bit & 1
            self.states[sequence] = MessageFate.FAILED if is_nacked else MessageFate.SETTLED
            if is_nacked:
                self.failures.append(sequence)
                self.facts.append(Fact("nacked", offset, 1000, name, pull, count=1))
        first = done[0][0]
        self.facts.append(Fact("settled", offset, 1000, name, first, count=len(done)))

    def lose(self, name: str, _: int, __: int) -> None:
        self._take("lost", name)

    def leave(self, name: str, _: int, __: int) -> None:
        self._take("left", name)

    def _take(self, kind: str, name: str) -> None:
        consumer = self.consumers.get(name, Consumer())
        if consumer.held:
            self._tell(kind, consumer=name)
        for _, sequence in consumer.held:
            self.states[sequence] = MessageFate.FAILED
            self.failures.append(sequence)
        consumer.held = []

    def reset(self, _name: str, _count: int, place: int) -> None:
        target = place % (MESSAGES + 1)
        self._tell("reset", first_sequence=target)
        self.turns.append(Turn(self.facts[-1].offset, target))
        for consumer in self.consumers.values():
            for _, sequence in consumer.held:
                self.states[sequence] = MessageFate.SKIPPED
            consumer.held = []
        for number in range(self.next, target):
            self.states[number] = MessageFate.SKIPPED
        for number in range(target, MESSAGES):
            self.states[number] = MessageFate.NEW
        self.next = target

    def pass_over(self, _: str, count: int, __: int) -> None:
        end = min(self.next + count, MESSAGES)
        if end > self.next:
            self._tell("passed", first_sequence=end)
            self.states[self.next : end] = [MessageFate.FILTERED] * (end - self.next)
            self.next = end


def played(start: int, steps: list[tuple[str, str, int, int]]) -> Model:
    model = Model(start)
    for action, *arguments in steps:
        getattr(model, {"pass": "pass_over"}.get(action, action))(*arguments)
    return model


def told(facts: list[Fact], turns: list[Turn]) -> tuple[list[FateSpan], list[Break]]:
    ledger = Ledger(turns=turns)
    found = [each for fact in facts for each in ledger.add(fact)]
    found += ledger.finish()
    return (
        [each for each in found if isinstance(each, FateSpan)],
        [each for each in found if isinstance(each, Break)],
    )


@given(st.integers(0, MESSAGES), STEPS)
def test_the_ledger_knows_each_message(start: int, steps: list[tuple[str, str, int, int]]) -> None:
    model = played(start, steps)
    spans, breaks = told(model.facts, model.turns)

    assert breaks == []
    for number in range(MESSAGES):
        found = [s.state for s in spans if s.is_current and s.first <= number < s.end]
        assert found == [model.states[number]], number
    failed = [
        n
        for s in spans
        if s.state is MessageFate.FAILED
        for n in range(s.first, min(s.end, MESSAGES))
    ]
    assert sorted(failed) == sorted(model.failures)


@given(st.integers(0, MESSAGES // 2), STEPS, st.integers(0, 1000))
def test_a_settle_that_is_missing_is_named(
    start: int, steps: list[tuple[str, str, int, int]], which: int
) -> None:
    begin = [("pull", "ana", 12, 0), ("settle", "ana", 3, 5), ("settle", "ana", 2, 0)]
    model = played(start, [*begin, *(s for s in steps if s[0] in {"pull", "settle"})])
    settles = [fact for fact in model.facts if fact.kind == "settled"]
    # The last one of a consumer leaves what it settled held, which is no contradiction.
    last = {fact.consumer: fact for fact in settles}
    candidates = [fact for fact in settles if last[fact.consumer] is not fact]
    gone = candidates[which % len(candidates)]
    facts = [f for f in model.facts if f.offset != gone.offset]
    _, breaks = told(facts, model.turns)

    assert {each.flaw for each in breaks} == {Flaw.SETTLE_MISSING}
    named = {n for each in breaks for n in range(each.first, each.end)}
    consumer = [f for f in model.facts if f.kind == "pulled" and f.consumer == gone.consumer]
    pulls = range(gone.first_pull, gone.first_pull + gone.count)
    expected = {
        f.first_sequence + pull - f.first_pull
        for f in consumer
        for pull in pulls
        if f.first_pull <= pull < f.first_pull + f.count
    }
    assert named == expected


@given(st.integers(0, MESSAGES // 2), STEPS, st.integers(0, 1000))
def test_a_pull_that_is_missing_or_doubled_is_named(
    start: int, steps: list[tuple[str, str, int, int]], which: int
) -> None:
    begin = [("pull", "ana", 7, 0), ("pull", "ben", 9, 0)]
    model = played(start, [*begin, *(s for s in steps if s[0] in {"pull", "settle", "lose"})])
    pulls = [fact for fact in model.facts if fact.kind == "pulled"]
    chosen = pulls[which % (len(pulls) - 1)]
    about = set(range(chosen.first_sequence, chosen.first_sequence + chosen.count))
    _, breaks = told([f for f in model.facts if f is not chosen], model.turns)
    named = {
        number
        for each in breaks
        if each.flaw is Flaw.NEVER_HANDED_OUT
        for number in range(each.first, each.end)
    }
    assert named == about

    at = model.facts.index(chosen)
    _, breaks = told([*model.facts[: at + 1], chosen, *model.facts[at + 1 :]], model.turns)
    assert [(each.flaw, each.first, each.end) for each in breaks] == [
        (Flaw.FACT_TWICE, chosen.first_sequence, chosen.first_sequence + chosen.count)
    ]


def test_what_was_settled_and_never_pulled_is_named() -> None:
    facts = [
        Fact("opened", 1, 1),
        Fact("pulled", 2, 1, "ana", 0, 0, 10, 10),
        Fact("settled", 3, 1, "ana", 0, 0, 12),
    ]
    _, breaks = told(facts, [])
    assert breaks == [Break(Flaw.SETTLED_UNPULLED, 10, 12, 3, "ana", are_pulls=True)]


def test_what_retention_took_is_no_break_and_a_hole_within_a_segment_is() -> None:
    facts = [
        Fact("opened", 1, 1),
        Fact("pulled", 2, 1, "ana", 0, 0, 10, 10),
        Fact("pulled", 3, 1, "ana", 10, 30, 10, 10),
    ]
    ledger = Ledger(borders=(0, 30))
    found = [each for fact in facts for each in ledger.add(fact)]
    assert found == [FateSpan(MessageFate.EXPIRED, 10, 30)]
    ledger = Ledger(borders=(0, 25))
    found = [each for fact in facts for each in ledger.add(fact)]
    assert found == [
        FateSpan(MessageFate.UNKNOWN, 10, 30),
        Break(Flaw.NEVER_HANDED_OUT, 10, 30, 3),
    ]


def test_facts_that_begin_in_the_middle_are_taken_as_they_are() -> None:
    facts = [
        Fact("nacked", 90, 1, "ana", 41, 0, 1),
        Fact("settled", 90, 1, "ana", 40, 0, 10),
        Fact("pulled", 100, 1, "ana", 50, 70, 10, 10),
        Fact("pulled", 110, 1, "ben", 7, 80, 10, 10),
        Fact("settled", 120, 1, "ben", 7, 0, 10),
    ]
    ledger = Ledger(is_whole=False)
    found = [each for fact in facts for each in ledger.add(fact)]
    assert [(s.state, s.first, s.end) for s in found if isinstance(s, FateSpan)] == [
        (MessageFate.UNKNOWN, 0, 70),
        (MessageFate.SETTLED, 80, 90),
    ]
    assert not [each for each in found if isinstance(each, Break)]


def test_a_broadcast_consumer_that_was_set_back_reads_again() -> None:
    facts = [
        Fact("opened", 1, 1, first_sequence=5),
        Fact("pulled", 2, 1, "ana", 5, 5, 10, 10),
        Fact("settled", 3, 1, "ana", 5, 0, 10),
        Fact("reset", 4, 1, first_sequence=0),
        Fact("pulled", 5, 1, "ana", 0, 0, 8, 8),
        Fact("settled", 6, 1, "ana", 0, 0, 8),
    ]
    ledger = Ledger(is_direct=True, turns=[Turn(4, 0)])
    found = [*(each for fact in facts for each in ledger.add(fact)), *ledger.finish()]
    assert [each[:3] for each in found] == [
        (MessageFate.SETTLED, 0, 8),
        (MessageFate.NEW, 8, 1 << 62),
    ]


def test_a_recovery_that_lost_messages_is_no_break() -> None:
    facts = [
        Fact("opened", 1, 1),
        Fact("pulled", 2, 1, "ana", 0, 0, 10, 10, start=1),
        Fact("settled", 3, 1, "ana", 0, 0, 4),
        Fact("pulled", 4, 1, "ana", 8, 8, 5, 5, start=2),
        Fact("settled", 5, 1, "ana", 4, 0, 9),
    ]
    spans, breaks = told(facts, [Turn(4, 8)])
    assert breaks == []
    settled = [n for s in spans if s.state is MessageFate.SETTLED for n in range(s.first, s.end)]
    assert sorted(settled) == list(range(13))
    again = [*facts[:3], facts[3]._replace(start=1), facts[4]]
    _, breaks = told(again, [Turn(4, 8)])
    assert Flaw.HANDED_OUT_TWICE in {each.flaw for each in breaks}


def test_what_an_ordered_consumer_left_unsettled_comes_anew() -> None:
    facts = [
        Fact("opened", 1, 1),
        Fact("locked", 2, 1, "ana"),
        Fact("pulled", 3, 1, "ana", 0, 0, 10, 10),
        Fact("settled", 4, 1, "ana", 0, 0, 4),
        Fact("unlocked", 5, 1),
        Fact("locked", 6, 1, "ben"),
        Fact("pulled", 7, 1, "ben", 4, 4, 6, 6),
        Fact("settled", 8, 1, "ben", 4, 0, 2),
        # "ben" is killed; "ana" comes again, and the message that it waits for is given up.
        Fact("locked", 9, 1, "ana"),
        Fact("pulled", 10, 1, "ana", 6, 6, 4, 4),
        Fact("given_up", 11, 1, "", 0, 6, 1),
        Fact("locked", 12, 1, "ana"),
        Fact("pulled", 13, 1, "ana", 7, 7, 3, 3),
        Fact("settled", 14, 1, "ana", 7, 0, 1),
        Fact("unlocked", 15, 1),
    ]
    turns = [Turn(7, 4), Turn(10, 6), Turn(13, 7)]
    spans, breaks = told(facts, turns)
    assert not breaks
    assert [(s.state, s.first, min(s.end, 10)) for s in spans] == [
        (MessageFate.SETTLED, 0, 4),
        (MessageFate.SETTLED, 4, 6),
        (MessageFate.FAILED, 6, 7),
        (MessageFate.SETTLED, 7, 8),
        (MessageFate.NEW, 8, 10),
    ]

"""A group that is reset goes on exactly where it was told, whatever happened before and after.

A group of two consumers is compared with lists: one position, and what each of them holds. The
facts go through the bytes of the action log; a replay, from the beginning or from a checkpoint at
any point, ends where life was.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import StaleSettleError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    GroupOpened,
    GroupReset,
    NackedDelivery,
    Pulled,
    Settled,
)
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import encode_changes, load_state
from pulque.storage.logs.action_log import decode_action, encode_action
from pulque.testing.files import MemoryFileSystem
from tests.property.test_consumption_machine import shown
from tests.unit.storage.storing import opened, store

PARTITION, GROUP = PartitionId(1), Group("g")
CONSUMERS = (ConsumerId("a"), ConsumerId("b"))
TENURE = Tenure(Epoch(0), StartCount(1))
END = 30

who = st.sampled_from(CONSUMERS)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("pull"), who, st.integers(1, 8)),
        st.tuples(st.just("settle"), who, st.integers(1, 8)),
        st.tuples(st.just("nack"), who, st.integers(1, 8)),
        st.tuples(st.just("lose"), who, st.just(0)),
        st.tuples(st.just("reset"), st.just(CONSUMERS[0]), st.integers(0, END)),
        st.tuples(st.just("reset_other"), st.just(CONSUMERS[0]), st.integers(0, END)),
    ),
    max_size=40,
)


@dataclass
class Lists:
    """The group as lists."""

    position: int = 0
    held: dict[ConsumerId, list[int]] = field(
        default_factory=lambda: {each: [] for each in CONSUMERS}
    )


class Life:
    """The rules beside the lists."""

    def __init__(self) -> None:
        self.facts: list[bytes] = []
        self.live = Consumption()
        self.model = Lists()
        self.taken: dict[ConsumerId, tuple[int, int]] = {}
        """The deliveries that the last reset took from a consumer."""
        self.record(GroupOpened(PARTITION, GROUP, ConsumeSequence(0)))
        for consumer in CONSUMERS:
            opening = self.live.opened(PARTITION, GROUP, consumer, 1)
            assert opening is not None
            self.record(opening)

    def record(self, fact: Action) -> None:
        encoded = encode_action(fact)
        self.facts.append(encoded)
        self.live.handle(decode_action(encoded))

    def do(self, step: str, consumer: ConsumerId, number: int) -> None:
        found = self.live.subscription(PARTITION, GROUP, consumer)
        assert found is not None
        held = self.model.held[consumer]
        if step == "pull":
            first = self.model.position
            count = min(number, END - first)
            if count > 0:
                at = ConsumeSequence(first)
                self.record(Pulled(found.id, TENURE, found.next_pull, at, count, 0))
                held += range(first, first + count)
                self.model.position = first + count
        elif step in ("settle", "nack") and held:
            count = min(number, len(held))
            last = PullSequence(found.settled + count - 1)
            nacked = (NackedDelivery(last, 0, "no"),) if step == "nack" else ()
            self.record(Settled(found.id, found.settled, last, nacked, 0))
            del held[:count]
        elif step == "lose" and held:
            self.record(ConsumerLost(found.id, "gone", 0))
            held.clear()
            self.taken.pop(consumer, None)
        elif step == "reset":
            self.reset(number)
        elif step == "reset_other":
            # Another group, and another partition: nothing of this happens here.
            self.record(GroupReset(PARTITION, Group("h"), ConsumeSequence(number), 0))
            self.record(GroupReset(PartitionId(2), GROUP, ConsumeSequence(number), 0))

    def reset(self, target: int) -> None:
        for consumer in CONSUMERS:
            found = self.live.subscription(PARTITION, GROUP, consumer)
            assert found is not None
            if self.model.held[consumer]:
                self.taken[consumer] = found.settled, found.next_pull - 1
        self.record(GroupReset(PARTITION, GROUP, ConsumeSequence(target), 0))
        self.model.position = target
        self.model.held = {each: [] for each in CONSUMERS}

    def check(self) -> None:
        assert self.live.groups[PARTITION, GROUP].next_sequence == self.model.position
        for consumer in CONSUMERS:
            found = self.live.subscription(PARTITION, GROUP, consumer)
            assert found is not None
            sequences = [
                each.first_sequence + i for each in found.held for i in range(each.length)
            ]
            assert sequences == self.model.held[consumer]
            if consumer in self.taken:
                with pytest.raises(StaleSettleError):
                    found.check_settle(TENURE, *self.taken[consumer], ())


@given(steps=steps)
@pytest.mark.accepts("003-27", "004-11")
def test_a_group_goes_on_where_it_was_told(steps: list[tuple[str, ConsumerId, int]]) -> None:
    life = Life()
    for step in steps:
        life.do(*step)
        life.check()


@given(steps=steps, at=st.integers(0, 60))
def test_a_replay_ends_where_life_was(steps: list[tuple[str, ConsumerId, int]], at: int) -> None:
    life = Life()
    state: dict[bytes, bytes | None] = {}
    saved = 0
    for number, step in enumerate(steps):
        if number == at:
            state, saved = encode_changes(life.live), len(life.facts)
        life.do(*step)
    for kept, facts in (({}, life.facts), (state, life.facts[saved:])):
        again = load_state({key: value for key, value in kept.items() if value is not None})
        for fact in facts:
            again.handle(decode_action(fact))
        assert shown(again) == shown(life.live)


@given(
    batches=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@pytest.mark.accepts("004-11")
def test_an_instant_is_found_as_in_a_list(batches: list[tuple[int, int, bool, bool]]) -> None:
    """Batches with their counts, the milliseconds after each, and whether a segment ends."""
    engine = opened(MemoryFileSystem())
    times: list[int] = []
    now_ms = 1000
    for count, pause_ms, is_last, is_other in batches:
        name = "other" if is_other else "orders"
        store(engine, name, *[b"x"] * count, now_ms=now_ms)
        if not is_other:
            times += [now_ms] * count
        now_ms += pause_ms
        if is_last:
            engine.roll(now_ms)
    partition = engine.partition(PartitionName("orders"))

    assert all(before <= after for before, after in pairwise(times))
    for at_ms in range(998, now_ms + 3):
        expected = next((i for i, stored in enumerate(times) if stored >= at_ms), len(times))
        if partition is not None:
            assert engine.at_time(partition, at_ms) == expected

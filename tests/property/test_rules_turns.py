"""Every priority and every partition goes on, however much waits above or beside it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.model.names import Group
from pulque.model.positions import PartitionId
from pulque.rules.turns import PullCandidate, Turns

GROUP = Group("g")
LEVELS = st.integers(0, 9)


@dataclass
class Backlog:
    """Partitions by number, each with its level; some always have messages."""

    levels: list[int]
    is_steady: list[bool]

    def candidates(self) -> list[PullCandidate]:
        return [
            PullCandidate(place, PartitionId(place), level)
            for place, level in enumerate(self.levels)
        ]

    def waiting(self, flicker: int) -> set[int]:
        return {
            place
            for place, is_steady in enumerate(self.is_steady)
            if is_steady or flicker >> place & 1
        }


backlogs = st.lists(st.tuples(LEVELS, st.booleans()), min_size=1, max_size=6).map(
    lambda rows: Backlog([level for level, _ in rows], [steady for _, steady in rows])
)


def serve_one(turns: Turns, backlog: Backlog, waiting: set[int]) -> int:
    """Do what a pull of one message does; return which partition was served."""
    favoured = turns.favoured(GROUP, lambda: {backlog.levels[place] for place in waiting})
    for each in turns.in_order(GROUP, backlog.candidates(), favoured):
        if each.place in waiting:
            turns.served(GROUP, favoured, [each.partition])
            return each.place
    raise AssertionError("something waits")


@given(backlog=backlogs, flickers=st.data(), every=st.integers(2, 5))
@pytest.mark.accepts("000-56")
def test_whatever_waits_is_served_within_a_limit(
    backlog: Backlog, flickers: st.DataObject, every: int
) -> None:
    turns = Turns(1 / every)
    # Each of ten levels has one of so many pulls, and its partitions take turns.
    limit = every * 10 * len(backlog.levels)
    seed = flickers.draw(st.randoms(use_true_random=False))
    last_served = dict.fromkeys(range(len(backlog.levels)), 0)
    for turn in range(1, 3 * limit + 1):
        waiting = backlog.waiting(seed.getrandbits(6))
        if not waiting:
            continue
        last_served[serve_one(turns, backlog, waiting)] = turn
        for place, is_steady in enumerate(backlog.is_steady):
            if is_steady:
                assert turn - last_served[place] <= limit


@given(backlog=backlogs, waits=st.integers(1, 63), every=st.integers(2, 20))
def test_of_every_so_many_pulls_all_but_one_begin_with_the_highest_level(
    backlog: Backlog, waits: int, every: int
) -> None:
    steady = Backlog(backlog.levels, [bool(waits >> i & 1) for i in range(len(backlog.levels))])
    waiting = steady.waiting(0)
    if not waiting:
        return
    highest = max(steady.levels[place] for place in waiting)
    turns = Turns(1 / every)

    served = [steady.levels[serve_one(turns, steady, waiting)] for _ in range(every * 10)]

    for at in range(0, len(served), every):
        assert served[at : at + every - 1] == [highest] * (every - 1)


@given(levels=st.lists(LEVELS, min_size=1, max_size=6), turns=st.integers(1, 50))
def test_without_a_share_the_highest_level_always_comes_first(
    levels: list[int], turns: int
) -> None:
    backlog, rules = Backlog(levels, [True] * len(levels)), Turns(0)

    served = {levels[serve_one(rules, backlog, backlog.waiting(0))] for _ in range(turns)}

    assert served == {max(levels)}


@given(count=st.integers(1, 6), rounds=st.integers(1, 5))
def test_equals_take_turns(count: int, rounds: int) -> None:
    backlog, turns = Backlog([4] * count, [True] * count), Turns(0.1)

    served = [serve_one(turns, backlog, backlog.waiting(0)) for _ in range(count * rounds)]

    assert served == list(range(count)) * rounds


def test_groups_have_turns_of_their_own() -> None:
    turns = Turns(0.5)
    candidates = [PullCandidate(0, PartitionId(0), 9), PullCandidate(1, PartitionId(1), 0)]
    for group in (Group("a"), Group("b"), Group("a"), Group("b")):
        favoured = turns.favoured(group, lambda: {0, 9})
        first, _ = turns.in_order(group, candidates, favoured)
        turns.served(group, favoured, [first.partition])
        assert favoured in (None, 0)

    assert turns.favoured(Group("a"), lambda: {0, 9}) is None
    assert turns.favoured(Group("c"), lambda: {0, 9}) is None

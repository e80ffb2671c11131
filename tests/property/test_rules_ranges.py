"""Ranges are split and merged: every slot has one open partition, and children have parents."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import InvalidRequestError
from pulque.model.cluster import Placement
from pulque.model.names import Subject
from pulque.model.routes import SLOTS
from pulque.rules.ranges import merge, open_places, servable, split
from pulque.rules.routing import place_on

SUBJECT = Subject("orders")
GROUPS = ["a", "b", "c"]
counts = st.lists(
    st.one_of(st.integers(1, 12), st.sampled_from([64, 100, 1024])), min_size=1, max_size=5
)


def changed(placed: tuple[Placement, ...], count: int) -> tuple[Placement, ...]:
    now = len(open_places(placed))
    if count > now:
        groups = [GROUPS[i % 3] for i in range(count - now)]
        return split(SUBJECT, placed, count, groups)
    return merge(SUBJECT, placed, count) if count < now else placed


def owners(placed: tuple[Placement, ...], slot: int) -> list[int]:
    return [at for at, each in enumerate(placed) if each.slots.start <= slot < each.slots.end]


@given(st.integers(1, 4), counts)
def test_every_slot_has_one_open_partition_and_a_line_of_closed_ones(
    first: int, wanted: list[int]
) -> None:
    placed = place_on(SUBJECT, [GROUPS[i % 3] for i in range(first)])
    for count in wanted:
        before, placed = placed, changed(placed, count)

        assert len(open_places(placed)) == count
        # What was there keeps its name, its place and its slots; it is closed for ever.
        for old, new in zip(before, placed, strict=False):
            assert new._replace(is_closed=old.is_closed) == old
            assert new.is_closed >= old.is_closed
        assert len({(each.partition, each.broker_group) for each in placed}) == len(placed)
        edges = [placed[at].slots for at in open_places(placed)]
        assert edges[0].start == 0
        assert edges[-1].end == SLOTS
        assert all(one.end == two.start for one, two in pairwise(edges))
        for at, each in enumerate(placed):
            assert all(parent < at and placed[parent].is_closed for parent in each.parents)
            if each.parents:
                covered = {s for p in each.parents for s in range(*placed[p].slots)}
                assert covered.issuperset(range(*each.slots))


@given(st.integers(1, 3), counts, st.integers(0, SLOTS - 1), st.data())
def test_the_partitions_of_one_slot_are_consumed_one_after_the_other(
    first: int, wanted: list[int], slot: int, data: st.DataObject
) -> None:
    placed = place_on(SUBJECT, [GROUPS[i % 3] for i in range(first)])
    for count in wanted:
        placed = changed(placed, count)
    line = owners(placed, slot)

    drained: frozenset[int] = frozenset()
    seen = []
    while True:
        here = [at for at in servable(placed, drained) if at in line]
        assert len(here) <= 1, "two partitions of one key are never consumed at the same time"
        closed = [at for at in servable(placed, drained) if placed[at].is_closed]
        if here:
            seen.append(here[0])
        if not closed:
            break
        drained |= {data.draw(st.sampled_from(closed))}
    assert list(dict.fromkeys(seen)) == line


@given(st.integers(1, 6), st.integers(2, 60))
def test_ranges_of_equal_partitions_stay_about_equal(first: int, count: int) -> None:
    placed = place_on(SUBJECT, [GROUPS[i % 3] for i in range(first)])
    placed = changed(placed, max(count, first))
    widths = [placed[at].slots.end - placed[at].slots.start for at in open_places(placed)]

    assert max(widths) <= 2 * min(widths) + 2


@pytest.mark.accepts("002-13", "002-14")
def test_two_partitions_become_four_and_two_again() -> None:
    placed = place_on(SUBJECT, ["a", "b"])
    four = split(SUBJECT, placed, 4, ["a", "b"])
    two = merge(SUBJECT, four, 2)

    assert [each[:3] for each in four[2:]] == [
        ("orders#1", "a", (0, 256)),
        ("orders#2", "a", (256, 512)),
        ("orders#3", "b", (512, 768)),
        ("orders#4", "b", (768, 1024)),
    ]
    assert [each.is_closed for each in four] == [True, True, False, False, False, False]
    # What is added goes where it is told to; the first part of each stays where its range was.
    spread = split(SUBJECT, placed, 4, ["c", "d"])
    assert [each.broker_group for each in spread[2:]] == ["a", "c", "b", "d"]
    assert [(each.partition, each.slots, each.parents) for each in two[6:]] == [
        ("orders#5", (0, 512), (2, 3)),
        ("orders#6", (512, 1024), (4, 5)),
    ]


@pytest.mark.parametrize("count", [0, 1025, 1, 2, -1])
def test_a_split_that_cannot_be_is_refused(count: int) -> None:
    placed = place_on(SUBJECT, ["a", "b"])

    with pytest.raises(InvalidRequestError, match=r"1 to 1024|there can only be more"):
        split(SUBJECT, placed, count, ["a"] * max(count - 2, 0))


@pytest.mark.parametrize("count", [0, 2, 3, 1025])
def test_a_merge_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"1 to 1024|makes fewer"):
        merge(SUBJECT, place_on(SUBJECT, ["a", "b"]), count)

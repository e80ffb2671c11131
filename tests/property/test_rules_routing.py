"""Every order key belongs to exactly one partition, whatever is placed and extended.

Where a subject is, it stays; subjects are spread evenly; a route says nothing of who is away.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import InvalidRequestError, UnavailableError
from pulque.model.cluster import Placement, Serving
from pulque.model.names import Pattern, Subject, parse_partition, subject_of
from pulque.model.routes import SLOTS, PartitionRoute, Slots
from pulque.rules.ranges import MOST_PARTITIONS, open_places, split
from pulque.rules.routing import (
    place,
    place_on,
    route_of_delays,
    route_of_pattern,
    route_of_subject,
    version_of,
)

GROUPS = [f"g{i}" for i in range(6)]
groups = st.lists(st.sampled_from(GROUPS), min_size=1, max_size=12)
subjects = st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,4})?", fullmatch=True).map(Subject)


def owners(placed: tuple[Placement, ...]) -> list[int]:
    """Return, for each slot, how many partitions take its messages: counted one by one."""
    taking = [each for each in placed if not each.is_closed]
    return [
        sum(each.slots.start <= slot < each.slots.end for each in taking) for slot in range(SLOTS)
    ]


@given(subject=subjects, first=groups, more=st.lists(groups, max_size=4))
@pytest.mark.accepts("002-11", "002-14")
def test_each_slot_has_one_partition_however_a_subject_is_extended(
    subject: Subject, first: list[str], more: list[list[str]]
) -> None:
    placed = place_on(subject, first)
    assert owners(placed) == [1] * SLOTS

    for added in more:
        count = len(open_places(placed)) + len(added)
        before, placed = placed, split(subject, placed, count, added)

        assert owners(placed) == [1] * SLOTS
        assert [each[:3] for each in placed[: len(before)]] == [each[:3] for each in before]
        # The first part of each stays where it is, and the others go where they are told to.
        closed = [new for old, new in zip(before, placed, strict=False) if new != old]
        here = Counter(each.broker_group for each in placed[len(before) :])
        assert here == Counter(added) + Counter(each.broker_group for each in closed)


@given(subject=subjects, first=groups, more=groups)
@pytest.mark.accepts("002-05")
def test_a_group_and_a_name_are_one_partition(
    subject: Subject, first: list[str], more: list[str]
) -> None:
    placed = split(subject, place_on(subject, first), len(first) + len(more), more)

    assert len({each[:2] for each in placed}) == len(placed)
    for each in placed:
        assert subject_of(parse_partition(each.partition)) == subject


@given(names=st.lists(subjects, unique=True, min_size=1, max_size=60), count=st.integers(1, 6))
@pytest.mark.accepts("002-10")
def test_subjects_are_spread_evenly_over_two_groups_each(names: list[Subject], count: int) -> None:
    usable = GROUPS[:count]
    load: Counter[str] = Counter()
    for name in names:
        placed = place(name, usable, load)
        load.update(each.broker_group for each in placed)

        assert [str(each.partition) for each in placed] == [name] * min(2, count)
        assert len({each.broker_group for each in placed}) == min(2, count)

    assert max(load[group] for group in usable) - min(load[group] for group in usable) <= 1


def test_no_broker_is_a_reason_to_try_again() -> None:
    with pytest.raises(UnavailableError, match="no broker takes messages"):
        place(Subject("orders"), [], {})


@pytest.mark.accepts("002-10", "002-14", "002-06")
def test_the_default_route_has_two_halves() -> None:
    placed = place(Subject("order.book"), ["a", "b", "c"], {"c": 9})
    assert tuple(each[:3] for each in placed) in (
        (("order.book", "a", (0, 512)), ("order.book", "b", (512, 1024))),
        (("order.book", "b", (0, 512)), ("order.book", "a", (512, 1024))),
    )


@pytest.mark.accepts("002-03")
def test_four_partitions_by_hand_on_two_groups() -> None:
    placed = place_on(Subject("order.book"), ["g1", "g1", "g2", "g2"])

    assert [(each.broker_group, each.partition) for each in placed] == [
        ("g1", "order.book"),
        ("g1", "order.book#1"),
        ("g2", "order.book"),
        ("g2", "order.book#2"),
    ]


@pytest.mark.parametrize("count", [0, MOST_PARTITIONS + 1])
def test_too_few_and_too_many_partitions_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"would have {count} partitions"):
        place_on(Subject("orders"), ["a"] * count)


# -- routes -------------------------------------------------------------------------------------

servings = st.dictionaries(
    st.sampled_from(GROUPS),
    st.tuples(st.sampled_from(["h1", "h2"]), st.integers(1, 3), st.booleans()),
).map(lambda found: {name: Serving(name, *rest) for name, rest in found.items()})


@given(subject=subjects, on=groups, serving=servings, is_read_only=st.booleans())
def test_a_route_names_who_is_there_and_nobody_else(
    subject: Subject, on: list[str], serving: dict[str, Serving], *, is_read_only: bool
) -> None:
    placed = place_on(subject, on)
    route = route_of_subject(subject, placed, serving, is_read_only=is_read_only)

    assert [each.broker_group for each in route.partitions] == [g for g in on if g in serving]
    for each in route.partitions:
        there = serving[each.broker_group]
        assert (each.host, each.port) == (there.host, there.port)
        assert each.is_writable == (there.is_writable and not is_read_only)
        assert Placement(each.partition, each.broker_group, each.slots) in placed


@given(serving=servings)
@pytest.mark.accepts("001-14", "001-18")
def test_a_pattern_is_served_by_all_brokers_and_delays_by_delay_servers(
    serving: dict[str, Serving],
) -> None:
    for route in (
        route_of_pattern(Pattern("order.*"), serving),
        route_of_delays(Pattern("order.*"), serving),
    ):
        assert {each.broker_group for each in route.partitions} == set(serving)
        assert {each.partition for each in route.partitions} <= {"order.*"}
        assert route.version == version_of(route.partitions)


partition_routes = st.builds(
    PartitionRoute,
    st.sampled_from(["a", "a#1"]),
    st.sampled_from(GROUPS[:2]),
    st.sampled_from(["h", "i"]),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([Slots(0, 512), Slots(512, 1024)]),
)
some_routes = st.lists(partition_routes, max_size=3)


@given(one=some_routes, other=some_routes)
def test_versions_differ_as_routes_do(
    one: list[PartitionRoute], other: list[PartitionRoute]
) -> None:
    assert (version_of(one) == version_of(other)) == (one == other)
    assert (version_of(one) == 0) == (not one)
    assert 0 <= version_of(one) < 2**64

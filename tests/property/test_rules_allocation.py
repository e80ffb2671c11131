"""Allocation is complete, balanced, stable, and the same for everybody."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.rules.allocation import allocate

partitions = st.lists(st.integers(0, 40), unique=True, max_size=30)
consumers = st.lists(st.sampled_from([f"c{i:02}" for i in range(30)]), unique=True, max_size=12)
current = st.dictionaries(st.integers(0, 40), st.sampled_from([f"c{i:02}" for i in range(30)]))


@pytest.mark.accepts("004-76", "004-77", "004-79")
@given(partitions, consumers, current)
def test_every_partition_has_one_consumer_and_nobody_has_two_more_than_another(
    places: list[int], who: list[str], before: dict[int, str]
) -> None:
    found = allocate(places, who, before)

    if not who:
        assert found == {}
        return
    assert set(found) == set(places)
    assert set(found.values()) <= set(who)
    counts = Counter(found.values())
    shares = [counts[each] for each in who]
    assert max(shares) - min(shares) <= 1


@pytest.mark.accepts("004-80")
@given(partitions, consumers.filter(bool), current)
def test_as_few_partitions_as_possible_change_hands(
    places: list[int], who: list[str], before: dict[int, str]
) -> None:
    found = allocate(places, who, before)

    held = Counter(before[each] for each in places if before.get(each) in who)
    least, more = divmod(len(places), len(who))
    # Nobody can keep more than its share; the greater shares are best given to who has most.
    could_stay = sum(
        min(count, least + (at < more))
        for at, count in enumerate(sorted((held[each] for each in who), reverse=True))
    )
    assert sum(before.get(each) == consumer for each, consumer in found.items()) == could_stay


@given(partitions, consumers, current, st.randoms())
def test_all_meta_servers_find_the_same(
    places: list[int], who: list[str], before: dict[int, str], random: object
) -> None:
    found = allocate(places, who, before)
    shuffle = random.shuffle  # type: ignore[attr-defined]
    items = list(before.items())
    for each in (places, who, items):
        shuffle(each)

    assert allocate(places, who, dict(items)) == found


@given(partitions, consumers, current)
def test_what_is_allotted_stays_as_long_as_nothing_happens(
    places: list[int], who: list[str], before: dict[int, str]
) -> None:
    found = allocate(places, who, before)

    assert allocate(places, who, found) == found


@pytest.mark.accepts("004-75", "004-76")
def test_five_partitions_for_two_and_ten_for_twenty() -> None:
    two = Counter(allocate(range(5), ["a", "b"], {}).values())
    twenty = allocate(range(10), [f"c{i:02}" for i in range(20)], {})

    assert sorted(two.values()) == [2, 3]
    assert sorted(twenty.values()) == [f"c{i:02}" for i in range(10)]

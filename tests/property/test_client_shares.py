"""However busy one source is, the others have their share."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from pulque.client.receiving.fair_scheduling import Shares

MOST = 50
_amounts = st.lists(st.integers(1, MOST), min_size=1, max_size=8)


@given(st.lists(_amounts, min_size=1, max_size=5), st.integers(1, 300))
def test_sources_that_always_have_something_get_the_same(
    amounts: list[list[int]], rounds: int
) -> None:
    shares: Shares[int] = Shares()
    taken: Counter[int] = Counter(dict.fromkeys(range(len(amounts)), 0))
    turns: Counter[int] = Counter()
    for _ in range(rounds):
        source = shares.next_of(range(len(amounts)))
        amount = amounts[source][turns[source] % len(amounts[source])]
        shares.took(source, amount)
        taken[source] += amount
        turns[source] += 1
        # Nobody is ahead of another by more than one batch.
        assert max(taken.values()) - min(taken.values()) <= MOST


@given(st.integers(1, 1000), st.integers(1, MOST))
def test_who_had_nothing_for_long_joins_without_a_debt_to_be_paid(alone: int, amount: int) -> None:
    shares: Shares[str] = Shares()
    for _ in range(alone):
        shares.took(shares.next_of(["busy"]), amount)
    served = []
    for _ in range(20):
        source = shares.next_of(["busy", "rare"])
        shares.took(source, amount)
        served.append(source)
    assert 9 <= served.count("rare") <= 11


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_weights_are_kept(weights: list[int]) -> None:
    shares: Shares[int] = Shares()
    taken: Counter[int] = Counter()
    for _ in range(100 * sum(weights)):
        source = shares.next_of(range(len(weights)))
        shares.took(source, 1, weights[source])
        taken[source] += 1
    for source, weight in enumerate(weights):
        assert abs(taken[source] - 100 * weight) <= sum(weights)

"""How fast groups get on, against sums done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.admin.group_rates import Rates, Seen

KEY = ("b1", "orders", "billing")


def test_the_time_to_drain_is_the_lag_over_what_is_gained() -> None:
    rates = Rates()
    rates.observe(KEY, Seen(0, end=1000, lag=600))

    pace = rates.pace(KEY, Seen(10_000, end=1100, lag=400))

    # In 10 s, 100 came and 300 were settled: 400 go at 20 a second.
    assert pace is not None
    assert (pace.sent, pace.settled, pace.drain_seconds) == (10.0, 30.0, 20.0)


def test_it_never_drains_while_more_comes_than_goes() -> None:
    rates = Rates()
    rates.observe(KEY, Seen(0, end=100, lag=10))

    pace = rates.pace(KEY, Seen(10_000, end=300, lag=110))

    assert pace is not None
    assert pace.drain_seconds is None


def test_nothing_is_said_of_one_look_or_after_a_reset() -> None:
    rates = Rates()
    assert rates.pace(KEY, Seen(0, 10, 5)) is None
    rates.observe(KEY, Seen(0, 10, 5))
    assert rates.pace(KEY, Seen(0, 10, 5)) is None

    rates.observe(KEY, Seen(5_000, 10, 10))  # set back

    assert rates.pace(KEY, Seen(5_500, 10, 9)) is None
    found = rates.pace(KEY, Seen(10_000, 10, 5))
    assert found is not None
    assert found.settled == pytest.approx(1.0)


def test_what_was_long_ago_is_forgotten() -> None:
    rates = Rates()
    rates.observe(KEY, Seen(0, 1000, 1000))
    rates.observe(KEY, Seen(10_000, 1000, 0))
    rates.observe(KEY, Seen(400_000, 1000, 0))

    found = rates.pace(KEY, Seen(500_000, 1000, 0))

    assert found is not None
    assert (found.settled, found.drain_seconds) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**6), st.integers(0, 10**6))))
def test_rates_are_never_negative(steps: list[tuple[int, int, int]]) -> None:
    rates = Rates()
    at_ms = end = 0
    for wait, came, lag in steps:
        at_ms, end = at_ms + wait, end + came
        seen = Seen(at_ms, end, min(lag, end))
        rates.observe(KEY, seen)
        pace = rates.pace(KEY, seen)
        assert pace is None or (pace.sent >= 0 and pace.settled >= 0)
        assert pace is None or pace.drain_seconds is None or pace.drain_seconds >= 0

"""A broker that is slow or fails is left alone for a while, and found again afterwards."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pulque.client.routing.broker_health import (
    LATENCY_TABLE,
    Breaker,
    BreakerState,
    BrokerHealth,
    LatencyRow,
    wait_after,
)


@pytest.mark.accepts("004-74")
@pytest.mark.parametrize(
    ("took", "wait"),
    [(0.0, 0), (0.55, 0), (0.551, 3), (1.0, 3), (1.001, 60), (30, 60)],
)
def test_slow_answers_keep_messages_away_as_the_table_says(took: float, wait: float) -> None:
    assert wait_after(LATENCY_TABLE, took) == wait
    health = BrokerHealth()
    health.answered(100.0, took)
    assert health.is_usable(100.0 + wait)
    if wait:
        assert not health.is_usable(100.0 + wait - 0.001)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 100)).map(lambda row: LatencyRow(*row)),
        max_size=4,
    ),
    st.floats(0, 200),
)
def test_any_table_gives_the_longest_wait_that_applies(
    rows: list[LatencyRow], took: float
) -> None:
    expected = [row.wait for row in rows if row.limit < took]
    assert wait_after(tuple(rows), took) == (max(expected) if expected else 0.0)


_events = st.lists(
    st.tuples(
        st.sampled_from(["answered", "failed", "failed late", "probe"]),
        st.floats(0.001, 5.0),
    ),
    max_size=40,
)


@given(_events)
def test_the_breaker_lets_calls_through_as_its_history_says(
    events: list[tuple[str, float]],
) -> None:
    breaker, now, failures = Breaker(), 50.0, 0
    for kind, step in events:
        now += step
        before = breaker.state(now)
        match kind:
            case "answered":
                breaker.succeeded()
                failures = 0
            case "probe":
                breaker.probe(now)
                if before is BreakerState.HALF_OPEN:
                    assert breaker.state(now) is BreakerState.OPEN, "one probe at a time"
            case _:
                late = kind == "failed late"
                breaker.failed(now, Breaker.LONG if late else 0.0)
                failures = max(failures + 1, Breaker.MOST_FAILURES if late else 0)
        is_closed = breaker.state(now) is BreakerState.CLOSED
        assert is_closed == (failures < Breaker.MOST_FAILURES)
        # However bad it was, somebody may try within the longest wait.
        assert breaker.state(now + Breaker.LONGEST_WAIT) is not BreakerState.OPEN


def test_the_breaker_waits_longer_each_time_it_opens_again() -> None:
    breaker, now, waits = Breaker(), 0.0, []
    breaker.failed(now, Breaker.LONG)
    for _ in range(6):
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        assert breaker.state(now) is BreakerState.HALF_OPEN
        breaker.probe(now)
        breaker.failed(now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    breaker.succeeded()
    assert breaker.state(now) is BreakerState.CLOSED
    breaker.failed(now, Breaker.LONG)
    assert breaker.open_until == now + 1.0

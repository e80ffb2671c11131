"""Waits grow, stay within their limits, and end with an error that tells the story."""

from random import Random

import pytest

from pulque.client.connection.backoff import Backoff, Retries
from pulque.client.receiving.error_policy import Trouble, problem_of
from pulque.client.receiving.prefetch import PullRate
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    NotAllowedError,
    OverloadedError,
    RemoteProtocolError,
)


def test_waits_double_up_to_the_largest(seed: int) -> None:
    backoff = Backoff(Random(seed).random, first=1, largest=10)
    waits = [backoff.next_wait() for _ in range(8)]

    for wait, whole in zip(waits, [1, 2, 4, 8, 10, 10, 10, 10], strict=True):
        assert whole / 2 <= wait <= whole
    backoff.reset()
    assert backoff.next_wait() <= 1


def test_a_retry_ends_where_it_is_of_no_use_or_too_late() -> None:
    retries = Retries(lambda: 1.0, 100.0, 100.05)

    retries.failed(OverloadedError("busy"))
    assert retries.next_wait(OverloadedError("busy"), 100.0) == pytest.approx(0.02)
    with pytest.raises(NotAllowedError, match=r"^no$"):
        retries.next_wait(NotAllowedError("no"), 100.0)
    retries.failed(OverloadedError("busy"))
    with pytest.raises(OverloadedError, match=r"busy \(tried 2 times in 0.0 s; "):
        retries.next_wait(OverloadedError("busy"), 100.04)


def test_no_refused_call_is_repeated_when_its_answer_would_come_too_late() -> None:
    refusal = OverloadedError("busy")
    refused = Retries(lambda: 1.0, 100.0, 101.0)
    unreached = Retries(lambda: 1.0, 100.0, 101.0)

    refused.failed(refusal)
    unreached.failed(refusal, was_asked=False)

    assert unreached.next_wait(refusal, 100.95) == pytest.approx(0.02)
    assert refused.next_wait(refusal, 100.72) == pytest.approx(0.02)
    with pytest.raises(OverloadedError, match="no effect") as caught:
        refused.next_wait(refusal, 100.72)
    assert caught.value.outcome_known


def test_trouble_is_told_when_it_lasts() -> None:
    trouble = Trouble(lambda: 1.0, timeout=10)
    error = DisconnectedError("gone")

    assert trouble.next_wait(error, 100, 1000) < 1
    with pytest.raises(DisconnectedError, match=r"gone \(trouble for 11.0 s\)"):
        trouble.next_wait(error, 111, 1000)
    assert trouble.next_wait(error, 112, 1000) < 1
    trouble.over()
    assert trouble.next_wait(error, 140, 1000) < 1
    assert trouble.next_wait(error, 141, 141) == 0


def test_damage_is_tried_once_more() -> None:
    trouble = Trouble(lambda: 1.0, timeout=10)
    damage = CorruptionError("orders", 1, "crc")

    assert trouble.next_wait(damage, 100, 1000) < 1
    with pytest.raises(CorruptionError):
        trouble.next_wait(damage, 100, 1000)


def test_a_pull_that_is_refused_for_now_is_like_a_lost_connection() -> None:
    assert isinstance(problem_of(OverloadedError("busy")), DisconnectedError)
    assert isinstance(problem_of(NotAllowedError("no")), NotAllowedError)
    assert isinstance(problem_of("nonsense"), RemoteProtocolError)


@pytest.mark.parametrize(
    ("count", "seconds", "want"),
    [(1000, 0.001, 1000), (100, 1.0, 10), (1, 60.0, 1), (50, 0.1, 50), (1000, 0.0, 1000)],
)
def test_a_consumer_asks_for_a_tenth_of_a_second(count: int, seconds: float, want: int) -> None:
    pace = PullRate(1000)
    pace.handled(count, seconds)

    assert pace.want == want


@pytest.mark.parametrize(
    ("seconds", "asked"), [(0.001, 200), (0.05, 200), (0.051, 100), (0.1, 100), (60.0, 100)]
)
def test_several_brokers_are_asked_for_twice_as_much_by_who_is_fast(
    seconds: float, asked: int
) -> None:
    pace = PullRate(1000)
    assert pace.of_each(100) == 100  # nobody knows yet
    pace.handled(100, seconds)

    assert pace.of_each(100) == asked


def test_nothing_handled_changes_nothing() -> None:
    pace = PullRate(5)
    pace.handled(0, 1.0)

    assert pace.want == 5

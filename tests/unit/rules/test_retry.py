"""What becomes of a message that a consumer could not process."""

import pytest

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.rules.consumption import Redelivery
from pulque.rules.retry import (
    DEFAULT_DELAYS_MS,
    DeadLetter,
    Decision,
    FailedDelivery,
    RetryLater,
    RetryNow,
    RetryRules,
    decide,
    parse_position,
)

NOW_MS = 1_700_000_000_000
MESSAGE = bytes(range(16))
STEADY = RetryRules(delays_ms=(1000, 5000), jitter=0.0, max_attempts=4)


def after(
    attempt: int,
    *,
    delay_ms: int = -1,
    expires_at_ms: int = 0,
    late_ms: int = 0,
    is_failure: bool = True,
    policy: RetryRules = STEADY,
) -> Decision:
    """Decide about an attempt that failed now, when that many milliseconds have passed."""
    redelivery = Redelivery(ConsumeSequence(3), delay_ms, "no", NOW_MS, is_failure)
    return decide(
        redelivery, FailedDelivery(attempt, MESSAGE, expires_at_ms), policy, NOW_MS + late_ms
    )


@pytest.mark.accepts("004-13", "000-41")
def test_each_attempt_waits_as_long_as_the_table_says_and_then_as_the_last() -> None:
    assert after(1) == RetryLater(2, NOW_MS + 1000)
    assert after(2) == RetryLater(3, NOW_MS + 5000)
    assert after(3) == RetryLater(4, NOW_MS + 5000)


@pytest.mark.accepts("000-42")
def test_after_the_last_attempt_there_is_no_other() -> None:
    assert after(4) == DeadLetter("4 attempts failed")
    assert after(5) == DeadLetter("5 attempts failed")
    assert isinstance(after(1, policy=RetryRules(max_attempts=1)), DeadLetter)


def test_what_is_rejected_has_no_other_attempt() -> None:
    assert after(1, delay_ms=-2) == DeadLetter("rejected")
    assert after(1, delay_ms=-2, expires_at_ms=NOW_MS - 1) == DeadLetter("rejected")
    assert after(1, delay_ms=-2, is_failure=False) == RetryNow(1)


@pytest.mark.accepts("004-13")
def test_the_usual_table_grows_from_a_second_to_two_hours_over_sixteen_attempts() -> None:
    policy = RetryRules()

    waits = []
    for attempt in range(1, 16):
        decision = after(attempt, policy=policy)
        assert isinstance(decision, RetryLater)
        assert decision.attempt == attempt + 1
        waits.append(decision.due_ms - NOW_MS)

    assert isinstance(after(16, policy=policy), DeadLetter)
    assert DEFAULT_DELAYS_MS[0] == 1000
    assert DEFAULT_DELAYS_MS[-1] == 2 * 3600 * 1000
    assert list(DEFAULT_DELAYS_MS) == sorted(set(DEFAULT_DELAYS_MS))
    for wait, least in zip(waits, DEFAULT_DELAYS_MS, strict=True):
        assert least <= wait <= least * 1.1


def test_messages_that_failed_together_do_not_come_back_together() -> None:
    policy = RetryRules(delays_ms=(100_000,), jitter=0.5)

    delays = {policy.delay_ms(1, number.to_bytes(16, "big")) for number in range(1000)}

    assert min(delays) >= 100_000
    assert max(delays) <= 150_000
    assert len(delays) > 900
    assert policy.delay_ms(1, MESSAGE) == policy.delay_ms(1, MESSAGE), "replay must equal live"


def test_a_delay_that_the_consumer_asked_for_wins_over_the_table() -> None:
    assert after(1, delay_ms=77) == RetryLater(2, NOW_MS + 77)
    assert after(1, delay_ms=0) == RetryNow(2)
    assert after(4, delay_ms=0) == DeadLetter("4 attempts failed")


def test_time_counts_from_the_failure_not_from_when_it_is_dealt_with() -> None:
    assert after(1, late_ms=400) == RetryLater(2, NOW_MS + 1000)
    assert after(1, late_ms=1000) == RetryNow(2)


def test_what_was_handed_back_comes_at_once_and_is_no_attempt() -> None:
    assert after(1, is_failure=False) == RetryNow(1)
    assert after(4, is_failure=False) == RetryNow(4)


@pytest.mark.accepts("000-42", "000-45")
@pytest.mark.parametrize(
    ("expires_in_ms", "delay_ms", "late_ms", "is_dead"),
    [
        (0, 0, 0, True),
        (999, -1, 0, True),  # it would expire while it waits
        (1000, -1, 0, True),
        (1001, -1, 0, False),
        (500, 0, 500, True),
        (501, 0, 500, False),
    ],
)
def test_what_would_be_expired_by_then_is_not_sent_again(
    expires_in_ms: int, delay_ms: int, late_ms: int, *, is_dead: bool
) -> None:
    decision = after(1, delay_ms=delay_ms, late_ms=late_ms, expires_at_ms=NOW_MS + expires_in_ms)

    assert (decision == DeadLetter("expired")) is is_dead


def test_the_number_of_attempts_ends_where_its_column_does() -> None:
    endless = RetryRules(delays_ms=(), max_attempts=10**9)

    assert after(0xFFFE, policy=endless) == RetryNow(0xFFFF)
    assert isinstance(after(0xFFFF, policy=endless), DeadLetter)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("orders/17", (PartitionName("orders"), 17)),
        ("%retry%orders%#host/app/1/3", (PartitionName("%retry%orders%#host/app/1"), 3)),
        ("orders", None),
        ("orders/", None),
        ("orders/x", None),
        ("", None),
        ("/4", None),
    ],
)
def test_a_position_in_a_header_is_read_back(text: str, position: object) -> None:
    assert parse_position(text) == position

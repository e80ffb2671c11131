"""What becomes of a message that a consumer could not process."""

import pytest

from pulque.model.positions import ConsumeSequence
from pulque.rules.consumption import Redelivery
from pulque.rules.retry import RetryNow, decide


@pytest.mark.parametrize(("attempt", "following"), [(1, 2), (7, 8), (0xFFFE, 0xFFFF)])
def test_every_failure_is_another_attempt(attempt: int, following: int) -> None:
    failed = Redelivery(ConsumeSequence(3), -1, "no")

    assert decide(failed, attempt) == RetryNow(following)


def test_the_number_of_attempts_stops_at_what_its_column_can_hold() -> None:
    failed = Redelivery(ConsumeSequence(3), 500, "no")

    assert decide(failed, 0xFFFF) == RetryNow(0xFFFF)

"""What becomes of a message that a consumer could not process."""

from dataclasses import dataclass

from pulque.rules.consumption import Redelivery

__all__ = ["RetryNow", "decide"]

ORIGIN_HEADER = "pulque.origin"
"""Which delivery a retry stems from: partition and sequence. Names the retry in the log."""
REASON_HEADER = "pulque.reason"
"""Why the last attempt failed."""


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Append the message to the group's retry partition with this attempt number."""

    attempt: int


def decide(redelivery: Redelivery, attempt: int) -> RetryNow:
    """Return what follows the failure of an attempt.

    Every failure is retried at once. Back-off, the last attempt and dead letters belong here.
    """
    del redelivery
    return RetryNow(min(attempt + 1, 0xFFFF))

"""The outcome of a message, by the way its handler ended.

Returning acks the message. Raising nacks it, with the error as the reason. ``Retry``, ``RetryAt``,
``Reject`` and ``BatchFailed`` choose another outcome.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pulque.client.arguments.due_times import instant_of
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.errors import UsageError

__all__ = [
    "BatchFailed",
    "Reject",
    "Retry",
    "RetryAt",
    "Verdict",
    "nack",
    "verdict_of",
    "verdicts_of",
]

log = logging.getLogger("pulque.app")

_LONGEST_DELAY = 2 * 365 * 24 * 3600.0
_MAX_TEXT = 1000


class Retry(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a handler to have its message retried.

    Args:
        reason: Why; it is kept with the message.
        delay: How long to wait, in seconds or as a timedelta; None leaves it to the group.

    Raises:
        UsageError: The delay is negative, not a number, or longer than two years.
    """

    def __init__(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 <= seconds <= _LONGEST_DELAY):
            raise UsageError(
                f"delay is {delay!r}; 0 to {_LONGEST_DELAY:.0f} seconds are allowed, as a number "
                "or a timedelta"
            )
        _check_reason(reason)
        super().__init__(reason)
        self.reason = reason
        self.delay = seconds


class RetryAt(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a handler to have its message retried at a certain time.

    A delay server stores the whole message until then; it is delivered to this group alone, as the
    next attempt. It is settled here only after the delay server has it on disk.

    Args:
        when: When to deliver it again; with a time zone. A time in the past means at once.
        reason: Why; it is kept with the message.

    Raises:
        UsageError: ``when`` is not a ``datetime``, or has no time zone.
    """

    def __init__(self, when: datetime, reason: str = "") -> None:
        instant_of(when, "when")
        _check_reason(reason)
        super().__init__(reason)
        self.when = when
        self.reason = reason


class Reject(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a handler to make its message a dead letter at once.

    Args:
        reason: Why; it is kept with the message.
    """

    def __init__(self, reason: str = "") -> None:
        _check_reason(reason)
        super().__init__(reason)
        self.reason = reason


class BatchFailed(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a batch handler to nack some of its messages, and ack the others.

    Args:
        reasons: For each failed message (or its index in the handler's list), the reason: a text,
            or an exception; a ``Retry``, ``RetryAt`` or ``Reject`` has its usual effect.
    """

    def __init__(self, reasons: Mapping[ReceivedMessage | int, str | BaseException]) -> None:
        super().__init__(f"{len(reasons)} messages failed")
        self.reasons = dict(reasons)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How to nack one message."""

    reason: str
    delay: float | None = None
    at: datetime | None = None
    """When to retry it, if its handler gave a time."""
    is_dead: bool = False
    """Whether to make it a dead letter."""


def verdict_of(error: BaseException | str) -> Verdict:
    """Return how to nack a message whose handling ended with this error."""
    match error:
        case str():
            return Verdict(error)
        case Retry():
            return Verdict(error.reason or "to be retried", error.delay)
        case RetryAt():
            when = error.when.isoformat(timespec="seconds")
            return Verdict(error.reason or f"to be retried at {when}", at=error.when)
        case Reject():
            return Verdict(error.reason or "rejected", is_dead=True)
        case _:
            return Verdict(_text_of(error))


def verdicts_of(
    error: BatchFailed, messages: Sequence[ReceivedMessage]
) -> dict[ReceivedMessage, Verdict]:
    """Return how to nack the failed messages of a batch.

    Raises:
        UsageError: The error names a message that is not in the batch.
    """
    known = set(messages)
    for which in error.reasons:
        if which not in known:
            raise UsageError(
                f"BatchFailed names {which!r}, which is not in the batch of {len(messages)}"
            )
    return {
        which: verdict_of(reason)
        for which, reason in error.reasons.items()
        if not isinstance(which, int)
    }


def nack(message: ReceivedMessage, verdict: Verdict) -> None:
    """Nack a message, unless its handler settled it already."""
    if message.is_finished:
        return
    if verdict.is_dead:
        message.reject(verdict.reason)
        return
    try:
        message.nack(verdict.reason, delay=verdict.delay, at=verdict.at)
    except UsageError as problem:
        # The broker's limit of delays, say: that is no reason to keep the message.
        log.warning("nacked without its delay: %s", problem)
        message.nack(verdict.reason)


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str):
        raise UsageError(f"reason is {reason!r}; a str is allowed, as str(error)")


def _text_of(error: BaseException) -> str:
    """Return an error as a short text; its own may be long, or raise."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001  # it is the application's
        text = f"(its text raised {type(problem).__name__})"
    told = f"{name}: {text}"[:_MAX_TEXT] if text else name
    return told.encode(errors="backslashreplace").decode()

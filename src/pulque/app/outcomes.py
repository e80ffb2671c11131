"""What becomes of a message, by the way its handler ended.

A handler that returns is done with its message: ack. One that raises could not: nack, with the
error as the reason. ``Retry``, ``RetryAt``, ``Reject`` and ``BatchFailed`` say more than that.
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
    """Raised by a handler that cannot do it now: the message comes again.

    Args:
        reason: Why; it is kept with the message.
        delay: How long to wait, in seconds or as a timedelta; None leaves it to the group.

    Raises:
        UsageError: The delay is negative, no number, or longer than two years.
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
    """Raised by a handler that can do it at a certain time only: the message comes again then.

    A delay server has the whole message until then, and it comes back to this group alone, as the
    next attempt. It is settled here only after the delay server has it.

    Args:
        when: When to deliver it again; with a time zone. What is past is now.
        reason: Why; it is kept with the message.

    Raises:
        UsageError: That is no instant, or one without a time zone.
    """

    def __init__(self, when: datetime, reason: str = "") -> None:
        instant_of(when, "when")
        _check_reason(reason)
        super().__init__(reason)
        self.when = when
        self.reason = reason


class Reject(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a handler that can never do it: the message becomes a dead letter at once.

    Args:
        reason: Why; it is kept with the message.
    """

    def __init__(self, reason: str = "") -> None:
        _check_reason(reason)
        super().__init__(reason)
        self.reason = reason


class BatchFailed(Exception):  # noqa: N818  # an order to us, not something that went wrong
    """Raised by a batch handler: these could not be done, and all others are done.

    Args:
        reasons: For each message that failed (or for its place in the list that the handler
            was given), the reason: a text, or the error that it ended with; a ``Retry``,
            ``RetryAt`` or ``Reject`` counts as such.
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
    """When it is to come again, if its handler said so."""
    is_dead: bool = False
    """Whether no other attempt is of any use."""


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
    """Return how to nack those messages of a batch that failed.

    Raises:
        UsageError: It names what is not in the batch.
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
    """Return an error as one text; its own may be long, or fail itself."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001  # it is the application's
        text = f"(its text raised {type(problem).__name__})"
    told = f"{name}: {text}"[:_MAX_TEXT] if text else name
    return told.encode(errors="backslashreplace").decode()

"""When a message is to be delivered: what an application may say, and the instant it means.

A delay counts from now, an instant stands for itself, and a level is a shortcut for a delay that
is used often. Whatever is past is due at once. Instants are rounded up to the millisecond: a
message is never early.
"""

from datetime import UTC, datetime, timedelta
from math import ceil

from pulque.errors import UsageError
from pulque.model.pack import NEVER

__all__ = ["ANY_DELAY_MS", "AT_ONCE", "LEVELS", "check_longest", "due_of", "instant_of", "ms_of"]

AT_ONCE = 0
"""As a due instant: there is nothing to wait for."""
ANY_DELAY_MS = 2**62
"""As the longest delay, until a delay server says what it allows."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_DAY_MS = 24 * 3600 * 1000
_LAST_MS = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
_MINUTES = (*range(1, 11), 20, 30, 60, 120)
LEVELS: tuple[int, ...] = (
    1_000,
    5_000,
    10_000,
    30_000,
    *(60_000 * minutes for minutes in _MINUTES),
)
"""The delay of each level in milliseconds: level 1 is a second, level 18 two hours."""


def due_of(delay: object, at: object, level: object, now_ms: int) -> int:
    """Return when a message is due, in milliseconds since 1970; ``AT_ONCE`` for now.

    Args:
        delay: Seconds or a timedelta from now on, or None.
        at: A datetime with a time zone, or None.
        level: 1 to 18, or None.
        now_ms: Now.

    Raises:
        UsageError: More than one of them is said, or one of them cannot be.
    """
    said = [
        f"{name}={value!r}"
        for name, value in (("delay", delay), ("at", at), ("level", level))
        if value is not None
    ]
    if not said:
        return AT_ONCE
    if len(said) > 1:
        raise UsageError(f"{' and '.join(said)}: only one of delay, at and level is allowed")
    if delay is not None:
        waits_ms = delay_ms_of(delay)
        return now_ms + waits_ms if waits_ms else AT_ONCE
    if at is not None:
        due_ms = instant_of(at, "at")
        return due_ms if due_ms > now_ms else AT_ONCE
    return now_ms + _level_ms(level)


def delay_ms_of(delay: object) -> int:
    """Return a delay in milliseconds.

    Raises:
        UsageError: It is negative, no number, or beyond all calendars.
    """
    if isinstance(delay, timedelta):
        waits_ms: float = -(-delay // _MILLISECOND)
    elif isinstance(delay, int | float) and not isinstance(delay, bool):
        waits_ms = delay * 1000
    else:
        raise _no_delay(delay)
    # What is no number at all, NaN, compares to nothing.
    if not 0 <= waits_ms <= _LAST_MS:
        raise _no_delay(delay)
    return ceil(waits_ms)


def instant_of(at: object, name: str) -> int:
    """Return an instant in milliseconds since 1970, rounded up.

    Raises:
        UsageError: It is no datetime, or one without a time zone.
    """
    if not isinstance(at, datetime):
        raise UsageError(f"{name} is {at!r}; a datetime with a time zone is allowed")
    if at.utcoffset() is None:
        raise UsageError(
            f"{name} is {at!r}, which has no time zone; use datetime.now(timezone.utc) or alike"
        )
    # Whole numbers throughout: a float would lose a millisecond now and then.
    since: timedelta = at - _EPOCH
    return -(-since // _MILLISECOND)


def check_longest(due_ms: int, now_ms: int, longest_ms: int) -> None:
    """Refuse what lies further ahead than the delay servers allow.

    Raises:
        UsageError: It does.
    """
    if due_ms - now_ms > longest_ms:
        raise UsageError(
            f"due in {(due_ms - now_ms) / _DAY_MS:,.1f} days; at most {longest_ms / _DAY_MS:,.1f} "
            "days ahead are allowed by the delay server (its setting schedule.longest_delay)"
        )


def _level_ms(level: object) -> int:
    if type(level) is int and 1 <= level <= len(LEVELS):
        return LEVELS[level - 1]
    raise UsageError(
        f"level is {level!r}; a whole number from 1 (one second) to {len(LEVELS)} (two hours) is "
        "allowed"
    )


def _no_delay(delay: object) -> UsageError:
    return UsageError(
        f"delay is {delay!r}; 0 or more seconds are allowed, as a number or a timedelta"
    )


def ms_of(instant: datetime | None) -> int:
    """Return an instant in milliseconds since 1970; 0 for None."""
    if instant is None:
        return NEVER
    if not isinstance(instant, datetime):
        raise UsageError(f"{instant!r} is not an instant; a datetime with a time zone is allowed")
    if instant.tzinfo is None:
        raise UsageError(f"{instant!r} has no time zone; use datetime.now(timezone.utc) or alike")
    # Whole numbers throughout: a float would lose a millisecond now and then.
    return (instant - _EPOCH) // _MILLISECOND

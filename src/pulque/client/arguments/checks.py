"""Checks of what an application passes: a wrong type or value gets an error that names it."""

import os
from collections.abc import Collection, Iterable
from math import isnan

from pulque.errors import UsageError

__all__ = [
    "check_callback",
    "check_choice",
    "check_flag",
    "check_number",
    "check_path",
    "check_text",
    "check_timeout",
    "check_wait",
    "check_whole",
    "check_words",
]

_LONGEST = 1_000_000


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise UsageError unless a value is a number from ``least`` to ``most``."""
    # What is no number at all, NaN, compares to nothing.
    if not _is_number(value) or not least <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{name} is {value!r}; a number from {least} to {most} is allowed")


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise UsageError unless a value is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{name} is {value!r}; a whole number from {least} to {most} is allowed")


def check_timeout(seconds: object, name: str = "timeout") -> float:
    """Return a limit of time in seconds.

    Raises:
        UsageError: It is no number, or not more than 0.
    """
    if not _is_number(seconds) or not 0 < seconds < _LONGEST:  # type: ignore[operator]
        raise UsageError(
            f"{name} is {seconds!r}; a number of seconds is allowed, more than 0 and at most a "
            "million"
        )
    return float(seconds)  # type: ignore[arg-type]


def check_wait(seconds: object, name: str = "timeout") -> float:
    """Return how long to wait for something, in seconds; what is negative is 0.

    Raises:
        UsageError: It is no number.
    """
    if not _is_number(seconds) or isnan(seconds):  # type: ignore[arg-type]
        raise UsageError(f"{name} is {seconds!r}; a number of seconds is allowed")
    return max(0.0, float(seconds))  # type: ignore[arg-type]


def check_choice(name: str, value: object, allowed: Collection[str | None]) -> None:
    """Raise UsageError unless a value is one of the allowed ones."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        *most, last = [f'"{each}"' if each is not None else "None" for each in allowed]
        raise UsageError(f"{name} is {value!r}; {', '.join(most)} and {last} are allowed")


def check_flag(name: str, value: object, *, may_be_none: bool = False) -> None:
    """Raise UsageError unless a value is True or False."""
    if type(value) is not bool and not (may_be_none and value is None):
        raise UsageError(f"{name} is {value!r}; True and False are allowed")


def check_path(name: str, value: object) -> None:
    """Raise UsageError unless a value is the name of a file or folder."""
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{name} is {value!r}; a path is allowed, as a str or a pathlib.Path")


def check_text(name: str, value: object, *, may_be_none: bool = False) -> None:
    """Raise UsageError unless a value is a str; one that may be None is never empty."""
    if may_be_none and value == "":
        # It is what a shell makes of a variable that is not set.
        raise UsageError(f"{name} is empty; to mean all, leave it out")
    if not isinstance(value, str) and not (may_be_none and value is None):
        raise UsageError(f"{name} is {value!r}; a str is allowed")


def check_callback(name: str, value: object) -> None:
    """Raise UsageError unless a value is a function, or can be called like one."""
    if not callable(value):
        raise UsageError(f"{name} is {value!r}; a function is allowed")


def check_words(name: str, value: object) -> None:
    """Raise UsageError unless a value is a str, or some of them."""
    if isinstance(value, bytes | bytearray) or not isinstance(value, Iterable):
        raise UsageError(f"{name} is {value!r}; a str, or some of them, is allowed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

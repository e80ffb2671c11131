"""Durations on the command line: ``10`` is ten seconds, as is ``10s``; ``2h`` and ``PT2H``."""

import re
from datetime import UTC, datetime, timedelta

import typer

from pulque.settings.foreign import quoted
from pulque.settings.units import parse_duration

__all__ = ["ahead_of_now", "before_now", "parse_seconds", "parse_span", "parse_span_with_unit"]

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


def parse_span(text: str) -> timedelta:
    """Read a duration; a number without a unit counts seconds.

    Raises:
        ValueError: It is none, and the text says what is allowed.
    """
    return parse_duration(f"{text}s" if _NUMBER.fullmatch(text) else text)


def ahead_of_now(text: str) -> datetime | None:
    """Return the instant that is a duration with a unit from now, ``2h``; None for no duration."""
    span = _span_with_unit(text)
    return None if span is None else datetime.now(UTC) + span


def before_now(text: str) -> datetime | None:
    """Return the instant that was a duration with a unit ago, ``2h``; None for no duration."""
    span = _span_with_unit(text)
    return None if span is None else datetime.now(UTC) - span


def _span_with_unit(text: str) -> timedelta | None:
    try:
        return parse_duration(text)
    except ValueError:
        return None


def parse_seconds(value: object) -> float:
    """Read the value of an option as seconds."""
    try:
        return parse_span(str(value)).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(f"{quoted(str(value))}: {error}; 10 is 10s") from None


def parse_span_with_unit(value: object) -> timedelta:
    """Read the value of an option that removes what is older: its unit must be said."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise typer.BadParameter(f"{quoted(str(value))}: {error}") from None

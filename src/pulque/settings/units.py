"""Parse and format durations and sizes: ``7d``, ``1h30m``, ``500ms``, ``64MiB``.

ISO 8601 durations (``P7D``, ``PT1H30M``) are allowed, too. A bare number is refused: it could
mean seconds or milliseconds.
"""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, ByteSize

__all__ = [
    "DAY",
    "GIB",
    "HOUR",
    "KIB",
    "MIB",
    "MILLISECOND",
    "MINUTE",
    "SECOND",
    "TIB",
    "Duration",
    "Listed",
    "Number",
    "Share",
    "Size",
    "parse_duration",
    "parse_listed",
    "parse_number",
    "parse_share",
    "parse_size",
    "show_duration",
    "show_size",
]

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4
MILLISECOND = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_ALIASES = {"min": "m", "sec": "s"}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|sec|w|d|h|m|s)\s*", re.ASCII)
_ISO = re.compile(
    r"P(?=.)(?:(?P<w>\d+)W)?(?:(?P<d>\d+)D)?"
    r"(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)
_LONGEST_MS = timedelta(days=36_500) // timedelta(milliseconds=1)
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_duration(value: object) -> timedelta:
    """Parse a duration, or raise ``ValueError`` with the allowed forms."""
    if isinstance(value, timedelta):
        return value
    text = value.strip() if isinstance(value, str) else ""
    parts = _iso_parts(text) if text[:1] == "P" else _plain_parts(text)
    if not parts:
        raise ValueError("a duration is written like 7d, 1h30m, 500ms or P7D")
    milliseconds = sum(float(number) * _UNITS_MS[unit] for number, unit in parts)
    if milliseconds > _LONGEST_MS:
        raise ValueError("a duration is at most 36500d")
    return timedelta(milliseconds=milliseconds)


def parse_size(value: object) -> int | str:
    """Raise ``ValueError`` for a value that is not a size; the type itself parses the units."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    raise ValueError("a size is written like 64MiB, or as a whole number of bytes")


def parse_number(value: object) -> int | str:
    """Raise ``ValueError`` for a value that is not a whole number; ``true`` is not 1 here."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    raise ValueError("a whole number is wanted")


def parse_share(value: object) -> float | str:
    """Raise ``ValueError`` for a value that is not a number; ``true`` is not 1 here."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return value
    raise ValueError("a number is wanted, such as 0.1")


def parse_listed(value: object) -> tuple[str, ...]:
    """Parse a list of texts: a list, or one text separated by commas or spaces."""
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError('a list is wanted: ["a", "b"] in a file, or a,b')


def _plain_parts(text: str) -> list[tuple[str, str]]:
    parts = [(number, _ALIASES.get(unit, unit)) for number, unit in _PART.findall(text)]
    units = [list(_UNITS_MS).index(unit) for _, unit in parts]
    is_whole = _PART.sub("", text) == ""
    # Larger units first and each once, so that 5m3m and 3m1h are seen for the slips they are.
    return parts if is_whole and units == sorted(set(units)) else []


def _iso_parts(text: str) -> list[tuple[str, str]]:
    found = _ISO.fullmatch(text)
    if found is None:
        return []
    return [(number, unit) for unit, number in found.groupdict().items() if number is not None]


def show_duration(duration: timedelta) -> str:
    """Format a duration so that ``parse_duration`` returns the same."""
    left = round(duration / timedelta(milliseconds=1))
    parts = []
    for unit, milliseconds in _UNITS_MS.items():
        number, left = divmod(left, milliseconds) if unit != "w" else (0, left)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def show_size(size: int) -> str:
    """Format a size in the largest unit that divides it."""
    number, unit = size, 0
    while number and number % 1024 == 0 and unit < len(_SIZE_UNITS) - 1:
        number, unit = number // 1024, unit + 1
    return f"{number}{_SIZE_UNITS[unit]}"


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Listed = Annotated[tuple[str, ...], BeforeValidator(parse_listed)]
Number = Annotated[int, BeforeValidator(parse_number)]
Share = Annotated[float, BeforeValidator(parse_share)]
Size = Annotated[ByteSize, BeforeValidator(parse_size)]

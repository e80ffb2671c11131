"""Requests that take longer than a turn of the event loop, in steps.

A generator does such a request; each ``yield`` is a place where others may have their turn. What
it returns is the outcome. ``net/server.py`` says when the next step is taken.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

__all__ = ["ROWS_PER_STEP", "Steps", "in_slices"]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Steps with an outcome."""
ROWS_PER_STEP = 128
"""How many rows of a table a step looks at: about a millisecond."""


def in_slices(rows: Iterable[T], size: int = ROWS_PER_STEP) -> Iterator[list[T]]:
    """Yield rows in lists that are short enough for one step."""
    left = iter(rows)
    while some := list(islice(left, size)):
        yield some

"""Requests that take longer than a turn of the event loop, in steps.

A generator does such a request; each ``yield`` is a place where others may have their turn. What
it returns is the outcome. ``net/server.py`` says when the next step is taken.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from pulque.net.server import Connection, Work

__all__ = ["ROWS_PER_STEP", "Steps", "in_slices", "while_heard"]

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


def while_heard(connection: Connection, work: Work) -> Work:
    """Take the steps of a request without effect for as long as its client is there."""
    for _ in work:
        if connection.is_gone:
            return
        yield

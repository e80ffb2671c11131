"""Who asks much waits longer: of each connection, a few questions are taken at a time."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["Owned", "share"]


class Owned(Protocol):
    """A question of somebody."""

    @property
    def owner(self) -> object:
        """Whose."""


T = TypeVar("T", bound=Owned)


def share(asked: Iterable[T], most: int) -> tuple[list[T], list[T]]:
    """Return the questions that are next, so many of each owner at most, and the others."""
    taken: Counter[object] = Counter()
    first: list[T] = []
    rest: list[T] = []
    for each in asked:
        taken[each.owner] += 1
        (first if taken[each.owner] <= most else rest).append(each)
    return first, rest

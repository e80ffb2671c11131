"""Who is next: several sources are handed out in turn, and a busy one starves no other.

Each source counts what was taken from it, divided by its weight; the one with the least is next.
A source that had nothing for a while joins at the level of the others, so that nobody saves up.
"""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

__all__ = ["Shares"]

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """The turns of several sources."""

    def __init__(self) -> None:
        self._taken: dict[K, float] = {}
        self._level = 0.0
        """Where whoever comes back joins in."""

    def next_of(self, ready: Collection[K]) -> K:
        """Return which of those that have something is next; there must be one."""
        taken, level = self._taken, self._level
        found = min(ready, key=lambda each: max(taken.get(each, level), level))
        self._level = max(self._level, taken.get(found, level))
        return found

    def took(self, source: K, amount: float, weight: float = 1.0) -> None:
        """Take in that so much was taken from a source."""
        self._taken[source] = max(self._taken.get(source, 0.0), self._level) + amount / weight

    def forget(self, source: K) -> None:
        """Take in that a source is gone."""
        self._taken.pop(source, None)

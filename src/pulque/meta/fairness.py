"""Who asks much waits longer: of each connection, a few questions are taken at a time."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

__all__ = ["Owned", "share"]


class Owned(Protocol):
    """A question of somebody."""

    @property
    def owner(self) -> object:
        """Whose."""


T = TypeVar("T", bound=Owned)


def share(
    asked: Iterable[T], most: int, about: Callable[[T], object] = id
) -> tuple[list[T], list[T]]:
    """Return the questions that are next, so many of each owner at most, and the others.

    Args:
        asked: The questions, oldest first.
        most: How many of each owner are next.
        about: Returns what a question is about. Questions about the same thing keep their order,
            whoever asks them; if not given, each is about something else.
    """
    taken: Counter[object] = Counter()
    first: list[T] = []
    rest: list[T] = []
    waiting: set[object] = set()
    for each in asked:
        if taken[each.owner] < most and about(each) not in waiting:
            taken[each.owner] += 1
            first.append(each)
        else:
            waiting.add(about(each))
            rest.append(each)
    return first, rest

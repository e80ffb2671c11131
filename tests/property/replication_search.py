"""A walk through all states of a game, the shortest ways first."""

from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["Found", "search"]

S = TypeVar("S", bound=Hashable)


class _Game(Protocol[S]):
    def start(self) -> S: ...

    def moves(self, state: S) -> Iterator[tuple[str, S]]: ...

    def problem(self, state: S) -> str: ...


class Found(NamedTuple):
    """What a search came to."""

    states: int
    """How many there are; when something was found, how many were seen until then."""
    problem: str
    """The first promise that did not hold; nothing if all of them hold in all states."""
    steps: tuple[str, ...]
    """The shortest way there."""


def search(game: _Game[S]) -> Found:
    """Look at every state that can be reached, until a promise does not hold in one of them."""
    start = game.start()
    came_from: dict[S, tuple[S, str] | None] = {start: None}
    layer = [start]
    while layer:
        reached = []
        for state in layer:
            for label, after in game.moves(state):
                if after not in came_from:
                    came_from[after] = (state, label)
                    if problem := game.problem(after):
                        return Found(len(came_from), problem, _way(came_from, after))
                    reached.append(after)
        layer = reached
    return Found(len(came_from), "", ())


def _way(came_from: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    steps = []
    while before := came_from[state]:
        state, label = before
        steps.append(label)
    return tuple(reversed(steps))

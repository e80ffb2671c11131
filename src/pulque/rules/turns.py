"""The order in which a pull visits partitions.

Higher priorities come first. Among partitions of one priority, the one that was served longest
ago comes first, so that none starves another. Every so many pulls of a group begin with another
priority than the highest that waits: waiting priorities take turns, so that
each makes progress, however large the backlog of higher ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pulque.model.names import MAX_LEVEL, Group
from pulque.model.positions import PartitionId

__all__ = ["PullCandidate", "Turns"]


class PullCandidate(NamedTuple):
    """One partition that a pull wants."""

    place: int
    """Its index in the request."""
    partition: PartitionId
    level: int


class Turns:
    """When each partition was served last, for all groups of one broker. In memory only.

    Args:
        low_share: The share of a group's pulls that begin with another level than the highest;
            with 0, none does.
    """

    def __init__(self, low_share: float) -> None:
        self._every = round(1 / low_share) if low_share > 0 else 0
        self._since: dict[Group, int] = {}
        """How many pulls of a group in a row began with the highest level."""
        self._favoured: dict[Group, int] = {}
        """The level with which the last other pull began."""
        self._served: dict[tuple[PartitionId, Group], int] = {}
        self._clock = 0

    def favoured(self, group: Group, waiting: Callable[[], Iterable[int]]) -> int | None:
        """Return the level with which a group's next pull begins; None for the highest.

        Args:
            group: The group.
            waiting: Returns the levels that have messages.
        """
        if not self._every or self._since.get(group, 0) + 1 < self._every:
            return None
        last = self._favoured.get(group, MAX_LEVEL)
        # The next one above the last, and after the highest the lowest: none is left out.
        return min(waiting(), key=lambda level: (level <= last, level), default=None)

    def in_order(
        self, group: Group, candidates: Sequence[PullCandidate], favoured: int | None
    ) -> list[PullCandidate]:
        """Return the partitions in the order in which a pull visits them."""
        if len(candidates) < 2:
            return list(candidates)
        served = self._served

        def turn_of(each: PullCandidate) -> tuple[bool, int, int]:
            return (
                each.level != favoured,
                -each.level,
                served.get((each.partition, group), 0),
            )

        return sorted(candidates, key=turn_of)

    def served(
        self, group: Group, favoured: int | None, partitions: Iterable[PartitionId]
    ) -> None:
        """Record that a pull delivered new messages of these partitions."""
        self._clock += 1
        for partition in partitions:
            self._served[partition, group] = self._clock
        if favoured is None:
            self._since[group] = self._since.get(group, 0) + 1
        else:
            self._since[group] = 0
            self._favoured[group] = favoured

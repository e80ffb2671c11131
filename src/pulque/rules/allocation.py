"""Allot the partitions of an ordered group to its consumers.

Every partition belongs to exactly one consumer, no consumer has two more than another, and as few
partitions as possible move: during a hand-over, messages have to wait. The result depends only
on the arguments, not on their order, so all meta servers compute the same.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

__all__ = ["allocate"]

C = TypeVar("C", bound=str)


def allocate(
    partitions: Collection[int], consumers: Collection[C], current: Mapping[int, C]
) -> dict[int, C]:
    """Return the consumer of each partition; nothing without consumers.

    Args:
        partitions: The places of the partitions to allot.
        consumers: The consumers of the group.
        current: The present consumer of partitions; others may be in it, too.
    """
    if not consumers:
        return {}
    held: dict[C, list[int]] = {each: [] for each in sorted(consumers)}
    free: list[int] = []
    for partition in sorted(partitions):
        holder = current.get(partition)
        if holder is not None and holder in held:
            held[holder].append(partition)
        else:
            free.append(partition)
    shares = _shares(held, len(partitions))
    for consumer, mine in held.items():
        free += mine[shares[consumer] :]
        del mine[shares[consumer] :]
    free.sort(reverse=True)
    for consumer, mine in held.items():
        while len(mine) < shares[consumer]:
            mine.append(free.pop())
    return {partition: consumer for consumer, mine in held.items() for partition in mine}


def _shares(held: Mapping[C, Collection[int]], partitions: int) -> dict[C, int]:
    """Return how many each gets: the remainder goes to those that have the most now."""
    least, more = divmod(partitions, len(held))
    by_many = sorted(held, key=lambda each: -len(held[each]))
    return {each: least + (place < more) for place, each in enumerate(by_many)}

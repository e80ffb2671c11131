"""Which consumer of an exclusive group pulls from which partition.

Every partition belongs to exactly one consumer, no consumer has two more than another, and as few
partitions as possible change hands: for a hand-over, messages have to wait. The result follows
from the arguments alone, whatever order they come in, so all meta servers find the same.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

__all__ = ["allocate"]

C = TypeVar("C", bound=str)


def allocate(
    partitions: Collection[int], consumers: Collection[C], current: Mapping[int, C]
) -> dict[int, C]:
    """Return whom each partition belongs to; nothing, if there is nobody.

    Args:
        partitions: The places of what is to be allotted.
        consumers: Who is there.
        current: Whom partitions belong to now; others may be in it, too.
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
    """Say how many each gets: those who have the most get what cannot be dealt evenly."""
    least, more = divmod(partitions, len(held))
    by_many = sorted(held, key=lambda each: -len(held[each]))
    return {each: least + (place < more) for place, each in enumerate(by_many)}

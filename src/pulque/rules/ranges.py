"""Split and merge the slot ranges of a subject, so that order holds.

An order key never changes its slot, but a slot may change its partition. When that
happens the old partition is closed: it takes no more messages, and a group consumes the new one,
its child, in order only after it has drained all parents. So a partition never gets another
range; new partitions follow it. Closed ones keep their place in the list.
"""

from collections.abc import Sequence
from itertools import pairwise

from pulque.errors import InvalidRequestError
from pulque.model.cluster import Placement
from pulque.model.names import PartitionName, Subject
from pulque.model.routes import SLOTS, Slots

__all__ = ["MOST_PARTITIONS", "check_count", "merge", "open_places", "servable", "split"]

MOST_PARTITIONS = SLOTS
"""The most partitions of a subject: then each has one slot."""


def open_places(placed: Sequence[Placement]) -> list[int]:
    """Return the places of the partitions that take messages, in the order of their slots."""
    found = [at for at, each in enumerate(placed) if not each.is_closed]
    return sorted(found, key=lambda at: placed[at].slots)


def servable(placed: Sequence[Placement], drained: frozenset[int]) -> list[int]:
    """Return the places of the partitions that a group may consume in order now.

    Args:
        placed: The partitions of the subject.
        drained: The closed ones that the group has drained.
    """
    return [
        at
        for at, each in enumerate(placed)
        if at not in drained and drained.issuperset(each.parents)
    ]


def check_count(subject: Subject, count: int) -> None:
    """Check a number of partitions.

    Raises:
        InvalidRequestError: The number is not allowed.
    """
    if not 1 <= count <= MOST_PARTITIONS:
        raise InvalidRequestError(
            f"subject {subject} would have {count} partitions; 1 to {MOST_PARTITIONS} are allowed"
        )


def split(
    subject: Subject, placed: Sequence[Placement], count: int, broker_groups: Sequence[str]
) -> tuple[Placement, ...]:
    """Return the partitions of a subject after a split into more open ones.

    The widest ranges are split first, into equal parts. The first part of each stays on its
    broker group.

    Args:
        subject: Its name.
        placed: Its partitions now.
        count: How many are to take messages.
        broker_groups: The broker groups of the additional partitions.

    Raises:
        InvalidRequestError: The count is not larger than now, or too large.
    """
    check_count(subject, count)
    parents = open_places(placed)
    if count <= len(parents) or len(broker_groups) != count - len(parents):
        raise InvalidRequestError(
            f"subject {subject} has {len(parents)} partitions that take messages, and {count} are "
            "wanted: there can only be more; merge them to have fewer"
        )
    found, groups = list(placed), list(broker_groups)
    number = _highest(placed)
    for at, pieces in _pieces(placed, parents, count).items():
        parent = placed[at]
        found[at] = parent._replace(is_closed=True)
        for i in range(pieces):
            number += 1
            group = groups.pop(0) if i else parent.broker_group
            found.append(_child(subject, number, group, _part(parent.slots, i, pieces), (at,)))
    return tuple(found)


def merge(subject: Subject, placed: Sequence[Placement], count: int) -> tuple[Placement, ...]:
    """Return the partitions of a subject after a merge into fewer open ones.

    Neighbours are merged, those with the smallest ranges first. The result is placed on the broker
    group of the first of them.

    Raises:
        InvalidRequestError: The count is not smaller than now, or 0.
    """
    check_count(subject, count)
    parents = open_places(placed)
    if count >= len(parents):
        raise InvalidRequestError(
            f"subject {subject} has {len(parents)} partitions that take messages, and {count} are "
            "wanted: merging makes fewer; extend it to have more"
        )
    runs = [[at] for at in parents]
    while len(runs) > count:
        widths = [_reach(placed, [*one, *two]) for one, two in pairwise(runs)]
        at = widths.index(min(widths))
        runs[at : at + 2] = [runs[at] + runs[at + 1]]
    found = list(placed)
    number = _highest(placed)
    for run in (each for each in runs if len(each) > 1):
        number += 1
        for at in run:
            found[at] = placed[at]._replace(is_closed=True)
        slots = Slots(placed[run[0]].slots.start, placed[run[-1]].slots.end)
        found.append(_child(subject, number, placed[run[0]].broker_group, slots, tuple(run)))
    return tuple(found)


def _pieces(placed: Sequence[Placement], parents: Sequence[int], count: int) -> dict[int, int]:
    """Return into how many parts each partition is split, without those that are not."""
    pieces = dict.fromkeys(parents, 1)
    for _ in range(count - len(parents)):
        # The one whose parts are the widest; a part of one slot cannot be split.
        at = max(pieces, key=lambda each: (_width(placed[each].slots) / pieces[each], -each))
        pieces[at] += 1
    return {at: parts for at, parts in pieces.items() if parts > 1}


def _part(slots: Slots, index: int, parts: int) -> Slots:
    start, width = slots.start, _width(slots)
    return Slots(start + index * width // parts, start + (index + 1) * width // parts)


def _child(
    subject: Subject, number: int, broker_group: str, slots: Slots, parents: tuple[int, ...]
) -> Placement:
    name = PartitionName(f"{subject}#{number}")
    return Placement(name, broker_group, slots, parents=parents)


def _reach(placed: Sequence[Placement], places: Sequence[int]) -> int:
    return sum(_width(placed[at].slots) for at in places)


def _width(slots: Slots) -> int:
    return slots.end - slots.start


def _highest(placed: Sequence[Placement]) -> int:
    """Return the highest number in the names of the partitions."""
    numbers = (each.partition.rpartition("#")[2] for each in placed if "#" in each.partition)
    return max((int(each) for each in numbers if each.isdecimal()), default=0)

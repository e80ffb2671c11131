"""Where subjects are placed, and what routes say about them.

A subject is placed once: one partition on each of two broker groups (on all there are, if fewer),
those with the fewest partitions first. It stays there for ever; only a command gives it more.
Each partition has a range of the 1024 slots, and together they have all of them: so an order key
belongs to exactly one partition. A partition that is added takes half of the widest range.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from zlib import crc32

from pulque.errors import InvalidRequestError, UnavailableError
from pulque.model.cluster import Placement, Serving
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.routes import SLOTS, PartitionRoute, Route, Slots

__all__ = [
    "MOST_PARTITIONS",
    "extend",
    "fewest_first",
    "partitions_per_group",
    "place",
    "place_on",
    "route_of_delays",
    "route_of_pattern",
    "route_of_subject",
    "version_of",
]

MOST_PARTITIONS = 256
"""Of one subject: beyond it, a range of slots would be too small to be dealt evenly."""


def place(
    subject: Subject, usable: Iterable[str], partitions: Mapping[str, int], *, spread: int = 2
) -> tuple[Placement, ...]:
    """Return the partitions of a new subject.

    Args:
        subject: Its name, and that of its partitions.
        usable: The broker groups that take sends now.
        partitions: How many partitions each broker group was given.
        spread: On how many broker groups; on all there are, if fewer.

    Raises:
        UnavailableError: No broker group is usable.
    """
    chosen = fewest_first(subject, usable, partitions)[:spread]
    if not chosen:
        raise UnavailableError(
            f"no broker takes messages now, so subject {subject} cannot be placed; try again "
            "when one is there"
        )
    return place_on(subject, chosen)


def fewest_first(
    subject: Subject, broker_groups: Iterable[str], partitions: Mapping[str, int]
) -> list[str]:
    """Return broker groups in the order in which a subject goes to them.

    Those with the fewest partitions come first. Among equals the subject's name decides, so that
    meta servers that place subjects at the same time do not all take the same ones.
    """
    return sorted(
        broker_groups,
        key=lambda group: (partitions.get(group, 0), crc32(f"{subject} {group}".encode()), group),
    )


def place_on(subject: Subject, broker_groups: Sequence[str]) -> tuple[Placement, ...]:
    """Return the partitions of a subject on chosen broker groups, with equal shares of the slots.

    Args:
        subject: Its name: that of the first partition on each group, too.
        broker_groups: One for each partition; a group that is named twice gets two.

    Raises:
        InvalidRequestError: There are none, or too many.
    """
    _check_number(subject, len(broker_groups))
    placed: list[Placement] = []
    further = 0
    for i, group in enumerate(broker_groups):
        name = PartitionName(subject)
        if any(each.broker_group == group for each in placed):
            further += 1
            name = PartitionName(f"{subject}#{further}")
        count = len(broker_groups)
        slots = Slots(i * SLOTS // count, (i + 1) * SLOTS // count)
        placed.append(Placement(name, group, slots))
    return tuple(placed)


def extend(
    subject: Subject, placed: Sequence[Placement], broker_groups: Sequence[str]
) -> tuple[Placement, ...]:
    """Return the partitions of a subject after it got one more on each of these broker groups.

    Those that are there keep their names and places; each new one takes the upper half of the
    widest range, that of a partition on its own broker group if it is among the widest.

    Raises:
        InvalidRequestError: There would be too many.
    """
    _check_number(subject, len(placed) + len(broker_groups))
    found = list(placed)
    number = max((_number_of(each.partition) for each in placed), default=0)
    for group in broker_groups:
        number += 1
        widest = max(each.slots.end - each.slots.start for each in found)
        parents = [i for i, each in enumerate(found) if _width(each) == widest]
        own = [i for i in parents if found[i].broker_group == group]
        parent = (own or parents)[0]
        start, end = found[parent].slots
        middle = (start + end + 1) // 2
        found[parent] = found[parent]._replace(slots=Slots(start, middle))
        name = PartitionName(f"{subject}#{number}")
        found.append(Placement(name, group, Slots(middle, end)))
    return tuple(found)


def route_of_subject(
    subject: Subject,
    placed: Iterable[Placement],
    serving: Mapping[str, Serving],
    *,
    is_read_only: bool = False,
) -> Route:
    """Return who serves a subject now; broker groups that nobody reaches are left out."""
    found = []
    for partition, group, slots in placed:
        there = serving.get(group)
        if there is not None:
            is_writable = there.is_writable and not is_read_only
            found.append(
                PartitionRoute(partition, group, there.host, there.port, is_writable, slots)
            )
    return _route(Pattern(subject), found)


def route_of_pattern(pattern: Pattern, serving: Mapping[str, Serving]) -> Route:
    """Return who may have subjects of a pattern: every broker group, now or later."""
    return _route(pattern, _each(pattern, serving))


def route_of_delays(subject: Pattern, delays: Mapping[str, Serving]) -> Route:
    """Return who takes sends that are due later: every delay server."""
    return _route(subject, _each(subject, delays))


def version_of(partitions: Iterable[PartitionRoute]) -> int:
    """Return a number that differs when a route does: 0 if it is empty, else a hash of it.

    Every meta server comes to the same number by itself.
    """
    found = [tuple(each) for each in partitions]
    if not found:
        return 0
    digest = blake2b(repr(found).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _route(subject: Pattern, partitions: Iterable[PartitionRoute]) -> Route:
    found = tuple(partitions)
    return Route(subject, version_of(found), found)


def _each(subject: Pattern, serving: Mapping[str, Serving]) -> list[PartitionRoute]:
    name = PartitionName(subject)
    return [
        PartitionRoute(name, group, there.host, there.port, there.is_writable)
        for group, there in sorted(serving.items())
    ]


def _check_number(subject: Subject, count: int) -> None:
    if not 1 <= count <= MOST_PARTITIONS:
        raise InvalidRequestError(
            f"subject {subject} would have {count} partitions; 1 to {MOST_PARTITIONS} are allowed"
        )


def _width(placement: Placement) -> int:
    return placement.slots.end - placement.slots.start


def _number_of(partition: PartitionName) -> int:
    number = partition.rpartition("#")[2]
    return int(number) if "#" in partition and number.isdecimal() else 0


def partitions_per_group(placements: Iterable[Iterable[Placement]]) -> Counter[str]:
    """Return how many partitions each broker group was given."""
    return Counter(each.broker_group for placed in placements for each in placed)

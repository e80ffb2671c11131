"""Place subjects on broker groups, and compute routes.

A subject is placed once: one partition on each of two broker groups (on all, if fewer),
those with the fewest partitions first. It stays there; only a command gives it more.
Each partition has a range of the 1024 slots, and together they cover all slots: so an order key
belongs to exactly one partition that takes messages. Partitions that were split or merged are
closed: producers do not send to them, and consumers pull from them until they are empty.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from zlib import crc32

from pulque.errors import UnavailableError
from pulque.model.cluster import Placement, Serving
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import ALONE, SLOTS, PartitionRoute, Route, Slots
from pulque.rules.ranges import check_count

__all__ = [
    "fewest_first",
    "partitions_per_group",
    "place",
    "place_on",
    "route_of_delays",
    "route_of_pattern",
    "route_of_placed",
    "route_of_subject",
    "version_of",
]

NO_SLOTS = Slots(0, 0)
"""The range of a closed partition: no order key belongs there."""


def place(
    subject: Subject, usable: Iterable[str], partitions: Mapping[str, int], *, spread: int = 2
) -> tuple[Placement, ...]:
    """Return the partitions of a new subject.

    Args:
        subject: Its name, and that of its partitions.
        usable: The broker groups that take sends now.
        partitions: The number of partitions on each broker group.
        spread: The number of broker groups; all of them, if there are fewer.

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
    """Return broker groups in the order of preference for a subject.

    Those with the fewest partitions come first. Among equals the subject's name decides, so that
    meta servers that place subjects at the same time do not all choose the same ones.
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
        InvalidRequestError: There are no broker groups, or too many.
    """
    check_count(subject, len(broker_groups))
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


def route_of_subject(  # noqa: PLR0913  # what a route follows from
    subject: Subject,
    placed: Iterable[Placement],
    serving: Mapping[str, Serving],
    *,
    is_read_only: bool = False,
    order: OrderStrategy = OrderStrategy.BEST_EFFORT,
    away: Mapping[str, Serving] | None = None,
    copied: Collection[str] = (),
) -> Route:
    """Return the route of a subject, without broker groups that are unreachable.

    Under strict order no other broker may take the messages of their order keys, so the route
    includes unreachable groups, at their last address (``away``) and as taking no messages.

    Args:
        subject: The subject.
        placed: All its partitions.
        serving: The reachable brokers, by broker group.
        is_read_only: Whether the subject takes no sends.
        order: Its order strategy.
        away: The last addresses of broker groups.
        copied: The broker groups that have followers.
    """
    places = list(placed)
    is_copied = any(each.broker_group in copied for each in places if not each.is_closed)
    found = []
    for partition, group, slots, is_closed, _ in places:
        there = serving.get(group)
        if there is None and away is not None and order is OrderStrategy.STRICT:
            there = away.get(group)
        if there is not None:
            is_writable = there.is_writable and not is_read_only and not is_closed
            keys = NO_SLOTS if is_closed else slots
            is_alone = is_writable and is_copied and group not in copied
            sends = ALONE if is_alone else int(is_writable)
            found.append(PartitionRoute(partition, group, there.host, there.port, sends, keys))
    return _route(Pattern(subject), found, order)


def route_of_pattern(pattern: Pattern, serving: Mapping[str, Serving]) -> Route:
    """Return the route of a pattern: every broker group, as any may get a subject of it."""
    return _route(pattern, _each(pattern, serving))


def route_of_placed(
    pattern: Pattern, placed: Iterable[Placement], serving: Mapping[str, Serving]
) -> Route:
    """Return all partitions that may have messages; those of absent brokers have no host."""
    found = []
    for partition, group, slots, is_closed, _ in placed:
        there = serving.get(group) or Serving(group, "", 0, is_writable=False)
        is_writable = there.is_writable and not is_closed
        keys = NO_SLOTS if is_closed else slots
        found.append(PartitionRoute(partition, group, there.host, there.port, is_writable, keys))
    return _route(pattern, found)


def route_of_delays(subject: Pattern, delays: Mapping[str, Serving]) -> Route:
    """Return the route of delayed sends: every delay server."""
    return _route(subject, _each(subject, delays))


def version_of(
    partitions: Iterable[PartitionRoute], order: OrderStrategy = OrderStrategy.BEST_EFFORT
) -> int:
    """Return the version of a route: 0 if it is empty, else a hash of it.

    All meta servers compute the same number.
    """
    routes = list(partitions)
    if not routes:
        return 0
    # With True and False, as long as that is all there is to tell: meta servers of the version
    # before come to the same number then.
    found = [
        (*each[:4], each.sends if each.is_alone else each.is_writable, each.slots)
        for each in routes
    ]
    content = repr((found, int(order)) if order else found)
    digest = blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _route(
    subject: Pattern,
    partitions: Iterable[PartitionRoute],
    order: OrderStrategy = OrderStrategy.BEST_EFFORT,
) -> Route:
    found = tuple(partitions)
    return Route(subject, version_of(found, order), found, order)


def _each(subject: Pattern, serving: Mapping[str, Serving]) -> list[PartitionRoute]:
    name = PartitionName(subject)
    return [
        PartitionRoute(name, group, there.host, there.port, there.is_writable)
        for group, there in sorted(serving.items())
    ]


def partitions_per_group(placements: Iterable[Iterable[Placement]]) -> Counter[str]:
    """Return the number of partitions on each broker group."""
    return Counter(each.broker_group for placed in placements for each in placed)

"""Routes of a broker that knows of no other: it serves every subject itself."""

from collections.abc import Callable

from pulque.broker.cluster.partition_coverage import PartitionCoverage
from pulque.broker.receiving.admission import Gate
from pulque.errors import NotAllowedError
from pulque.model.names import (
    Group,
    PartitionName,
    Pattern,
    is_pattern,
    parse_owner,
    parse_pattern,
    parse_subject,
)
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import PartitionRoute, Route, RouteKind

__all__ = ["LocalRoutes", "parse_asked"]

_MOST_COVERED = 10_000
_ASKED_HERE = ("", 0)
"""Whoever reached us knows our address better than we do."""


class LocalRoutes:
    """Which partitions are here."""

    def __init__(
        self,
        places: PartitionCoverage,
        broker_group: str,
        gate: Gate,
        order_of: Callable[[Pattern], OrderStrategy],
    ) -> None:
        self._order_of = order_of
        self._places = places
        self._broker_group = broker_group
        self._gate = gate
        self.delay_server: tuple[str, str, int] | None = None
        """The name, host and port of a delay server that serves this broker alone."""

    def route(self, subject: str, group: str, kind: RouteKind) -> Route:
        """Return the partitions of a subject, or of a pattern.

        Args:
            subject: A subject; with a group also a pattern.
            group: Whose retries belong to it; empty for a producer.
            kind: What it is wanted for. Sends that are due later go to the delay server, if
                there is one.

        Raises:
            InvalidNameError: That is no subject, pattern or group.
            NotAllowedError: There are more than a consumer may pull from.
        """
        pattern, owner = parse_asked(subject, group)
        if kind is RouteKind.DELAYED:
            if self.delay_server is None:
                return Route(pattern, 0, ())
            name = PartitionName(pattern)
            return Route(pattern, 0, (PartitionRoute(name, *self.delay_server),))
        if kind is RouteKind.FOLLOWERS:
            return Route(pattern, 0, ())
        covered = self._places.covered(pattern, owner)
        if len(covered) > _MOST_COVERED:
            raise NotAllowedError(
                f"{pattern} covers {len(covered)} partitions here, and a consumer pulls from at "
                f"most {_MOST_COVERED}: subscribe to fewer subjects"
            )
        here = self._broker_group
        is_open = self._gate.is_open
        routes = tuple(
            PartitionRoute(name, here, *_ASKED_HERE, is_open or self._gate.takes(name))
            for name in covered
        )
        order = OrderStrategy.BEST_EFFORT if is_pattern(pattern) else self._order_of(pattern)
        return Route(pattern, self._places.version, routes, order)

    def plain(self, subject: Pattern) -> Route:
        """Return the route to this broker's plain partition of a subject, and no other."""
        name = PartitionName(subject)
        is_writable = self._gate.takes(name)
        here = PartitionRoute(name, self._broker_group, *_ASKED_HERE, is_writable)
        return Route(subject, 0, (here,))


def parse_asked(subject: str, group: str) -> tuple[Pattern, Group | None]:
    """Return what a request for a route is about.

    Raises:
        InvalidNameError: That is no subject, pattern or group.
    """
    if group:
        return parse_pattern(subject), parse_owner(group)
    return Pattern(parse_subject(subject)), None

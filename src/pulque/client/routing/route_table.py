"""What a client knows of who serves what: routes as they were answered last, without I/O.

A route is kept until another is heard: with all meta servers down, messages go where they went.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pulque.client.connection.url import Address
from pulque.client.routing.broker_health import LATENCY_TABLE, BrokerHealth, LatencyRow
from pulque.client.routing.targets import (
    Delayed,
    Targets,
    Way,
    is_delay_server,
    kept_in_copies,
    place_of,
    places_in,
)
from pulque.errors import DisconnectedError
from pulque.model.routes import Route, RouteKind
from pulque.wire.requests import Acks
from pulque.wire.routes import ChangedRoute, KnownRoute

__all__ = ["RouteKey", "RouteTable"]

_SENT_TO = (RouteKind.REALTIME, RouteKind.DELAYED)
"""Where these routes lead, messages are sent."""


class RouteKey(NamedTuple):
    """What a route was asked for as."""

    subject: str
    group: str = ""
    kind: RouteKind = RouteKind.REALTIME

    @classmethod
    def of_way(cls, way: Way) -> "RouteKey":
        """Return what a producer asks for to send somewhere."""
        if isinstance(way, Delayed):
            return cls(way.subject, "", RouteKind.DELAYED)
        return cls(way)

    @property
    def way(self) -> Way:
        """What is sent there."""
        return Delayed(self.subject) if self.kind is RouteKind.DELAYED else self.subject


class RouteTable:
    """The routes of one client. Thread-safe: every change is one assignment.

    Args:
        table: What is done about slow answers.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        table: tuple[LatencyRow, ...] = LATENCY_TABLE,
        draw: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.targets: dict[Way, Targets] = {}
        """Where the messages of a subject are sent to, and those of it that are due later."""
        self.copied: dict[Way, Targets] = {}
        """The same for messages that must be on several disks."""
        self._routes: dict[RouteKey, Route] = {}
        self._addresses: dict[str, Address] = {}
        self._healths: dict[str, BrokerHealth] = {}
        self._table = table
        self._draw = draw
        self._wanted: Counter[RouteKey] = Counter()
        self.on_moved: Callable[[str], None] = lambda place: None
        """Told of a broker group that another broker leads by now, or that listens elsewhere."""

    def targets_for(self, acks: int) -> dict[Way, Targets]:
        """Return where messages are sent to that are confirmed as ``acks`` says."""
        return self.copied if acks == Acks.REPLICA else self.targets

    def health_of(self, place: str) -> BrokerHealth:
        """Return how a broker group is doing; it is the same one for all routes."""
        found = self._healths.get(place)
        if found is None:
            found = self._healths.setdefault(place, BrokerHealth(self._table))
        return found

    def address_of(self, place: str) -> Address:
        """Return where a broker group listens, as far as known.

        Raises:
            DisconnectedError: No route ever named it.
        """
        try:
            return self._addresses[place]
        except KeyError:
            raise DisconnectedError(f"where broker group {place} listens is not known") from None

    @property
    def knew_delay_servers(self) -> bool:
        """Whether any delay server was ever heard of: it may be back soon."""
        return any(is_delay_server(place) for place in list(self._addresses))

    def learn(self, place: str, address: Address) -> None:
        """Take in where a broker group listens.

        If that is elsewhere than before, another broker leads it: what was known about the last
        one does not hold for it.
        """
        before = self._addresses.get(place)
        self._addresses[place] = address
        if before is not None and before != address:
            self.health_of(place).forget()
            self.on_moved(place)

    def route(self, key: RouteKey) -> Route | None:
        """Return a route as it was heard last."""
        return self._routes.get(key)

    def take_in(self, key: RouteKey, route: Route) -> bool:
        """Keep a route; say whether it differs from the last one."""
        before = self._routes.get(key)
        for each in route.partitions:
            if each.host:
                self.learn(place_of(each, key.kind), Address(each.host, each.port))
        if before is not None:
            self._welcome_back(key, before, route)
        is_new = before is None or before[2:] != route[2:]  # its version may differ alone
        if is_new and not key.group and key.kind in _SENT_TO:
            self._aim(self.targets, key, route)
            left = kept_in_copies(route)
            if left is not route:
                # If those with followers are away, their messages wait for them.
                if left.partitions:
                    self._aim(self.copied, key, left)
            elif key.way in self.targets:
                self.copied[key.way] = self.targets[key.way]
            else:
                self.copied.pop(key.way, None)
        # Last: were it known before its targets and this interrupted, it would never be new.
        self._routes[key] = route
        return is_new

    def _aim(self, at: dict[Way, Targets], key: RouteKey, route: Route) -> None:
        targets = Targets(route, self.health_of, key.kind)
        if known := at.get(key.way):
            targets.go_on_from(known)
        else:
            targets.begin_at(self._draw())
        if targets.is_empty:
            at.pop(key.way, None)
        else:
            at[key.way] = targets

    def _welcome_back(self, key: RouteKey, before: Route, route: Route) -> None:
        """Let nobody be kept out for what was before it left the route."""
        for place in set(places_in(route, key.kind)).difference(places_in(before, key.kind)):
            self.health_of(place).forget()

    def take_in_changed(self, changed: Iterable[ChangedRoute]) -> list[RouteKey]:
        """Keep the routes that a watch brought; return which of them differ."""
        found = []
        for kind, group, route in changed:
            key = RouteKey(str(route.subject), group, kind)
            if key in self._routes and self.take_in(key, route):
                found.append(key)
        return found

    def want(self, key: RouteKey) -> None:
        """Take in that somebody is interested in a route, until it says ``forget``."""
        self._wanted[key] += 1

    def forget(self, key: RouteKey) -> None:
        """Take in that somebody is not interested any more; without others it is not watched."""
        self._wanted[key] -= 1
        if self._wanted[key] <= 0:
            del self._wanted[key]
            self._routes.pop(key, None)

    def forget_all(self) -> None:
        """Forget all routes, but not where brokers listen: each is asked for when needed."""
        self.targets.clear()
        self.copied.clear()
        self._routes.clear()
        self._wanted.clear()

    def forget_followers(self) -> bool:
        """Take in that a server does not know of followers; say whether any were watched."""
        keys = [key for key in list(self._routes) if key.kind is RouteKind.FOLLOWERS]
        for key in keys:
            self._routes.pop(key, None)
        return bool(keys)

    def known(self) -> tuple[KnownRoute, ...]:
        """Return what a watch is to look after."""
        return tuple(
            KnownRoute(key.kind, key.subject, key.group, route.version)
            for key, route in list(self._routes.items())
        )

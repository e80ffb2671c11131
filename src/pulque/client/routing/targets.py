"""Where a subject's messages go: its partitions, and which of them a message belongs to."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import google_crc32c

from pulque.client.arguments.due_times import ANY_DELAY_MS
from pulque.client.connection.url import Address
from pulque.client.routing.broker_health import BrokerHealth
from pulque.errors import RemoteProtocolError, UnavailableError
from pulque.model.batch import seed_of
from pulque.model.names import (
    DEFAULT_LEVEL,
    PartitionName,
    level_of,
    level_partition,
    owner_of,
    subject_of,
)
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import SLOTS, PartitionRoute, Route, RouteKind
from pulque.wire.responses import Response, Routed

__all__ = [
    "HOME",
    "Delayed",
    "NoRouteError",
    "Target",
    "Targets",
    "Way",
    "choose",
    "is_delay_server",
    "kept_in_copies",
    "next_best",
    "place_of",
    "places_in",
    "route_of",
    "targets_of",
]

HOME = ""
"""As a place: the servers that the client's URL names."""
REFUSED_WAIT = 2.0
"""How long to stay away from a partition that took no messages, unless its route changes."""
HealthOf = Callable[[str], BrokerHealth]
_DELAY_SERVER = "%delay%"
"""Before the name of a delay server, as a place: a broker group may be called the same."""
_FOLLOWER = "%follower%"
"""Before the address of a follower, as a place: its broker group is where the leader is."""


class Delayed(NamedTuple):
    """The way of a subject's messages that are due later."""

    subject: str


Way = str | Delayed
"""What travels the same way: messages of a subject that are due at once, or those due later."""


class NoRouteError(Exception):
    """It is not known yet where messages of one way go."""

    def __init__(self, way: Way) -> None:
        super().__init__(str(way))
        self.way = way


class Target:
    """One partition that messages are sent to.

    The same partition may exist on several broker groups: both together name it.
    """

    __slots__ = (
        "address",
        "broker_group",
        "health",
        "is_writable",
        "level",
        "partition",
        "place",
        "refused_until",
        "seed",
        "slots",
    )

    def __init__(self, route: PartitionRoute, health: BrokerHealth, place: str) -> None:
        self.partition = route.partition
        self.broker_group = route.broker_group
        self.place = place
        """Whom to ask: a broker group, or ``HOME``."""
        self.address = Address(route.host, route.port) if route.host else None
        self.is_writable = route.is_writable
        self.refused_until = 0.0
        """Until then nothing is sent there, as the broker takes no messages for it."""
        self.slots = route.slots
        self.health = health
        self.seed = seed_of(route.partition)
        self.level = level_of(route.partition)

    def of_level(self, level: int) -> "Target":
        """Return the partition beside it for messages of one priority."""
        name = level_partition(subject_of(self.partition), level)
        host, port = self.address or ("", 0)
        return Target(
            PartitionRoute(name, self.broker_group, host, port, self.is_writable, self.slots),
            self.health,
            self.place,
        )

    @property
    def key(self) -> tuple[str, str]:
        """What is the same in every route that names the partition."""
        return self.place, self.partition

    def takes_messages(self, now: float) -> bool:
        """Say whether messages may be sent there, as far as known."""
        return self.is_writable and now >= self.refused_until

    def refused(self, now: float) -> None:
        """Take in that its broker takes no messages for it now."""
        self.refused_until = now + REFUSED_WAIT

    def __repr__(self) -> str:
        return f"<Target {self.partition} at {self.broker_group}>"


def place_of(route: PartitionRoute, kind: RouteKind = RouteKind.REALTIME) -> str:
    """Return whom a partition's route sends one to."""
    if not route.host:
        return HOME
    if kind is RouteKind.DELAYED:
        return f"{_DELAY_SERVER}{route.broker_group}"
    if kind is RouteKind.FOLLOWERS:
        return f"{_FOLLOWER}{route.host}:{route.port}"
    return route.broker_group


def is_delay_server(place: str) -> bool:
    """Say whether a place is a delay server of a cluster."""
    return place.startswith(_DELAY_SERVER)


def places_in(route: Route, kind: RouteKind = RouteKind.REALTIME) -> list[str]:
    """Return all that a route sends one to, each once."""
    return list(dict.fromkeys(place_of(each, kind) for each in route.partitions))


def route_of(response: Response) -> Route:
    """Return the route that is the answer to a request for one."""
    if not isinstance(response, Routed):
        raise RemoteProtocolError(f"a request for a route got {response!r}")
    return response.route


def kept_in_copies(route: Route) -> Route:
    """Return the partitions of a route that a message may go to which must be on several disks.

    Those of brokers without followers are left out where others have some. Not so where the order
    is strict, as order keys belong to them: they are there as taking none, and say why.
    """
    if not any(each.is_alone for each in route.partitions):
        return route
    if route.order is OrderStrategy.STRICT:
        left = (
            each._replace(sends=0 if each.is_alone else each.sends) for each in route.partitions
        )
    else:
        left = (each for each in route.partitions if not each.is_alone)
    return route._replace(partitions=tuple(left))


def targets_of(response: Response) -> "Targets":
    """Return the partitions that the answer to a request for a route names."""
    return Targets(route_of(response))


def choose(
    targets: Sequence[Target],
    order_key: str | None,
    turn: int,
    now: float,
    avoid: Collection[Target] = (),
) -> int:
    """Return the index of the partition that a message goes to.

    A message with an order key goes where its slot lies, and only elsewhere while nobody can send
    there: to the next partition that takes messages, the same for all messages of that key. Slow
    answers do not drive it away. The others take turns, and go round what is slow or was tried.
    If no partition is fit, it is the least bad.
    """
    start = _owner(targets, order_key) if order_key else turn
    length = len(targets)
    for step in range(length):
        index = (start + step) % length
        target = targets[index]
        if not target.takes_messages(now):
            continue
        if order_key:
            if not target.health.is_open(now):
                return index
        elif target not in avoid and target.health.is_usable(now):
            return index
    return min(
        ((start + step) % length for step in range(length)),
        key=lambda index: _badness(targets[index], now, avoid),
    )


def next_best(
    targets: Sequence[Target], own: Target, turn: int, now: float, *, is_ordered: bool
) -> int | None:
    """Return the index of another broker's partition that can be sent to, or None.

    What is ordered goes to the next one, so that it stays together; the rest takes turns.
    """
    length = len(targets)
    start = 1 + next((n for n, each in enumerate(targets) if each is own), -1)
    order = [(start if is_ordered else turn) + step for step in range(length)]
    fit = [
        index % length
        for index in order
        if targets[index % length].place != own.place
        and targets[index % length].takes_messages(now)
        and not targets[index % length].health.is_open(now)
    ]
    quick = [index for index in fit if is_ordered or targets[index].health.is_usable(now)]
    return next(iter(quick or fit), None)


def _badness(
    target: Target, now: float, avoid: Collection[Target]
) -> tuple[bool, bool, tuple[bool, float]]:
    return not target.takes_messages(now), target in avoid, target.health.waits_until(now)


def _owner(targets: Sequence[Target], order_key: str) -> int:
    """Return the index of the partition that the slot of an order key lies in."""
    slot = _slot_of(order_key)
    found = _find_owner(targets, slot)
    return slot * len(targets) // SLOTS if found is None else found


def _slot_of(order_key: str) -> int:
    slot: int = google_crc32c.value(order_key.encode()) % SLOTS
    return slot


def _find_owner(targets: Sequence[Target], slot: int) -> int | None:
    found = None
    for index, target in enumerate(targets):
        if target.slots[0] <= slot < target.slots[1]:
            if target.is_writable:
                return index
            # It takes no messages now; or it was split, and those that follow it do.
            found = index if found is None else found
    return found


def _any_health(place: str) -> BrokerHealth:
    del place
    return BrokerHealth()


class Targets:
    """The partitions of one subject, or of all that a pattern covers.

    Not thread-safe; a wrong turn is harmless. Messages of one priority with the same order key
    go to the same partition as long as it can be sent to; the others take turns.
    """

    __slots__ = (
        "_levels",
        "_plain",
        "_turn",
        "all",
        "is_empty",
        "is_home",
        "is_single",
        "is_strict",
        "longest_delay_ms",
        "version",
    )

    def __init__(
        self,
        route: Route,
        health_of: HealthOf = _any_health,
        kind: RouteKind = RouteKind.REALTIME,
    ) -> None:
        self.all = tuple(
            Target(each, health_of(place), place)
            for each in route.partitions
            for place in (place_of(each, kind),)
        )
        """Those of the subject, the plain one first, then those of the group's retries."""
        self.version = route.version
        self.is_strict = route.order is OrderStrategy.STRICT
        """Whether a message with an order key goes where it belongs, or nowhere."""
        self._plain = tuple(each for each in self.all if _is_plain(each.partition))
        self.is_empty = not self._plain
        """Whether nobody serves it."""
        self.is_single = len(self._plain) == 1
        """Whether there is nothing to choose."""
        self.is_home = self.is_single and self._plain[0].place == HOME
        """Whether a lone broker has it all."""
        self.longest_delay_ms = ANY_DELAY_MS
        """How far ahead a message may be due, where that is known."""
        self._levels = {DEFAULT_LEVEL: self._plain}
        self._turn = -1

    @property
    def plain(self) -> tuple[Target, ...]:
        """The partitions for messages of the usual priority."""
        return self._plain

    def _is_uncovered(self, lost: Target) -> bool:
        is_known = any(each.key == lost.key for each in self._plain)
        start, end = lost.slots
        return not is_known and not any(
            each.slots[0] < end and start < each.slots[1] for each in self._plain
        )

    def __iter__(self) -> Iterator[Target]:
        return iter(self.all)

    def pick(
        self,
        order_key: str | None,
        level: int = DEFAULT_LEVEL,
        now: float = 0.0,
        avoid: Collection[Target] = (),
    ) -> Target:
        """Return the partition for the next message, or the next batch.

        Args:
            order_key: The message's, if it has one.
            level: Its priority.
            now: The monotonic clock's, for what is said about brokers' health.
            avoid: Partitions where this message was refused, or found nobody.

        Raises:
            UnavailableError: The order is strict, and the broker of the order key is away.
        """
        targets = self._plain if level == DEFAULT_LEVEL else self.of_level(level)
        if order_key and self.is_strict:
            return self._pick_strict(targets, order_key)
        if len(targets) == 1:
            return targets[0]
        index = choose(targets, order_key, self._turn + 1, now, avoid)
        if not order_key:
            self._turn = index
        target = targets[index]
        target.health.breaker.probe(now)
        return target

    @staticmethod
    def _pick_strict(targets: Sequence[Target], order_key: str) -> Target:
        found = _find_owner(targets, _slot_of(order_key))
        if found is None:
            error = UnavailableError(
                f"the broker that keeps order key {order_key!r} is away, and the order is strict; "
                "it was never sent"
            )
            error.outcome_known = True
            raise error
        return targets[found]

    def of_level(self, level: int) -> tuple[Target, ...]:
        """Return the partitions for messages of one priority; the first message makes them."""
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = tuple(each.of_level(level) for each in self._plain)
        return found

    def pick_other(self, own: Target, now: float, *, is_ordered: bool) -> Target | None:
        """Return where a batch goes that was meant for ``own``; None if it has to stay."""
        targets = self.of_level(own.level)
        index = next_best(targets, own, self._turn + 1, now, is_ordered=is_ordered)
        if index is None:
            return None
        if not is_ordered:
            self._turn = index
        targets[index].health.breaker.probe(now)
        return targets[index]

    def begin_at(self, drawn: float) -> None:
        """Take turns from any of them on: clients that send little must not all begin with one.

        Args:
            drawn: A random number in ``0.0..1.0``.
        """
        self._turn = int(drawn * len(self._plain)) - 1

    def go_on_from(self, other: "Targets") -> None:
        """Take turns where an older route of the subject was.

        Where the order is strict, partitions that nobody serves now stay: their messages wait.
        """
        if self.is_strict:
            missing = [each for each in other.plain if self._is_uncovered(each)]
            self._plain += tuple(missing)
            self._levels = {DEFAULT_LEVEL: self._plain}
        self.longest_delay_ms = other.longest_delay_ms
        # Whoever is next after a change is not worth a name of its own.
        self._turn = other._turn % len(self._plain) if self._plain else -1  # noqa: SLF001


def _is_plain(partition: PartitionName) -> bool:
    return owner_of(partition) is None and level_of(partition) == DEFAULT_LEVEL

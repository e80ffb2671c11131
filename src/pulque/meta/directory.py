"""All that is known about the cluster, in memory: routes are answered from here alone.

What the database says is applied as changes; who lives is heard. So routes, watches and
heartbeats go on while the database is away.
"""

from collections import Counter
from collections.abc import Iterable

from pulque.clock import Clock
from pulque.meta.database.allotment_store import NOTHING_ALLOTTED, Allotment, OrderKey
from pulque.meta.database.store import Changes
from pulque.model.cluster import GroupMarks, Placement, Server, Serving
from pulque.model.leadership import Leadership
from pulque.model.names import (
    ConsumerId,
    PartitionName,
    Pattern,
    Subject,
    is_pattern,
    overlap,
    patterns_of,
)
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import ALL_SLOTS, Role, Route, RouteKind
from pulque.rules.leadership import route_of_followers
from pulque.rules.membership import (
    Heard,
    following_brokers,
    is_living,
    serving_brokers,
    serving_delays,
    usable_groups,
)
from pulque.rules.routing import (
    place,
    route_of_delays,
    route_of_pattern,
    route_of_placed,
    route_of_subject,
)

__all__ = ["Directory"]


class Directory:
    """The cluster as this meta server sees it. Lives in one event loop."""

    def __init__(self, heard: Heard, clock: Clock) -> None:
        self.heard = heard
        self.revision = -1
        """Up to which the database was read; -1 if never."""
        self.servers: dict[str, Server] = {}
        self.marks: dict[str, GroupMarks] = {}
        """What was commanded, by broker group."""
        self.subjects: dict[Subject, tuple[Placement, ...]] = {}
        self.read_only: set[str] = set()
        """Subjects and patterns that take no sends, by command."""
        self.policies: dict[str, str] = {}
        """What was changed for the whole cluster: JSON by key."""
        self.strict: set[Subject] = set()
        """Subjects whose order is strict."""
        self.online: dict[OrderKey, set[ConsumerId]] = {}
        """The consumers of ordered groups that are there."""
        self.divided: set[Subject] = set()
        """Subjects that have closed partitions."""
        self.leaderships: dict[str, Leadership] = {}
        """Of the broker groups that have followers."""
        self.brokers: dict[str, Serving] = {}
        """Those that clients can go to, by broker group."""
        self.delays: dict[str, Serving] = {}
        """Those that clients can go to, by name."""
        self.followers: dict[str, tuple[Serving, ...]] = {}
        """Those that copy others, by broker group."""
        self._clock = clock
        self._partitions: Counter[str] = Counter()
        self._routes: dict[Subject, Route] = {}
        self._marks_version = 0
        self._allotments: dict[OrderKey, Allotment] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the database was ever read."""
        return self.revision >= 0

    @property
    def marks_version(self) -> int:
        """Grows whenever another subject is read-only, or no more."""
        return self._marks_version

    # -- what comes in -----------------------------------------------------------------------

    def apply(self, changes: Changes) -> set[Subject] | None:
        """Take in what the database says.

        Returns:
            The subjects whose routes may differ now; None if those of all may.
        """
        now_ms = self._clock.monotonic_ms()
        for server in changes.servers:
            if server.name not in self.servers:
                # Whoever is known from before gets time to be heard by this meta server.
                self.heard.hear(server.name, now_ms)
            self.servers[server.name] = server
        self.marks.update(changes.groups)
        self.policies.update(changes.policies)
        self.leaderships.update(changes.leaderships)
        for subject, placed in changes.subjects.items():
            self._place(subject, placed)
        self._order(changes)
        is_marked = self._mark(changes.read_only)
        self.revision = max(self.revision, changes.revision)
        return None if self.look() or is_marked else set(changes.subjects)

    def forget(self) -> None:
        """Take in that all of this was of another cluster."""
        for known in (self.servers, self.marks, self.subjects, self.policies, self.leaderships):
            known.clear()
        self.read_only = set()
        for named in (self.strict, self.divided):
            named.clear()
        self.online.clear()
        self._allotments.clear()
        self._partitions.clear()
        self._routes.clear()
        self._marks_version += 1
        self.revision = -1
        self.look()

    def put(self, server: Server) -> None:
        """Take in a server that registered."""
        self.servers[server.name] = server
        self.heard.hear(server.name, self._clock.monotonic_ms())

    def look(self) -> bool:
        """Find out who serves now; say whether that is different from before."""
        now_ms = self._clock.monotonic_ms()
        servers = self.servers.values()
        brokers = serving_brokers(servers, self.marks, self.heard, now_ms, self.leaderships)
        delays = serving_delays(servers, self.heard, now_ms)
        followers = following_brokers(servers, self.heard, now_ms)
        found = (brokers, delays, followers)
        if found == (self.brokers, self.delays, self.followers):
            return False
        self.brokers, self.delays, self.followers = found
        self._routes.clear()
        return True

    def _place(self, subject: Subject, placed: tuple[Placement, ...]) -> None:
        before = self.subjects.get(subject, ())
        self._partitions.subtract(each.broker_group for each in before)
        self._partitions.update(each.broker_group for each in placed)
        self.subjects[subject] = placed
        if any(each.is_closed for each in placed):
            self.divided.add(subject)
        self._routes.pop(subject, None)

    def _order(self, changes: Changes) -> None:
        for subject, order in changes.orders.items():
            if order is OrderStrategy.STRICT:
                self.strict.add(subject)
            else:
                self.strict.discard(subject)
        for each in changes.attending:
            there = self.online.setdefault(each.key, set())
            if each.is_online:
                there.add(each.consumer)
            else:
                there.discard(each.consumer)
        self._allotments.update(changes.allotments)

    def _mark(self, read_only: dict[str, bool]) -> bool:
        before = set(self.read_only)
        self.read_only |= {each for each, is_on in read_only.items() if is_on}
        self.read_only -= {each for each, is_on in read_only.items() if not is_on}
        if before == self.read_only:
            return False
        self._marks_version += 1
        self._routes.clear()
        return True

    # -- what is asked -----------------------------------------------------------------------

    def route(self, kind: RouteKind, pattern: Pattern) -> Route:
        """Return a route; of a subject that does not exist, an empty one."""
        if kind is RouteKind.DELAYED:
            return route_of_delays(pattern, self.delays)
        subject = Subject(pattern)
        if kind is RouteKind.FOLLOWERS:
            placed = None if is_pattern(pattern) else self.subjects.get(subject, ())
            return route_of_followers(pattern, placed, self.followers)
        if kind is RouteKind.PLACED:
            return route_of_placed(pattern, self._placed(pattern), self.brokers)
        if is_pattern(pattern):
            return route_of_pattern(pattern, self.brokers)
        found = self._routes.get(subject)
        if found is None:
            found = self._make_route(subject)
        return found

    def _placed(self, pattern: Pattern) -> Iterable[Placement]:
        """Return the partitions of a subject; of a pattern, one for each group that has some."""
        if not is_pattern(pattern):
            return self.subjects.get(Subject(pattern), ())
        groups = {
            each.broker_group
            for subject, placed in self.subjects.items()
            if overlap(pattern, Pattern(subject))
            for each in placed
        }
        return [Placement(PartitionName(pattern), group, ALL_SLOTS) for group in sorted(groups)]

    def _make_route(self, subject: Subject) -> Route:
        placed = self.subjects.get(subject, ())
        is_read_only = self.is_read_only(subject)
        made = route_of_subject(
            subject,
            placed,
            self.brokers,
            is_read_only=is_read_only,
            order=self.order_of(subject),
            away=self._away() if subject in self.strict else None,
            copied=self.leaderships,
        )
        if placed:
            # Names that nobody created are for the asking, and would fill the memory.
            self._routes[subject] = made
        return made

    def _away(self) -> dict[str, Serving]:
        """Return where broker groups were last, whether anybody is there or not."""
        return {
            each.broker_group: Serving(each.broker_group, each.host, each.port, is_writable=False)
            for each in self.servers.values()
            if each.role is Role.BROKER and not each.is_removed and self._may_lead(each)
        }

    def _may_lead(self, broker: Server) -> bool:
        row = self.leaderships.get(broker.broker_group)
        return row is None or row.leader == broker.directory

    def order_of(self, subject: Subject) -> OrderStrategy:
        """Return what a failure may do to the order of a subject's messages."""
        return OrderStrategy.STRICT if subject in self.strict else OrderStrategy.BEST_EFFORT

    def allotment(self, key: OrderKey) -> Allotment:
        """Return what belongs to whom, for an ordered group."""
        return self._allotments.get(key, NOTHING_ALLOTTED)

    def is_read_only(self, subject: Subject) -> bool:
        """Whether a subject takes no sends, by command."""
        return bool(self.read_only) and not self.read_only.isdisjoint(patterns_of(subject))

    def place_all(
        self, subjects: Iterable[Subject], *, spread: int
    ) -> dict[Subject, tuple[Placement, ...]]:
        """Say where new subjects go, each as if those before it were there already.

        Raises:
            UnavailableError: No broker takes messages now.
        """
        usable = usable_groups(self.brokers)
        partitions = Counter(self._partitions)
        placed = {}
        for subject in subjects:
            placed[subject] = place(subject, usable, partitions, spread=spread)
            partitions.update(each.broker_group for each in placed[subject])
        return placed

    def partitions_on(self, broker_group: str) -> int:
        """Return how many partitions were given to a broker group."""
        return self._partitions[broker_group]

    def broker_groups(self) -> set[str]:
        """Return the broker groups that ever had a broker."""
        return {
            each.broker_group
            for each in self.servers.values()
            if each.role is Role.BROKER and not each.is_removed
        }

    def is_serving(self, server: Server) -> bool:
        """Whether clients can go to a server now."""
        here = self.brokers if server.role is Role.BROKER else self.delays
        found = here.get(server.broker_group if server.role is Role.BROKER else server.name)
        return found is not None and (found.host, found.port) == (server.host, server.port)

    def is_living(self, server: Server) -> bool:
        """Whether a server is there, be it to serve or to follow."""
        return is_living(server, self.heard, self._clock.monotonic_ms())

    def broker_in(self, broker_group: str, directory: str) -> Server | None:
        """Return the broker of a group that has a data directory; None if nobody has."""
        found = [
            each
            for each in self.servers.values()
            if each.directory == directory
            and each.broker_group == broker_group
            and each.role is Role.BROKER
            and not each.is_removed
        ]
        # One that was given another name is known by both until the old one is removed.
        return max(found, key=lambda each: each.incarnation, default=None)

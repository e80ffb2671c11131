# Generated from aio/brokers.py by `make blocking`: edit that file, not this one.
"""All servers that a client talks to: of its URL, and the brokers behind them."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from pulque.client.arguments.due_times import ANY_DELAY_MS
from pulque.client.blocking.concurrency import sleep
from pulque.client.blocking.connection import Connection
from pulque.client.blocking.connection_pool import Calls
from pulque.client.blocking.route_watcher import RouteWatcher
from pulque.client.connection.call_outcomes import never_sent
from pulque.client.connection.url import Address
from pulque.client.routing.broker_health import LATENCY_TABLE, LatencyRow
from pulque.client.routing.lookup import (
    ASK_LIMIT,
    DELAY_PATIENCE,
    DELAY_SERVERS,
    LOOKING,
    NO_DELAY_SERVER,
    NOBODY_WAIT,
    STALE_PAUSE,
    chosen,
    nobody_takes,
)
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.client.routing.targets import (
    HOME,
    Delayed,
    Targets,
    Way,
    place_of,
    places_in,
    route_of,
    targets_of,
)
from pulque.client.routing.watch_requests import watcher_name
from pulque.errors import (
    DisconnectedError,
    NoDelayServerError,
    RequestTimeoutError,
    UnavailableError,
)
from pulque.model.names import PartitionName, parse_subject
from pulque.model.routes import Route, RouteKind
from pulque.wire.requests import Acks
from pulque.wire.requests import Route as AskRoute
from pulque.wire.responses import Welcome

__all__ = ["ClientConnections", "SubjectStore"]

T = TypeVar("T")


class SubjectStore(NamedTuple):
    """A broker that has messages of a subject, and its partitions of it."""

    broker_group: str
    calls: Calls
    targets: Targets


class ClientConnections:
    """Who serves what, and the connections to them. Thread-safe.

    Args:
        addresses: The servers of the client's URL: meta servers, or any broker.
        client: What this client calls itself.
        latency: What is done about slow answers.
        tell: Called when routes have changed.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        client: str,
        latency: tuple[LatencyRow, ...] = LATENCY_TABLE,
        tell: Callable[[list[RouteKey]], None],
        draw: Callable[[], float],
    ) -> None:
        self.home = Calls(
            addresses,
            client=client,
            draw=draw,
        )
        self.table = RouteTable(latency, draw)
        self.table.on_moved = self._moved
        self._client = client
        self._draw = draw
        self._pools: dict[str, Calls] = {HOME: self.home}
        self._stale_at = 0.0
        self._watcher = RouteWatcher(
            self.table,
            self.home.open,
            client=watcher_name(client),
            application=client,
            tell=tell,
            draw=draw,
        )

    def calls_at(self, place: str) -> Calls:
        """Return what makes calls at a place."""
        found = self._pools.get(place)
        if found is None:
            made = Calls(
                functools.partial(self.table.address_of, place),
                client=self._client,
                draw=self._draw,
                stale=self.stale,
            )
            found = self._pools.setdefault(place, made)
            found.is_closed = self.home.is_closed
        return found

    def open_at(self, place: str, timeout: float) -> Connection:
        """Open a connection to a place for whoever needs one."""
        return self.calls_at(place).open(timeout)

    @property
    def is_known(self) -> bool:
        """Whether anybody was connected to, so that it is known who they are."""
        return bool(self.home.server)

    @property
    def is_cluster(self) -> bool:
        """Whether there may be more brokers than the one that was connected to."""
        return bool(self.home.cluster)

    def find_targets(self, way: Way, timeout: float, acks: int = Acks.DISK) -> Targets:
        """Return where messages of one way go; ask for it if it is not known.

        Raises:
            UnavailableError: That could not be found out, or nobody takes them.
            NoDelayServerError: There is no delay server.
            PulqueError: The subject may not be created, or its name is none.
        """
        with never_sent():
            return self._look_for_targets(way, timeout, acks)

    def _look_for_targets(self, way: Way, timeout: float, acks: int) -> Targets:
        deadline = time.monotonic() + timeout
        key = RouteKey.of_way(way)
        parse_subject(key.subject)
        if isinstance(way, Delayed) and way not in self.table.targets:
            # As for a send at once: the subject is created, or refused, now and not when due.
            self.ask_route(RouteKey(key.subject), deadline - time.monotonic())
        give_up_at = deadline
        if isinstance(way, Delayed) and not self.table.knew_delay_servers:
            give_up_at = min(deadline, time.monotonic() + DELAY_PATIENCE)
        known = self.table.targets_for(acks)
        while (targets := known.get(way)) is None:
            self.ask_route(key, deadline - time.monotonic())
            if way not in known:
                is_lone = isinstance(way, Delayed) and not self.is_cluster
                if is_lone or time.monotonic() + NOBODY_WAIT >= give_up_at:
                    raise nobody_takes(way, acks)
                sleep(NOBODY_WAIT)
        if isinstance(way, Delayed) and targets.longest_delay_ms == ANY_DELAY_MS:
            self._find_longest(targets, deadline)
        return targets

    def _find_longest(self, targets: Targets, deadline: float) -> None:
        """Ask a delay server how far ahead messages may be due.

        What it refuses it refuses by the batch, so that it is good to know before.
        """
        for target in targets:
            left = max(0.001, min(ASK_LIMIT, deadline - time.monotonic()))
            try:
                welcome = self._ask_welcome(target.place, left)
            except UnavailableError:
                continue
            targets.longest_delay_ms = welcome.max_delay_ms or ANY_DELAY_MS
            return

    def _ask_welcome(self, place: str, timeout: float) -> Welcome:
        connection = self.open_at(place, timeout)
        try:
            return connection.welcome
        finally:
            connection.close()

    def ask_route(self, key: RouteKey, timeout: float) -> Route:
        """Ask who serves a subject or a pattern, keep the answer, and have it watched."""
        request = AskRoute(key.subject, key.group, key.kind)
        try:
            route = self.home.ask(request, max(timeout, 0.001), route_of)
        except (DisconnectedError, RequestTimeoutError) as error:
            raise type(error)(f"who serves {key.subject} could not be asked: {error}") from None
        is_new = self.table.route(key) is None
        self.table.take_in(key, route)
        if self.is_cluster or any(each.host for each in route.partitions):
            self._watcher.start()
            if is_new:
                self._watcher.look()
        return route

    def places(self, subject: str, group: str, timeout: float) -> list[str]:
        """Return who serves a subject or a pattern now, as places.

        Raises:
            UnavailableError: That could not be found out.
        """
        if not self.home.server:
            self.home.warm_up(timeout)
        if not self.is_cluster:
            return [HOME]
        key = RouteKey(subject, group)
        route = self.ask_route(key, timeout)
        self.table.want(key)
        return places_in(route)

    def followers(self, key: RouteKey, timeout: float) -> list[str]:
        """Return who copies what serves a subject or a pattern now, as places.

        Raises:
            UnavailableError: That could not be found out.
            PulqueError: Nobody knows what followers are.
        """
        if self.table.route(key) is None:
            self.ask_route(key, timeout)
            self.table.want(key)
        return self.known_places(key)

    def open_follower(self, place: str, timeout: float) -> Connection:
        """Open a connection to a follower; that it is away says nothing about routes."""
        address = self.table.address_of(place)
        return Connection.open(address, client=self._client, timeout=timeout)

    def delay_servers(self, timeout: float) -> dict[str, Calls]:
        """Return the connections to all delay servers, by name.

        Raises:
            NoDelayServerError: There is none.
            UnavailableError: That could not be found out.
        """
        route = self._delay_route(timeout)
        return {
            each.broker_group: self.calls_at(place_of(each, RouteKind.DELAYED))
            for each in route.partitions
        }

    def delay_places(self, timeout: float) -> list[str]:
        """Return all delay servers, as places; raises as ``delay_servers`` does."""
        known = self.table.route(DELAY_SERVERS)
        if known is None or not known.partitions:
            known = self._delay_route(timeout)
        return places_in(known, RouteKind.DELAYED)

    def _delay_route(self, timeout: float) -> Route:
        route = self.ask_route(DELAY_SERVERS, timeout)
        if not route.partitions:
            raise NoDelayServerError(NO_DELAY_SERVER)
        return route

    def known_places(self, key: RouteKey) -> list[str]:
        """Return who serves a subject or a pattern, as was heard last."""
        route = self.table.route(key)
        return [] if route is None else places_in(route, key.kind)

    def plain_partitions(
        self, subject: str, timeout: float, broker: str | None, partition: str | None = None
    ) -> list[tuple[Calls, str, PartitionName]]:
        """Return who has messages of a subject: connection, broker group, and partition.

        Args:
            subject: Whose.
            timeout: How long to try, in seconds.
            broker: Only this broker group's.
            partition: Only this one, which may be for another priority.

        Raises:
            UsageError: The broker that is named is none of them.
            UnknownSubjectError: There is no such subject.
        """
        name = parse_subject(subject)
        if not self.home.server:
            self.home.warm_up(timeout)
        if not self.is_cluster:
            return [(self.home, self.home.server, PartitionName(partition or name))]
        route = self.ask_route(RouteKey(name, LOOKING), timeout)
        return [
            (self.calls_at(place_of(each)), each.broker_group, each.partition)
            for each in chosen(route, broker, partition)
        ]

    def stores(self, subject: str, timeout: float) -> list[SubjectStore]:
        """Return who has messages of a subject, and in which partitions of all priorities.

        Raises:
            UnknownSubjectError: There is no such subject.
            UnavailableError: One of them could not be asked.
        """
        found: dict[str, SubjectStore] = {}
        for calls, broker_group, _ in self.plain_partitions(subject, timeout, None):
            if broker_group not in found:
                request = AskRoute(subject, kind=RouteKind.LOCAL)
                targets = calls.ask(request, timeout, targets_of)
                found[broker_group] = SubjectStore(broker_group, calls, targets)
        return list(found.values())

    def forget_route(self, key: RouteKey) -> None:
        """Take in that nobody is interested in a route any more."""
        self.table.forget(key)

    def learn(self, place: str, address: Address) -> None:
        """Take in where a broker group listens, as a meta server said."""
        self.table.learn(place, address)

    def _moved(self, place: str) -> None:
        pool = self._pools.get(place)
        if pool is not None:
            pool.moved()

    def stale(self) -> None:
        """Take in that a route seems to be wrong: it is asked for again, but not all the time."""
        now = time.monotonic()
        if now - self._stale_at >= STALE_PAUSE:
            self._stale_at = now
            self._watcher.look()

    def close(self) -> None:
        """Close all connections."""
        self.home.is_closed = True
        self._watcher.stop()
        for pool in list(self._pools.values()):
            pool.close()

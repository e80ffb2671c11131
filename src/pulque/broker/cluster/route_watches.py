"""Watches of a lone broker: answered when a partition appears that the client does not know of."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pulque.broker.cluster.local_routes import LocalRoutes, parse_asked
from pulque.broker.cluster.partition_coverage import PartitionCoverage, Place
from pulque.errors import PulqueError
from pulque.model.names import Group, Pattern
from pulque.model.routes import RouteKind
from pulque.net.server import Work
from pulque.net.steps import in_slices
from pulque.wire.routes import ChangedRoute, KnownRoute, Watch, Watched

__all__ = ["RouteWatch"]

_LONGEST_WAIT_MS = 60_000
_MOST_TOLD = 2000
"""How many routes and partitions of them one answer has, about."""
K = TypeVar("K")


class _Known(NamedTuple):
    """A route that a client has."""

    kind: RouteKind
    pattern: Pattern
    group: Group | None
    version: int
    asked_group: str
    """The group as it was asked for."""


@dataclass(eq=False, slots=True)
class _Waiting:
    request: Watch
    answer: Callable[[Watched], None]
    owner: object
    known: list[_Known] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    is_over: bool = False
    """It was answered, or its connection is gone."""


class RouteWatch:
    """Holds watches until there is something to tell."""

    def __init__(self, places: PartitionCoverage, routes: LocalRoutes) -> None:
        self._places = places
        self._routes = routes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Place, dict[_Waiting, None]] = {}
        """By what is watched, in order of arrival."""
        self._by_owner: dict[object, dict[_Waiting, None]] = {}

    def watch(self, request: Watch, owner: object, answer: Callable[[Watched], None]) -> Work:
        """Answer as soon as a route differs, at the latest when the time is up.

        In steps, a few routes at a time: a client may know very many of them. An answer
        has the first that differ, up to ``_MOST_TOLD``; the next watch gets the others at once.

        Raises:
            InvalidNameError: It names what is no subject, pattern or group.
        """
        waiting = _Waiting(request, answer, owner)
        self._by_owner.setdefault(owner, {})[waiting] = None
        try:
            for some in in_slices(request.known):
                waiting.known += map(_known_of, some)
                yield
            yield from self._list(waiting)
            yield from self._look(waiting)
        except PulqueError:
            self._stop_waiting(waiting)
            raise
        if not waiting.is_over:
            wait_s = min(request.wait_ms, _LONGEST_WAIT_MS) / 1000
            waiting.timer = self._loop.call_later(wait_s, self._time_is_up, waiting)

    def _list(self, waiting: _Waiting) -> Work:
        """List a watch under its routes, so that a new partition finds it."""
        for some in in_slices(waiting.known):
            if waiting.is_over:
                self._take_out_all(waiting)  # it was answered or closed between two steps
                return
            for each in some:
                for place in ((each.pattern, None), (each.pattern, each.group)):
                    self._waiting.setdefault(place, {})[waiting] = None
            yield

    def _look(self, waiting: _Waiting) -> Work:
        """Answer a watch if one of its routes differs."""
        told: list[ChangedRoute] = []
        for some in in_slices(waiting.known):
            if waiting.is_over:
                return
            told += _first(self._changed(some))
            if _size(told) >= _MOST_TOLD:
                break
            yield
        if told and not waiting.is_over:
            self._stop_waiting(waiting)
            waiting.answer(Watched(tuple(told)))

    def partition_added(self, places: list[Place]) -> None:
        """Answer the watches that a new partition matters to."""
        for place in places:
            for waiting in list(self._waiting.get(place, ())):
                if self._try(waiting):
                    self._stop_waiting(waiting)

    def closed(self, owner: object) -> None:
        """Forget the watches of a connection that is gone."""
        for waiting in list(self._by_owner.get(owner, ())):
            self._stop_waiting(waiting)

    def _try(self, waiting: _Waiting) -> bool:
        changed = _first(self._changed(waiting.known))
        if changed:
            waiting.answer(Watched(tuple(changed)))
        return bool(changed)

    def _changed(self, known: Iterable[_Known]) -> Iterator[ChangedRoute]:
        for kind, pattern, group, version, asked in known:
            if kind in (RouteKind.DELAYED, RouteKind.FOLLOWERS):
                differs = version != 0
            else:
                differs = self._places.differs(pattern, group, version)
            if differs:
                yield ChangedRoute(kind, asked, self._routes.route(pattern, asked, kind))

    def _time_is_up(self, waiting: _Waiting) -> None:
        self._stop_waiting(waiting)
        waiting.answer(Watched(()))

    def _stop_waiting(self, waiting: _Waiting) -> None:
        waiting.is_over = True
        if waiting.timer is not None:
            waiting.timer.cancel()
        self._take_out_all(waiting)
        _take_out(self._by_owner, waiting.owner, waiting)

    def _take_out_all(self, waiting: _Waiting) -> None:
        for each in waiting.known:
            _take_out(self._waiting, (each.pattern, None), waiting)
            _take_out(self._waiting, (each.pattern, each.group), waiting)


def _first(changed: Iterable[ChangedRoute]) -> list[ChangedRoute]:
    """Return as many changed routes as one answer may have."""
    told: list[ChangedRoute] = []
    room = _MOST_TOLD
    for each in changed:
        told.append(each)
        room -= 1 + len(each.route.partitions)
        if room <= 0:
            break
    return told


def _size(told: list[ChangedRoute]) -> int:
    return sum(1 + len(each.route.partitions) for each in told)


def _known_of(route: KnownRoute) -> _Known:
    """Return what a watch is about.

    Raises:
        InvalidNameError: It names what is no subject, pattern or group.
    """
    pattern, group = parse_asked(route.subject, route.group)
    return _Known(route.kind, pattern, group, route.version, route.group)


def _take_out(places: dict[K, dict[_Waiting, None]], key: K, waiting: _Waiting) -> None:
    found = places.get(key)
    if found is not None:
        found.pop(waiting, None)
        if not found:
            del places[key]

"""Watches of a lone broker: answered when a partition appears that the client does not know of."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pulque.broker.places import Place, Places
from pulque.broker.routes import LocalRoutes, parse_asked
from pulque.model.routes import RouteKind
from pulque.wire.routes import ChangedRoute, Watch, Watched

__all__ = ["Watcher"]

_LONGEST_WAIT_MS = 60_000
K = TypeVar("K")


@dataclass(eq=False, slots=True)
class _Waiting:
    request: Watch
    answer: Callable[[Watched], None]
    owner: object
    places: set[Place]
    timer: asyncio.TimerHandle | None = None


class Watcher:
    """Holds watches until there is something to tell."""

    def __init__(self, places: Places, routes: LocalRoutes) -> None:
        self._places = places
        self._routes = routes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Place, dict[_Waiting, None]] = {}
        """By what is watched, in order of arrival."""
        self._by_owner: dict[object, dict[_Waiting, None]] = {}

    def watch(self, request: Watch, owner: object, answer: Callable[[Watched], None]) -> None:
        """Answer as soon as a route differs, at the latest when the time is up."""
        waiting = _Waiting(request, answer, owner, _places_of(request))
        if self._try(waiting):
            return
        for place in waiting.places:
            self._waiting.setdefault(place, {})[waiting] = None
        self._by_owner.setdefault(owner, {})[waiting] = None
        wait_s = min(request.wait_ms, _LONGEST_WAIT_MS) / 1000
        waiting.timer = self._loop.call_later(wait_s, self._time_is_up, waiting)

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
        changed = tuple(
            ChangedRoute(kind, group, self._routes.route(subject, group, kind))
            for kind, subject, group, version in waiting.request.known
            if self._differs(kind, subject, group, version)
        )
        if changed:
            waiting.answer(Watched(changed))
        return bool(changed)

    def _differs(self, kind: RouteKind, subject: str, group: str, version: int) -> bool:
        if kind is RouteKind.DELAYED:
            return version != 0
        return self._places.differs(*parse_asked(subject, group), version)

    def _time_is_up(self, waiting: _Waiting) -> None:
        self._stop_waiting(waiting)
        waiting.answer(Watched(()))

    def _stop_waiting(self, waiting: _Waiting) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        for place in waiting.places:
            _take_out(self._waiting, place, waiting)
        _take_out(self._by_owner, waiting.owner, waiting)


def _places_of(request: Watch) -> set[Place]:
    """Return what a watch is about.

    Raises:
        InvalidNameError: It names what is no subject, pattern or group.
    """
    places: set[Place] = set()
    for each in request.known:
        pattern, group = parse_asked(each.subject, each.group)
        places |= {(pattern, None), (pattern, group)}
    return places


def _take_out(places: dict[K, dict[_Waiting, None]], key: K, waiting: _Waiting) -> None:
    found = places.get(key, {})
    found.pop(waiting, None)
    if not found:
        places.pop(key, None)

"""Clients that wait until a route is not what they know any more.

A watch costs no task and no timer: it is listed under every route that it knows, and under the
turn of the clock at which its time is up. A client may know ten thousand routes, and many routes
change at once when a broker comes or goes: routes are listed, looked at and taken out a few at a
time, so that nobody else has to wait for all of them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pulque.clock import Clock
from pulque.meta.directory import Directory
from pulque.model.names import Pattern, Subject, parse_pattern
from pulque.model.routes import RouteKind
from pulque.net.server import Work
from pulque.net.steps import in_slices
from pulque.wire.routes import ChangedRoute, Watch, Watched

__all__ = ["Watches"]

_LONGEST_WAIT_MS = 60_000
_TURN_MS = 250
_AT_ONCE = 512
"""How many routes are looked at, or taken out, in one turn of the event loop, about."""
_MOST_TOLD = 1000
"""How many routes and partitions of them one answer has, about."""
_Key = tuple[RouteKind, Pattern]
_Known = tuple[RouteKind, Pattern, str, int]
_Chore = Iterator[int]
"""Work that is done between requests; each step says how many routes it was about."""
K = TypeVar("K")


class _RouteWaiter:
    """One watch."""

    __slots__ = ("answer", "is_over", "known", "owner", "turn")

    def __init__(self, owner: object, answer: Callable[[Watched], None]) -> None:
        self.known: list[_Known] = []
        self.owner = owner
        self.answer = answer
        self.turn: int | None = None
        """Set while it waits."""
        self.is_over = False
        """It was answered, or its connection is gone."""


class Watches:
    """Holds watches until there is something to tell. Lives in one event loop."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._waiting: dict[_Key, dict[_RouteWaiter, None]] = {}
        """By what is watched."""
        self._ending: dict[int, dict[_RouteWaiter, None]] = {}
        """By the turn at which their time is up."""
        self._by_owner: dict[object, dict[_RouteWaiter, None]] = {}
        self._turn = self._turn_at(clock.monotonic_ms())
        self._timer: asyncio.TimerHandle | None = None
        self._chores: deque[_Chore] = deque()
        self._look_at_all: _Chore = iter(())
        self._is_busy = False
        self.waiting = 0
        """How many there are."""

    def watch(self, request: Watch, owner: object, answer: Callable[[Watched], None]) -> Work:
        """Answer as soon as a route differs, at the latest when the time is up.

        An answer has the first routes that differ, up to ``_MOST_TOLD`` of them and their
        partitions; the next watch gets the others at once.

        Raises:
            InvalidNameError: It names what is no subject or pattern.
        """
        known: list[_Known] = []
        for asked in in_slices(request.known):
            known += [(kind, self._pattern(name), group, old) for kind, name, group, old in asked]
            yield
        waiter = _RouteWaiter(owner, answer)
        self._by_owner.setdefault(owner, {})[waiter] = None
        for some in in_slices(known):
            if waiter.is_over:
                return
            # Listed before it is looked at: what changes in between must find it.
            waiter.known += some
            for kind, pattern, _, _ in some:
                self._waiting.setdefault((kind, pattern), {})[waiter] = None
            yield
        for _ in self._look(waiter):
            yield
        if not waiter.is_over:
            wait_ms = min(request.wait_ms, _LONGEST_WAIT_MS)
            self._stand(waiter, self._turn_at(self._clock.monotonic_ms() + wait_ms) + 1)

    def changed(self, subjects: Iterable[Subject]) -> None:
        """Look at the watches of some subjects."""
        found: dict[_RouteWaiter, None] = {}
        for subject in subjects:
            for kind in (RouteKind.REALTIME, RouteKind.FOLLOWERS):
                found |= self._waiting.get((kind, Pattern(subject)), {})
        self._do_later(self._look(waiter) for waiter in found)

    def all_changed(self) -> None:
        """Look at all watches."""
        waiters = [each for some in self._by_owner.values() for each in some]
        self._look_at_all = (count for waiter in waiters for count in self._look(waiter))
        self._do_later(())

    def closed(self, owner: object) -> None:
        """Forget the watches of a connection that is gone."""
        for waiter in list(self._by_owner.get(owner, ())):
            self._remove(waiter)

    def close(self) -> None:
        """Answer all that wait, with nothing."""
        if self._timer is not None:
            self._timer.cancel()
        for waiters in list(self._ending.values()):
            for waiter in list(waiters):
                self._end(waiter)

    def _pattern(self, text: str) -> Pattern:
        # One text for all who watch the same: there may be ten thousand of them.
        placed = self._directory.subjects.get(Subject(text))
        return Pattern(placed[0].partition) if placed else parse_pattern(text)

    def _look(self, waiter: _RouteWaiter) -> _Chore:
        """Answer if there is something to tell."""
        told: list[ChangedRoute] = []
        size = 0
        for some in in_slices(waiter.known):
            if waiter.is_over:
                return
            for kind, pattern, group, version in some:
                route = self._directory.route(kind, pattern)
                if route.version != version and size < _MOST_TOLD:
                    told.append(ChangedRoute(kind, group, route))
                    size += 1 + len(route.partitions)
            if size >= _MOST_TOLD:
                break
            yield len(some)
        if told and not waiter.is_over:
            self._remove(waiter)
            waiter.answer(Watched(tuple(told)))

    def _do_later(self, chores: Iterable[_Chore]) -> None:
        self._chores.extend(chores)
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._do_some)

    def _do_some(self) -> None:
        """Do chores until so many routes were looked at; those of all watches come last."""
        left = _AT_ONCE
        while left > 0:
            chore = self._chores[0] if self._chores else self._look_at_all
            count = next(chore, None)
            if count is not None:
                left -= count
            elif self._chores:
                self._chores.popleft()
            else:
                self._is_busy = False
                return
        asyncio.get_running_loop().call_soon(self._do_some)

    def _stand(self, waiter: _RouteWaiter, turn: int) -> None:
        """Have a watch wait until its time is up."""
        waiter.turn = turn
        self._ending.setdefault(turn, {})[waiter] = None
        self.waiting += 1
        if self._timer is None:
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TURN_MS / 1000, self._next_turns)

    def _next_turns(self) -> None:
        """End the watches whose time is up."""
        now = self._turn_at(self._clock.monotonic_ms())
        while self._turn < now:
            self._turn += 1
            for waiter in list(self._ending.get(self._turn, ())):
                self._end(waiter)
        self._timer = None
        if self._ending:
            self._schedule()

    def _end(self, waiter: _RouteWaiter) -> None:
        self._remove(waiter)
        waiter.answer(Watched(()))

    def _remove(self, waiter: _RouteWaiter) -> None:
        waiter.is_over = True
        _take_out(self._by_owner, waiter.owner, waiter)
        if waiter.turn is not None:
            _take_out(self._ending, waiter.turn, waiter)
            self.waiting -= 1
        self._do_later((self._take_out_all(waiter),))

    def _take_out_all(self, waiter: _RouteWaiter) -> _Chore:
        for some in in_slices(waiter.known):
            for kind, pattern, _, _ in some:
                _take_out(self._waiting, (kind, pattern), waiter)
            yield len(some)

    @staticmethod
    def _turn_at(now_ms: int) -> int:
        return now_ms // _TURN_MS


def _take_out(places: dict[K, dict[_RouteWaiter, None]], key: K, waiter: _RouteWaiter) -> None:
    found = places.get(key, {})
    found.pop(waiter, None)
    if not found:
        places.pop(key, None)

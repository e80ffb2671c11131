"""Clients that wait until a route is not what they know any more.

A watch costs no task and no timer: it is listed under every route that it knows, and under the
turn of the clock at which its time is up. When many routes change at once (a broker came or
went) they are looked at a few at a time, so that nobody else has to wait for all of them.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pulque.clock import Clock
from pulque.meta.directory import Directory
from pulque.model.names import Pattern, Subject, parse_pattern
from pulque.model.routes import RouteKind
from pulque.wire.routes import ChangedRoute, Watch, Watched

__all__ = ["Watches"]

_LONGEST_WAIT_MS = 60_000
_TURN_MS = 250
_AT_ONCE = 100
_Key = tuple[RouteKind, Pattern]
_Known = tuple[RouteKind, Pattern, str, int]
K = TypeVar("K")


class _Waiter:
    """One watch."""

    __slots__ = ("answer", "known", "owner", "turn")

    def __init__(
        self,
        known: tuple[_Known, ...],
        owner: object,
        answer: Callable[[Watched], None],
        turn: int,
    ) -> None:
        self.known = known
        self.owner = owner
        self.answer = answer
        self.turn = turn


class Watches:
    """Holds watches until there is something to tell. Lives in one event loop."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._waiting: dict[_Key, dict[_Waiter, None]] = {}
        """By what is watched."""
        self._ending: dict[int, dict[_Waiter, None]] = {}
        """By the turn at which their time is up."""
        self._by_owner: dict[object, dict[_Waiter, None]] = {}
        self._turn = self._turn_at(clock.monotonic_ms())
        self._timer: asyncio.TimerHandle | None = None
        self._to_look_at: Iterator[_Waiter] = iter(())
        self._is_looking = False
        self.waiting = 0
        """How many there are."""

    def watch(self, request: Watch, owner: object, answer: Callable[[Watched], None]) -> None:
        """Answer as soon as a route differs, at the latest when the time is up.

        Raises:
            InvalidNameError: It names what is no subject or pattern.
        """
        known = tuple(
            (kind, self._pattern(subject), group, version)
            for kind, subject, group, version in request.known
        )
        wait_ms = min(request.wait_ms, _LONGEST_WAIT_MS)
        turn = self._turn_at(self._clock.monotonic_ms() + wait_ms) + 1
        waiter = _Waiter(known, owner, answer, turn)
        if self._try(waiter):
            return
        for kind, pattern, _, _ in known:
            self._waiting.setdefault((kind, pattern), {})[waiter] = None
        self._ending.setdefault(turn, {})[waiter] = None
        self._by_owner.setdefault(owner, {})[waiter] = None
        self.waiting += 1
        if self._timer is None:
            self._schedule()

    def changed(self, subjects: Iterable[Subject]) -> None:
        """Look at the watches of some subjects."""
        for subject in subjects:
            for kind in (RouteKind.REALTIME, RouteKind.FOLLOWERS):
                for waiter in list(self._waiting.get((kind, Pattern(subject)), ())):
                    # One that watches both was answered with both.
                    if waiter in self._by_owner.get(waiter.owner, ()) and self._try(waiter):
                        self._remove(waiter)

    def all_changed(self) -> None:
        """Look at all watches, a few at a time."""
        waiters = [each for some in self._ending.values() for each in some]
        self._to_look_at = iter(waiters)
        if not self._is_looking:
            self._is_looking = True
            self._look_at_some()

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

    def _try(self, waiter: _Waiter) -> bool:
        """Answer if there is something to tell, and say whether there was."""
        changed = []
        for kind, pattern, group, version in waiter.known:
            route = self._directory.route(kind, pattern)
            if route.version != version:
                changed.append(ChangedRoute(kind, group, route))
        if changed:
            waiter.answer(Watched(tuple(changed)))
        return bool(changed)

    def _look_at_some(self) -> None:
        for _ in range(_AT_ONCE):
            waiter = next(self._to_look_at, None)
            if waiter is None:
                self._is_looking = False
                return
            # Those that were answered meanwhile are not listed any more.
            if waiter in self._by_owner.get(waiter.owner, ()) and self._try(waiter):
                self._remove(waiter)
        asyncio.get_running_loop().call_soon(self._look_at_some)

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

    def _end(self, waiter: _Waiter) -> None:
        self._remove(waiter)
        waiter.answer(Watched(()))

    def _remove(self, waiter: _Waiter) -> None:
        for kind, pattern, _, _ in waiter.known:
            _take_out(self._waiting, (kind, pattern), waiter)
        _take_out(self._ending, waiter.turn, waiter)
        _take_out(self._by_owner, waiter.owner, waiter)
        self.waiting -= 1

    @staticmethod
    def _turn_at(now_ms: int) -> int:
        return now_ms // _TURN_MS


def _take_out(places: dict[K, dict[_Waiter, None]], key: K, waiter: _Waiter) -> None:
    found = places.get(key, {})
    found.pop(waiter, None)
    if not found:
        places.pop(key, None)

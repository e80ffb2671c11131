"""Tells the followers of a consumer's brokers that it lives, in a task of its own; for asyncio.

What goes wrong with a follower is no concern of the application: it is tried again, quietly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pulque.client.aio.concurrency import Signal, Worker, for_each
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.session import as_it_is
from pulque.client.receiving.heartbeat_schedule import LIMIT, Beats
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.route_table import RouteKey
from pulque.errors import PulqueError
from pulque.model.routes import RouteKind

__all__ = ["Followers", "FollowersOf"]

log = logging.getLogger("pulque.client")


class FollowersOf(Protocol):
    """What has to be known of the brokers behind a client."""

    @property
    def is_cluster(self) -> bool:
        """Whether there may be followers at all."""

    async def followers(self, key: RouteKey, timeout: float) -> list[str]:
        """Return who the followers are."""

    async def open_follower(self, place: str, timeout: float) -> AsyncConnection:
        """Open a connection to one of them."""

    def forget_route(self, key: RouteKey) -> None:
        """Take in that the consumer is gone."""


class Followers:
    """The followers of one consumer. For the tasks of one event loop.

    Args:
        options: Who consumes, and what.
        brokers: Who is there.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self, options: PullOptions, brokers: FollowersOf, draw: Callable[[], float]
    ) -> None:
        self._key = RouteKey(options.subject, options.group, RouteKind.FOLLOWERS)
        self._brokers = brokers
        self._beats = Beats(options, draw)
        self._backoff = Backoff(draw, first=0.1, largest=5.0)
        self._links: dict[str, AsyncConnection] = {}
        self._worker = Worker(self._run, "pulque-beats")
        self._look = Signal()
        """Set when there is a reason not to wait."""

    def start(self) -> None:
        """Begin, if it has not and there may be any."""
        if self._brokers.is_cluster:
            self._worker.start()

    def routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that there may be others. Any task may."""
        if self._key in keys:
            self._look.set()

    async def stop(self) -> None:
        """End. Any task may."""
        if await self._worker.stop(self._wake, 2 * LIMIT):
            self._brokers.forget_route(self._key)

    def _wake(self) -> None:
        self._look.set()
        for connection in list(self._links.values()):
            connection.abort()

    async def _run(self) -> None:
        try:
            while not self._worker.is_stopped:
                self._look.clear()
                await self._look.wait_for(await self._turn())
        except PulqueError as error:
            # A server that does not know the question has no followers.
            log.debug("no followers: %s", error)
        except Exception:
            log.exception("followers are not told that a consumer lives")
        finally:
            await self._drop(list(self._links))

    async def _turn(self) -> float | None:
        """Tell whom it is time to tell; return for how many seconds there is nothing to do.

        Raises:
            PulqueError: Nobody knows what followers are.
        """
        try:
            places = await self._brokers.followers(self._key, LIMIT)
        except PulqueError as error:
            if not error.retryable:
                raise
            log.debug("followers could not be asked for: %s", error)
            return self._backoff.next_wait()
        self._backoff.reset()
        await self._drop(self._beats.follow(places, time.monotonic()))
        await for_each(self._beats.due(time.monotonic()), self._beat)
        due = self._beats.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    async def _beat(self, place: str) -> None:
        if self._worker.is_stopped:
            return
        try:
            connection = self._links.get(place)
            if connection is None or not connection.is_open:
                await self._drop([place])
                connection = self._links[place] = await self._brokers.open_follower(place, LIMIT)
            answer = await connection.request(self._beats.heartbeat, LIMIT, as_it_is)
            self._beats.beaten(place, answer, time.monotonic())
        except PulqueError as error:
            log.debug("a follower was not told: place=%s error=%s", place, error)
            await self._drop([place])
            self._beats.failed(place, time.monotonic())

    async def _drop(self, places: Iterable[str]) -> None:
        for place in places:
            connection = self._links.pop(place, None)
            if connection is not None:
                await connection.close()

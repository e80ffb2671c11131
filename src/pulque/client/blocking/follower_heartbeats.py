"""Tells the followers of a blocking consumer's brokers that it lives, in a thread of its own.

What goes wrong with a follower is no concern of the application: it is tried again, quietly.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pulque.client.blocking.connection import Connection
from pulque.client.connection.backoff import Backoff
from pulque.client.receiving.heartbeat_schedule import Beats
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.route_table import RouteKey
from pulque.errors import PulqueError
from pulque.model.routes import RouteKind

__all__ = ["LIMIT", "Followers", "FollowersOf"]

log = logging.getLogger("pulque.client")

LIMIT = 2.0
"""How long a follower may take to answer, in seconds."""


class FollowersOf(Protocol):
    """What has to be known of the brokers behind a client."""

    @property
    def is_cluster(self) -> bool:
        """Whether there may be followers at all."""

    def followers(self, key: RouteKey, timeout: float) -> list[str]:
        """Return who the followers are."""

    def open_follower(self, place: str, timeout: float) -> Connection:
        """Open a connection to one of them."""

    def forget_route(self, key: RouteKey) -> None:
        """Take in that the consumer is gone."""


class Followers:
    """The followers of one consumer. Thread-safe.

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
        self._links: dict[str, Connection] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._look = threading.Event()
        """Set when there is a reason not to wait."""

    def start(self) -> None:
        """Begin, if it has not and there may be any. Called by one thread."""
        if self._thread is None and not self._is_stopped and self._brokers.is_cluster:
            self._thread = threading.Thread(target=self._run, name="pulque-beats", daemon=True)
            self._thread.start()

    def routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that there may be others. Any thread may."""
        if self._key in keys:
            self._look.set()

    def stop(self) -> None:
        """End. Any thread may."""
        self._is_stopped = True
        self._look.set()
        for connection in list(self._links.values()):
            connection.abort()
        if self._thread is not None:
            self._thread.join(2 * LIMIT)
            self._thread = None
            self._brokers.forget_route(self._key)

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._look.clear()
                self._look.wait(self._turn())
        except PulqueError as error:
            # A server that does not know the question has no followers.
            log.debug("no followers: %s", error)
        except Exception:
            log.exception("followers are not told that a consumer lives")
        finally:
            self._drop(list(self._links))

    def _turn(self) -> float | None:
        """Tell whom it is time to tell; return for how many seconds there is nothing to do.

        Raises:
            PulqueError: Nobody knows what followers are.
        """
        try:
            places = self._brokers.followers(self._key, LIMIT)
        except PulqueError as error:
            if not error.retryable:
                raise
            log.debug("followers could not be asked for: %s", error)
            return self._backoff.next_wait()
        self._backoff.reset()
        self._drop(self._beats.follow(places, time.monotonic()))
        for place in self._beats.due(time.monotonic()):
            self._beat(place)
        due = self._beats.next_due()
        return None if due is None else max(0.0, due - time.monotonic())

    def _beat(self, place: str) -> None:
        if self._is_stopped:
            return
        try:
            connection = self._links.get(place)
            if connection is None or not connection.is_open:
                self._drop([place])
                connection = self._links[place] = self._brokers.open_follower(place, LIMIT)
            answer = connection.request(self._beats.heartbeat, LIMIT)
            self._beats.beaten(place, answer, time.monotonic())
        except PulqueError as error:
            log.debug("a follower was not told: place=%s error=%s", place, error)
            self._drop([place])
            self._beats.failed(place, time.monotonic())

    def _drop(self, places: Iterable[str]) -> None:
        for place in places:
            connection = self._links.pop(place, None)
            if connection is not None:
                connection.close()

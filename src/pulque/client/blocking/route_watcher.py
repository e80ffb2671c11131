# Generated from aio/route_watcher.py by `make blocking`: edit that file, not this one.
"""Keeps a client's routes fresh: a thread waits for changes at a meta server.

It starts with the first route that leads away from home; clients of a lone broker have none. A
server that cannot be watched is asked for every route in turn, now and then.
"""

import logging
from collections.abc import Callable, Iterable

from pulque.client.blocking.concurrency import Signal, Worker, on_fork
from pulque.client.blocking.connection import Connection
from pulque.client.connection.backoff import Backoff
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.client.routing.targets import route_of
from pulque.client.routing.watch_requests import (
    ASK_EVERY,
    PATIENCE,
    PAUSE,
    WAIT,
    changed_of,
    watcher_name,
)
from pulque.errors import PulqueError, UnavailableError, UnsupportedError
from pulque.model.routes import RouteKind
from pulque.wire.requests import Route, Watch
from pulque.wire.routes import ChangedRoute

__all__ = ["RouteWatcher"]

log = logging.getLogger("pulque.client")


class RouteWatcher:
    """Watches the routes of one client. Thread-safe.

    Args:
        table: What is known, and where news go.
        connect: Opens a connection to a server that knows routes.
        client: The same in every watch of this client.
        application: What the client belongs to.
        tell: Called when routes have changed.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        table: RouteTable,
        connect: Callable[[float], Connection],
        *,
        client: str,
        application: str,
        tell: Callable[[list[RouteKey]], None],
        draw: Callable[[], float],
    ) -> None:
        self._table = table
        self._connect = connect
        self._client = client
        self._application = application
        self._tell = tell
        self._backoff = Backoff(draw, first=0.1, largest=3.0)
        self._begin()
        on_fork(self, RouteWatcher.after_fork)

    def _begin(self) -> None:
        self._connection: Connection | None = None
        self._look = Signal()
        """Set when there is a reason not to wait."""
        self._worker = Worker(self._run, "pulque-routes")

    def after_fork(self) -> None:
        """Begin anew, with the next route that is asked for, and as another client."""
        self._client = watcher_name(self._application)
        self._begin()

    def start(self) -> None:
        """Begin, if it has not."""
        self._worker.start()

    def look(self) -> None:
        """Ask again now: there are new routes to watch, or one of them seems to be wrong."""
        if self._worker.is_started and not self._look.is_set():
            self._look.set()
            connection = self._connection
            if connection is not None:
                connection.abort()

    def stop(self) -> None:
        """End."""
        self._worker.stop(self.look, PATIENCE)

    def _run(self) -> None:
        while not self._worker.pause(PAUSE):
            try:
                self._connection = connection = self._connect(PATIENCE)
                try:
                    self._look.clear()
                    self._watch(connection)
                finally:
                    self._connection = None
                    connection.close()
            except UnavailableError as error:
                if not self._look.is_set():
                    log.info("routes cannot be watched for now: %s", error)
                    self._look.wait_for(self._backoff.next_wait())
            except PulqueError as error:
                log.warning("routes cannot be watched: %s", error)
                self._look.wait_for(self._backoff.next_wait())
            except Exception:
                log.exception("routes cannot be watched")
                self._look.wait_for(self._backoff.next_wait())

    def _watch(self, connection: Connection) -> None:
        while not self._worker.is_stopped and not self._look.is_set():
            known = self._table.known()
            watch = Watch(self._client, self._application, known, int(WAIT * 1000))
            try:
                changed = connection.request(watch, WAIT + PATIENCE, changed_of)
            except UnsupportedError:
                self._ask_all(connection)
                continue
            self._backoff.reset()
            self._take_in(changed)

    def _ask_all(self, connection: Connection) -> None:
        """Ask for every route, where they cannot be watched, and wait a while."""
        changed = []
        for kind, subject, group, _ in self._table.known():
            request = Route(subject, group, kind)
            try:
                route = connection.request(request, PATIENCE, route_of)
            except UnsupportedError:
                # An older server: perhaps it can be watched, but for what it does not know.
                if kind is RouteKind.FOLLOWERS and self._table.forget_followers():
                    return
                raise
            changed.append(ChangedRoute(kind, group, route))
        self._backoff.reset()
        self._take_in(changed)
        self._look.wait_for(ASK_EVERY)

    def _take_in(self, changed: Iterable[ChangedRoute]) -> None:
        keys = self._table.take_in_changed(changed)
        if keys:
            log.info("routes changed: %s", ", ".join(sorted({key.subject for key in keys})))
            self._tell(keys)

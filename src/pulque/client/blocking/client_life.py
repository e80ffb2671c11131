"""How a client begins and ends; by hand, as it connects at once, and is missed when dropped."""

import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from pulque.client.blocking.brokers import ClientConnections
from pulque.client.blocking.connection_pool import Calls
from pulque.client.blocking.consumer import Consumer
from pulque.client.blocking.failover import Spread
from pulque.client.blocking.producer import Producer, close_in_thread
from pulque.client.connection.fork_safety import on_fork
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.errors import PulqueError

__all__ = ["ClientLife", "opened"]

log = logging.getLogger("pulque.client")

L = TypeVar("L", bound="ClientLife")


def opened(client: L) -> L:
    """Connect a client that was made, and return it."""
    client.warm_up()
    return client


class ClientLife:
    """A client's producers and consumers, until they are closed, and its end."""

    _brokers: ClientConnections
    _calls: Calls
    _spread: Spread
    _name: str
    _open_ends: set[Producer | Consumer]

    def _begin(self, draw: Callable[[], float]) -> None:
        """Begin with no producers and consumers."""
        self._open_ends = set()
        brokers, table = self._brokers, self._brokers.table
        self._calls = brokers.home
        self._spread = Spread(brokers.calls_at, table.targets_for, brokers.stale, draw)
        on_fork(table, RouteTable.forget_all)  # in a child nobody watches its routes
        on_fork(self, ClientLife._after_fork)

    def _after_fork(self) -> None:
        """Go on in a child, without the producers and consumers of the parent."""
        self._open_ends = set()

    def warm_up(self) -> Self:
        """Connect now, so that a wrong address is known at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Close everything that was made from this client, and its connections."""
        for end in list(self._open_ends):
            end.close()
        self._brokers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """Close a client that was dropped: its threads, which do not hold it, would go on."""
        brokers = getattr(self, "_brokers", None)
        if brokers is None or brokers.home.is_closed or not brokers.home.server:
            return
        if not sys.is_finalizing():
            for end in self._open_ends:
                if isinstance(end, Producer):
                    end._close_at_exit()  # noqa: SLF001
            # Before the warning, which may be an error.
            close_in_thread(self._close_quietly)
            text = f"unclosed client {self._name}"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def _hold(self, end: Producer | Consumer) -> None:
        """Keep a producer or a consumer until it is closed; it keeps the client as long."""
        self._open_ends.add(end)
        end.on_closed = self._let_go

    def _let_go(self, end: Producer | Consumer) -> None:
        self._open_ends.discard(end)

    def _close_quietly(self) -> None:
        try:
            self.close()
        except PulqueError as error:
            log.warning("a client that was dropped could not be closed: %s", error)

    def _routes_changed(self, keys: list[RouteKey]) -> None:
        """Tell producers and consumers; called by the thread that watches."""
        for end in list(self._open_ends):
            end._routes_changed(keys)  # noqa: SLF001

    def _teller(self) -> Callable[[list[RouteKey]], None]:
        """Return what tells this client of changed routes, and does not keep it."""
        found = weakref.ref(self)

        def tell(keys: list[RouteKey]) -> None:
            if (held := found()) is not None:
                held._routes_changed(keys)  # noqa: SLF001  # it is this class

        return tell

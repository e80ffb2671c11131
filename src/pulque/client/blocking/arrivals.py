"""Wakes a consumer when something came; by hand, as its caller polls its brokers' sockets."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pulque.client.blocking.connection import Connection
from pulque.client.connection.fork_safety import on_fork

__all__ = ["Arrivals"]


class _Pulled(Protocol):
    @property
    def connection(self) -> Connection | None:
        """The connection, if there is an open one."""

    @property
    def pull_due(self) -> float:
        """When the answer to the pull on its way is overdue."""


class Arrivals:
    """Says that something came for a consumer. Thread-safe.

    Args:
        is_needed: Whether anybody waits for several brokers.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._waiting = threading.Lock()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        """The ends of what wakes the caller's thread."""
        if is_needed:
            self._sockets = socket.socketpair()
            for each in self._sockets:
                each.setblocking(False)
        on_fork(self, Arrivals.after_fork)

    def set(self) -> None:
        """Wake the thread that waits, or the next one."""
        sockets = self._sockets
        if sockets is not None:
            with contextlib.suppress(OSError):  # it is full of such bytes, or this is the end
                sockets[1].send(b"\0")

    def set_from_anywhere(self) -> None:
        """Wake it. Any thread may, as with ``set``."""
        self.set()

    def clear(self) -> None:
        """Do nothing: whoever is woken clears it."""

    def wait_for_any(
        self, inlets: Iterable[_Pulled], until: float, may_wait: Callable[[], bool]
    ) -> None:
        """Wait until something came from a broker, or something else happened."""
        with self._waiting:
            if self._sockets is None or not may_wait():
                return
            woken, _ = self._sockets
            poller = select.poll()
            poller.register(woken, select.POLLIN)
            for inlet in inlets:
                connection = inlet.connection
                if connection is not None:
                    poller.register(connection, select.POLLIN)
                until = min(until, inlet.pull_due)
            poller.poll(max(0.0, (until - time.monotonic()) * 1000))
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)

    def close(self) -> None:
        """Free the sockets, when nobody waits."""
        with self._waiting:
            for each in self._sockets or ():
                each.close()
            self._sockets = None

    def after_fork(self) -> None:
        """Let go of the parent's sockets in a child, which does nothing more here."""
        for each in self._sockets or ():
            each.close()
        self._sockets = None

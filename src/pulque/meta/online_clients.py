"""Which clients were heard of lately: a watch is a client's heartbeat."""

from collections.abc import Iterator
from typing import NamedTuple

from pulque.clock import Clock

__all__ = ["OnlineClient", "OnlineClients"]

_FORGOTTEN_MS = 150_000
_MOST = 100_000


class OnlineClient(NamedTuple):
    """A client of the cluster, as this meta server heard of it."""

    client: str
    application: str
    address: str
    since_ms: int
    """When it was first heard of, in milliseconds since 1970."""
    seen_at_ms: int
    """When it was last heard of, on the monotonic clock."""
    routes: int
    """How many it knows."""


class OnlineClients:
    """Who is there. A client that was silent for two minutes and a half is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clients: dict[str, OnlineClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[OnlineClient]:
        return iter(list(self._clients.values()))

    def hear(self, client: str, application: str, address: str, routes: int) -> None:
        """Take note that a client lives."""
        now_ms = self._clock.monotonic_ms()
        known = self._clients.pop(client, None)
        since_ms = known.since_ms if known else self._clock.now_ms()
        # Taken out and put in again, they stand in the order in which they were heard of.
        self._clients[client] = OnlineClient(
            client, application, address, since_ms, now_ms, routes
        )
        if len(self._clients) > _MOST:
            del self._clients[next(iter(self._clients))]

    def forget_silent(self) -> None:
        """Forget those that are gone."""
        oldest_ms = self._clock.monotonic_ms() - _FORGOTTEN_MS
        for client in list(self._clients.values()):
            if client.seen_at_ms >= oldest_ms:
                break
            del self._clients[client.client]

"""How a client begins and ends; by hand, as it is awaited, and dropped without a word."""

import weakref
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Self, TypeVar

from pulque.client.aio.brokers import ClientConnections
from pulque.client.aio.consumer import Consumer
from pulque.client.aio.producer import Producer
from pulque.client.routing.route_table import RouteKey

__all__ = ["ClientLife", "opened"]

L = TypeVar("L", bound="ClientLife")


def opened(client: L) -> L:
    """Return a client as it was made: it connects when it is awaited or entered."""
    return client


class ClientLife:
    """A client's producers and consumers, as long as they are used."""

    _brokers: ClientConnections
    _open_ends: "weakref.WeakSet[Producer | Consumer]"

    def _begin(self, draw: Callable[[], float]) -> None:  # its twin draws
        """Begin with no producers and consumers."""
        self._open_ends = weakref.WeakSet()

    async def warm_up(self) -> Self:
        """Connect now, so that a wrong address is known at once."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close everything that was made from this client, and its connections."""
        if self._brokers.guard.forked is None:
            self._brokers.guard.check()
        for end in list(self._open_ends):
            await end.close()
        await self._brokers.close()

    def __await__(self) -> Generator[object, None, Self]:
        return self.warm_up().__await__()

    async def __aenter__(self) -> Self:
        return await self.warm_up()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _hold(self, end: Producer | Consumer) -> None:
        """Keep a producer or a consumer as long as somebody uses it."""
        self._open_ends.add(end)
        end.on_closed = self._open_ends.discard

    async def _routes_changed(self, keys: list[RouteKey]) -> None:
        """Tell producers and consumers; called by the task that watches."""
        for end in list(self._open_ends):
            await end._routes_changed(keys)  # noqa: SLF001

    def _teller(self) -> Callable[[list[RouteKey]], Awaitable[None]]:
        """Return what tells this client of changed routes."""
        return self._routes_changed

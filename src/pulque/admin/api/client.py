"""``/clients``: who is online, since when, and what they hold."""

import functools

from fastapi import APIRouter

from pulque.admin.cluster import KnownServer, WatchingClient
from pulque.admin.context import Context, instant
from pulque.admin.models.client import ClientPage, ClientRow, ClientSubscription
from pulque.admin.models.pagination import Cursor, Limit, Unreachable, read_cursor, write_cursor
from pulque.errors import RemoteProtocolError
from pulque.wire.clients import Clients, ClientsListed, ConnectedClient
from pulque.wire.responses import Response

__all__ = ["ClientsApi"]

_META = ""
"""Sorts the clients of the meta server before those of all brokers."""


class ClientsApi:
    """Answers for clients that are online."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cluster = context.cluster
        # The published API files them under brokers, too.
        self.router = router = APIRouter(tags=["brokers", "clients"])
        router.get("/clients", summary="List clients")(self.clients)

    async def clients(self, cursor: Cursor = None, limit: Limit = 100) -> ClientPage:
        """Return who is online: those that watch routes here, then those of each broker."""
        server, client, number = read_cursor(cursor, (str, str, int)) or (_META, "", 0)
        rows: list[ClientRow] = []
        silent: list[Unreachable] = []
        if server == _META:
            watching = await self._cluster.clients(str(client), limit + 1)
            rows += (_online(each) for each in watching[:limit])
            if len(watching) > limit:
                return ClientPage(items=rows, next=write_cursor((_META, rows[-1].client, 0)))
        for broker in sorted(await self._context.serving()):
            if broker.name < str(server):
                continue
            after = int(number) if broker.name == server else 0
            if len(rows) == limit:
                return ClientPage(
                    items=rows, next=write_cursor((broker.name, "", after)), unreachable=silent
                )
            found, unheard = await self._connected(broker, after, limit - len(rows))
            silent += unheard
            rows += (_connected(broker, each) for each in found.clients)
            if found.has_more:
                last = found.clients[-1].number if found.clients else after
                return ClientPage(
                    items=rows, next=write_cursor((broker.name, "", last)), unreachable=silent
                )
        return ClientPage(items=rows, unreachable=silent)

    async def _connected(
        self, broker: KnownServer, after: int, limit: int
    ) -> tuple[ClientsListed, list[Unreachable]]:
        request = Clients(after, limit)
        ask = functools.partial(self._context.brokers.ask, request=request, convert=_clients_of)
        answers, silent = await self._context.brokers.ask_all([broker], ask)
        return (answers[0][1] if answers else ClientsListed((), 0, False)), silent


def _online(client: WatchingClient) -> ClientRow:
    return ClientRow(
        server="meta",
        client=client.client,
        application=client.application,
        address=client.address,
        since=instant(client.online_since_ms),
        silent_seconds=client.silent_ms / 1000,
        holds=0,
        consumers=[],
        routes=client.routes,
    )


def _connected(broker: KnownServer, client: ConnectedClient) -> ClientRow:
    return ClientRow(
        server=broker.name,
        client=client.client,
        application=client.client,
        address=client.address,
        since=instant(client.connected_at_ms),
        silent_seconds=client.silent_ms / 1000,
        holds=sum(each.held for each in client.consumers),
        consumers=[ClientSubscription(**each._asdict()) for each in client.consumers],
        routes=0,
    )


def _clients_of(response: Response) -> ClientsListed:
    if not isinstance(response, ClientsListed):
        raise RemoteProtocolError(f"a request for clients got {response!r}")
    return response

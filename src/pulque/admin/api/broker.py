"""``/brokers`` and ``/clients``: who serves, who uses them, and what they may take."""

import functools

from fastapi import APIRouter

from pulque.admin.cluster import KnownServer, WatchingClient
from pulque.admin.context import Context, instant
from pulque.admin.leadership_handover import hand_over
from pulque.admin.models.cluster import (
    BrokerDetail,
    BrokerPage,
    BrokerRow,
    ClientPage,
    ClientRow,
    ClientSubscription,
    Draining,
    HandOver,
    ReadOnly,
)
from pulque.admin.models.names import ServerInPath
from pulque.admin.models.pagination import (
    Cursor,
    Limit,
    Unreachable,
    cut,
    read_cursor,
    write_cursor,
)
from pulque.client.connection.url import Address
from pulque.client.inspecting.broker_status import report_of
from pulque.errors import RemoteProtocolError, UnavailableError, UnsupportedError
from pulque.wire.clients import Clients, ClientsListed, ConnectedClient
from pulque.wire.requests import Status
from pulque.wire.responses import Response

__all__ = ["BrokersApi"]

_META = ""
"""Sorts the clients of the meta server before those of all brokers."""
_NO_CONTENT = 204


class BrokersApi:
    """Answers for servers and their clients."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cluster = context.cluster
        self.router = router = APIRouter(tags=["brokers"])
        router.get("/brokers", summary="List brokers")(self.page)
        router.get("/brokers/{name}", summary="Show a broker")(self.show)
        router.put("/brokers/{name}/read-only", summary="Refuse sends")(self.mark)
        router.put("/brokers/{name}/drain", summary="Empty a broker")(self.drain)
        router.post("/brokers/{name}/lead", summary="Hand leadership over")(self.lead)
        router.delete("/brokers/{name}", summary="Remove a broker", status_code=_NO_CONTENT)(
            self.remove
        )
        router.get("/clients", summary="List clients", tags=["clients"])(self.clients)

    async def page(self, cursor: Cursor = None, limit: Limit = 100) -> BrokerPage:
        """Return the servers that registered themselves, in the order of their names."""
        after = read_cursor(cursor, (str,))
        rows = [_row(server) for server in await self._cluster.servers()]
        some, following = cut(rows, lambda row: (row.name,), after, limit)
        return BrokerPage(items=some, next=following)

    async def show(self, name: ServerInPath) -> BrokerDetail:
        """Return one server, and what it says of itself if it answers."""
        server = await self._context.server(name)
        status: dict[str, int | float | str | bool | None] = {}
        try:
            report = await self._context.brokers.ask(server, Status(), report_of)
            status = {
                key: value
                for key, value in report.items()
                if isinstance(value, int | float | str) or value is None
            }
        except (UnavailableError, UnsupportedError):
            pass  # the row says whether it lives
        return BrokerDetail(
            **_row(server).model_dump(),
            incarnation=server.incarnation,
            lag=_count(status.get("messages_left")),
            status=status,
        )

    async def mark(self, name: ServerInPath, mark: ReadOnly) -> BrokerRow:
        """Have a broker take no sends, or take them again; consumption goes on."""
        return _row(await self._cluster.mark_server(name, is_read_only=mark.read_only))

    async def drain(self, name: ServerInPath, drain: Draining) -> BrokerRow:
        """Have a broker take no sends until it is empty; then it can be stopped and removed."""
        return _row(await self._cluster.mark_server(name, is_draining=drain.draining))

    async def lead(self, name: ServerInPath, _: HandOver) -> BrokerRow:
        """Have the leader of a broker's group hand over to it, once it has all; sends wait."""
        return _row(await hand_over(self._context, name))

    async def remove(self, name: ServerInPath) -> None:
        """Forget a server that is stopped, not one that lives; its partitions stay known."""
        await self._cluster.remove_server(name)

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


def _row(server: KnownServer) -> BrokerRow:
    return BrokerRow(
        name=server.name,
        broker_group=server.broker_group,
        role=server.role.name.lower(),
        address=str(Address(server.host, server.port)),
        state=server.state,
        silent_seconds=None if server.silent_ms is None else server.silent_ms / 1000,
        read_only=server.is_read_only,
        draining=server.is_draining,
        partitions=server.partitions,
        standing=server.standing,
        epoch=server.epoch,
        in_sync=server.is_in_sync,
    )


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


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None

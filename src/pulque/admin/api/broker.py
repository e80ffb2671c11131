"""``/brokers``: who serves, and what they may take."""

from fastapi import APIRouter

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context
from pulque.admin.leadership_handover import hand_over
from pulque.admin.models.broker import BrokerDetail, BrokerPage, BrokerRow, Draining, HandOver
from pulque.admin.models.names import ServerInPath
from pulque.admin.models.pagination import (
    Cursor,
    Limit,
    cut,
    read_cursor,
)
from pulque.admin.models.subject import ReadOnly
from pulque.client.connection.url import Address
from pulque.client.inspecting.broker_status import report_of
from pulque.errors import UnavailableError, UnsupportedError
from pulque.wire.requests import Status

__all__ = ["BrokersApi"]

_NO_CONTENT = 204


class BrokersApi:
    """Answers for brokers and delay servers."""

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


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None

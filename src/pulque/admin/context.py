"""What every part of the API works with: the directory, the brokers, a clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.cluster import Cluster, KnownServer
from pulque.admin.group_rates import Rates
from pulque.clock import Clock
from pulque.errors import UnknownServerError
from pulque.model.routes import Role

__all__ = ["Context", "instant"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class Context:
    """Handed to every part of the API."""

    cluster: Cluster
    brokers: BrokerRequests
    clock: Clock
    rates: Rates = field(default_factory=Rates)

    async def serving(self, broker_group: str | None = None) -> Sequence[KnownServer]:
        """Return the brokers that serve messages; with a name, those of that broker group.

        Followers have the same as their leader, and would not say.

        Raises:
            UnknownServerError: There is no such broker group.
        """
        servers = [
            server
            for server in await self.cluster.servers()
            if server.role is Role.BROKER and server.standing != "follower"
        ]
        if broker_group is None:
            return servers
        found = [server for server in servers if server.broker_group == broker_group]
        if not found:
            raise UnknownServerError(f"there is no broker group {broker_group!a}")
        return found

    async def server(self, name: str) -> KnownServer:
        """Return one server.

        Raises:
            UnknownServerError: There is none of that name.
        """
        for server in await self.cluster.servers():
            if server.name == name:
                return server
        raise UnknownServerError(f"there is no server {name!a}")


def instant(at_ms: int) -> datetime:
    """Return an instant; what no calendar has is the nearest that it has."""
    return _EPOCH + timedelta(milliseconds=min(max(at_ms, 0), _LAST_MS))

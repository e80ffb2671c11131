"""A meta server in the test's own event loop, on a SQLite file and any free port."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pulque.clock import Clock
from pulque.meta.config import MetaSettings
from pulque.meta.server import MetaServer
from pulque.model.cluster import ServerState
from pulque.model.routes import Role, RouteKind
from pulque.model.routes import Route as RouteOf
from pulque.testing.raw import RawConnection
from pulque.wire.leadership import Lead, Led
from pulque.wire.registration import Register, Registered
from pulque.wire.requests import Route
from pulque.wire.responses import Routed

__all__ = [
    "RunningMeta",
    "Start",
    "broker",
    "eventually",
    "follow",
    "lead",
    "leading",
    "register",
    "route",
]


class RunningMeta:
    """A meta server that serves, and the connections to it."""

    def __init__(
        self, directory: Path, sections: dict[str, dict[str, Any]], clock: Clock | None = None
    ) -> None:
        self.directory = directory
        # A busy machine is not a database that is away.
        database = {"refresh": "20ms", "timeout": "60s", **sections.get("database", {})}
        self.settings = MetaSettings.model_validate(
            {
                "listen": {"port": 0},
                "storage": {"directory": str(directory)},
                "admin": {"enabled": False},
                **sections,
                "database": database,
            }
        )
        self.server = MetaServer(self.settings, clock)
        self.connections: list[RawConnection] = []

    async def connect(self) -> RawConnection:
        raw = await RawConnection.open(self.server.url)
        self.connections.append(raw)
        return raw

    async def close(self) -> None:
        for raw in self.connections:
            raw.close()
        await self.server.close()


Start = Callable[..., Awaitable[RunningMeta]]


def broker(name: str, /, **fields: Any) -> Register:
    """Return the registration of a broker."""
    values: dict[str, Any] = {
        "cluster": "",
        "name": name,
        "broker_group": name,
        "role": Role.BROKER,
        "host": "127.0.0.1",
        "port": 7450,
        "directory": f"directory-of-{name}",
        "incarnation": 1,
        "now_ms": time.time_ns() // 1_000_000,
        "state": ServerState.READY,
        "partitions": 3,
        "log_bytes": 1000,
    }
    return Register(**(values | fields))


async def register(raw: RawConnection, *names: str, **fields: Any) -> None:
    for name in names:
        await raw.ask(broker(name, **fields), Registered)


def lead(name: str, /, **fields: Any) -> Lead:
    """Return the question of a broker of group ``g`` who leads; it does not wait."""
    values: dict[str, Any] = {
        "broker_group": "g",
        "name": name,
        "directory": f"directory-of-{name}",
        "token": f"token-of-{name}",
        "version": 0,
        "message_end": 0,
        "min_in_sync": 2,
        "is_fit": True,
        "wait_ms": 0,
    }
    return Lead(**(values | fields))


async def leading(raw: RawConnection, name: str, /, **fields: Any) -> Led:
    """Have a broker ask who leads."""
    return await raw.ask(lead(name, **fields), Led)


async def follow(raw: RawConnection, *names: str, **fields: Any) -> None:
    """Have brokers of group ``g`` register as followers."""
    values: dict[str, Any] = {"broker_group": "g", "state": ServerState.FOLLOWING}
    await register(raw, *names, **(values | fields))


async def route(
    raw: RawConnection, subject: str, group: str = "", kind: RouteKind = RouteKind.REALTIME
) -> RouteOf:
    return (await raw.ask(Route(subject, group, kind), Routed)).route


async def eventually(check: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: It does not hold within the limit.
    """
    async with asyncio.timeout(limit_s):
        while not await check():  # noqa: ASYNC110  # there is nobody to set an event
            await asyncio.sleep(0.01)

"""A broker in the test's own event loop, on a data directory of its own and any free port."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.clock import Clock
from pulque.storage.files import DataDirectory
from pulque.testing.raw import RawConnection
from tests.unit.broker.disks import CountingDirectory

__all__ = ["Running", "Start", "eventually", "numbered"]


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Return bodies that say their number."""
    return [str(number).encode() for number in range(start, start + count)]


async def eventually(check: Callable[[], Awaitable[bool]], limit_s: float = 10.0) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: It does not hold within the limit.
    """
    async with asyncio.timeout(limit_s):
        while not await check():  # noqa: ASYNC110  # there is nobody to set an event
            await asyncio.sleep(0.005)


class Running:
    """A broker that serves, and the connections to it."""

    def __init__(
        self,
        directory: Path,
        sections: dict[str, dict[str, Any]],
        clock: Clock | None,
        files: DataDirectory | None,
    ) -> None:
        self.directory = directory
        self.sections = sections
        self.clock = clock
        self.files: DataDirectory = files or CountingDirectory(directory)
        self.connections: list[RawConnection] = []
        storage = {"directory": str(directory), "reserve": "1MiB", **sections.get("storage", {})}
        self.settings = BrokerSettings.model_validate(
            {"listen": {"port": 0}, **sections, "storage": storage}
        )
        self.broker = Broker(self.settings, clock, self.files)
        self.is_closed = True

    async def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        await self.broker.start()
        self.is_closed = False

    async def connect(
        self, *, is_greeting: bool = True, patience_s: float = 10.0
    ) -> RawConnection:
        raw = await RawConnection.open(
            self.broker.url, is_greeting=is_greeting, patience_s=patience_s
        )
        self.connections.append(raw)
        return raw

    async def close(self) -> None:
        """Stop as on SIGTERM."""
        for raw in self.connections:
            raw.close()
        if not self.is_closed:
            self.is_closed = True
            await self.broker.close()

    async def restarted(self, files: DataDirectory | None = None) -> "Running":
        """Stop, and start again on the same directory."""
        await self.close()
        again = Running(self.directory, self.sections, self.clock, files)
        await again.start()
        return again

    def as_if_killed(self, name: str) -> Path:
        """Return a copy of the data directory, as ``kill -9`` would leave it now."""
        copy = self.directory.with_name(name)
        shutil.copytree(self.directory, copy, ignore=shutil.ignore_patterns("lock"))
        return copy

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints that are kept."""
        return sorted(path.name for path in self.directory.glob("checkpoints/*.checkpoint"))

    async def house_kept(self) -> None:
        """Wait until housekeeping had a whole turn."""
        assert isinstance(self.files, CountingDirectory)
        files, before = self.files, self.files.looks

        async def has_looked_twice() -> bool:
            return files.looks >= before + 2

        await eventually(has_looked_twice)


Start = Callable[..., Awaitable[Running]]
"""The fixture ``start``."""

"""Meta servers that end with their test."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pulque.clock import Clock
from pulque.testing.raw import RawConnection
from tests.unit.meta.running import RunningMeta, Start


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start meta servers; ``start(subjects={"create": "beforehand"}, clock=…)``."""
    started: list[RunningMeta] = []

    async def start_one(
        directory: Path | None = None,
        *,
        clock: Clock | None = None,
        **sections: dict[str, Any],
    ) -> RunningMeta:
        running = RunningMeta(directory or tmp_path / "meta", sections, clock)
        started.append(running)
        await running.server.start()
        return running

    yield start_one
    for running in reversed(started):
        await running.close()


@pytest.fixture
async def running(start: Start) -> RunningMeta:
    """A meta server with settings as they come."""
    return await start()


@pytest.fixture
async def raw(running: RunningMeta) -> RawConnection:
    """A connection to it."""
    return await running.connect()

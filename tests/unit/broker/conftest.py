"""Brokers that end with their test."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pulque.clock import Clock
from pulque.storage.files import DataDirectory
from pulque.testing.raw import RawConnection
from tests.unit.broker.running import Running, Start


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start brokers; ``start(storage={"segment_size": "64KiB"}, clock=…)``."""
    started: list[Running] = []

    async def start_one(
        directory: Path | None = None,
        *,
        clock: Clock | None = None,
        files: DataDirectory | None = None,
        **sections: dict[str, Any],
    ) -> Running:
        running = Running(directory or tmp_path / "data", sections, clock, files)
        started.append(running)
        await running.start()
        return running

    yield start_one
    for running in reversed(started):
        await running.close()


@pytest.fixture
async def running(start: Start) -> Running:
    """A broker with settings as they come."""
    return await start()


@pytest.fixture
async def raw(running: Running) -> RawConnection:
    """A connection to it."""
    return await running.connect()

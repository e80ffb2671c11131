"""Delay servers that end with their test."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pulque.storage.files import DataDirectory
from pulque.testing.clock import ManualClock
from tests.unit.delay.running import FakeBrokers, RunningDelay, StartDelay


@pytest.fixture
def clock() -> ManualClock:
    """Ten past nine, on the sixteenth of November 2026."""
    return ManualClock(1_794_820_200_000)


@pytest.fixture
def brokers(clock: ManualClock) -> FakeBrokers:
    return FakeBrokers(clock)


@pytest.fixture
async def start_delay(
    tmp_path: Path, clock: ManualClock, brokers: FakeBrokers
) -> AsyncIterator[StartDelay]:
    """Start delay servers; ``start_delay(schedule={"tick": "5m"}, files=…)``."""
    started: list[RunningDelay] = []

    async def start_one(
        *, files: DataDirectory | None = None, **sections: dict[str, Any]
    ) -> RunningDelay:
        for before in started:
            await before.close()
        running = RunningDelay(tmp_path / "delay", clock, brokers, files, sections)
        started.append(running)
        await running.start()
        return running

    yield start_one
    for running in started:
        await running.close()

"""A fake broker, an application on it, and what it takes to run one inside a test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import pulque
from tests.unit.client.fake_broker import LIMIT, FakeBroker


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def send(broker: FakeBroker, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Send bodies to a subject."""
    with pulque.connect(broker.url, name="sends", timeout=5, state_dir=tmp_path) as client:

        def send_all(*bodies: bytes, subject: str = "orders") -> None:
            client.send_many(subject, bodies)

        yield send_all


@pytest.fixture
def app(broker: FakeBroker, tmp_path: Path) -> pulque.App:
    return pulque.App(broker.url, name="test", timeout=5, grace=5, state_dir=tmp_path)


@asynccontextmanager
async def running(app: pulque.App) -> AsyncIterator["asyncio.Task[None]"]:
    """Serve until the block ends, then stop politely; an error of ``serve`` is raised."""
    task = asyncio.create_task(app.serve())
    try:
        yield task
    finally:
        app.stop()
        async with asyncio.timeout(LIMIT):
            await task


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until a condition holds; fail after the limit."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  # another thread makes it true
            await asyncio.sleep(0.005)

"""A server that cannot start leaves nothing behind: no thread, no task, no lock."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.delay.config import DelaySettings
from pulque.delay.server import DelayServer
from pulque.errors import ConfigError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


def ours() -> set[threading.Thread]:
    """Return the threads of servers and clients; the event loop has others."""
    return {each for each in threading.enumerate() if each.name.startswith("pulque-")}


@pytest.mark.parametrize("kind", ["broker", "delay server"])
async def test_a_server_whose_port_is_taken(kind: str, tmp_path: Path, taken_port: int) -> None:
    def server(port: int) -> Broker | DelayServer:
        storage = {"directory": str(tmp_path / "data"), "reserve": "1MiB"}
        sections = {"storage": storage, "listen": {"port": port}}
        if kind == "broker":
            return Broker(BrokerSettings.model_validate(sections))
        return DelayServer(DelaySettings.model_validate(sections))

    threads, tasks = ours(), asyncio.all_tasks()
    with pytest.raises(ConfigError, match="cannot listen"):
        await server(taken_port).start()

    assert ours() == threads
    assert asyncio.all_tasks() == tasks
    again = server(0)
    await again.start()
    await again.close()

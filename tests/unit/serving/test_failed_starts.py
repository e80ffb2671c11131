"""A server that cannot start leaves nothing behind: no thread, no task, no lock, no open file."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.replicated_server import ReplicatedBroker
from pulque.broker.server import Broker
from pulque.delay.config import DelaySettings
from pulque.delay.server import DelayServer
from pulque.errors import ConfigError, DataDirectoryError

KINDS = ["broker", "broker with followers", "delay server"]
NOBODY = "127.0.0.1:1"
"""Where no meta server listens: servers start all the same."""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield int(taken.getsockname()[1])


def a_server(kind: str, directory: Path, port: int = 0) -> Broker | ReplicatedBroker | DelayServer:
    sections = {
        "storage": {"directory": str(directory), "reserve": "1MiB"},
        "listen": {"port": port},
        "cluster": {"meta": [NOBODY]},
    }
    if kind == "broker":
        return Broker(BrokerSettings.model_validate(sections))
    if kind == "delay server":
        return DelayServer(DelaySettings.model_validate(sections))
    return ReplicatedBroker(
        BrokerSettings.model_validate({**sections, "replication": {"copies": 2}})
    )


def ours() -> set[threading.Thread]:
    """Return the threads of servers and clients; the event loop has others."""
    return {each for each in threading.enumerate() if each.name.startswith("pulque-")}


def open_files(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [each for each in found if each.startswith(str(directory))]


async def start_and_close(kind: str, directory: Path) -> None:
    server = a_server(kind, directory)
    await server.start()
    await asyncio.sleep(0)  # one turn of the loop, in which all of its tasks begin
    await server.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_whose_port_is_taken(kind: str, tmp_path: Path, taken_port: int) -> None:
    threads, tasks = ours(), asyncio.all_tasks()
    server = a_server(kind, tmp_path, taken_port)
    with pytest.raises(ConfigError, match="cannot listen"):
        await server.start()

    assert ours() == threads
    assert asyncio.all_tasks() == tasks
    assert open_files(tmp_path) == []
    await start_and_close(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_whose_directory_holds_something_else(kind: str, tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.touch()
    threads, tasks = ours(), asyncio.all_tasks()
    server = a_server(kind, tmp_path)
    with pytest.raises(DataDirectoryError, match="choose an empty one"):
        await server.start()

    assert ours() == threads
    assert asyncio.all_tasks() == tasks
    assert open_files(tmp_path) == []
    other.unlink()
    await start_and_close(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_whose_note_of_its_cluster_is_damaged(kind: str, tmp_path: Path) -> None:
    await start_and_close(kind, tmp_path)
    note = tmp_path / "cluster.json"
    note.write_text("{")
    threads, tasks = ours(), asyncio.all_tasks()
    server = a_server(kind, tmp_path)
    with pytest.raises(DataDirectoryError, match=r"cluster\.json cannot be read"):
        await server.start()

    assert ours() == threads
    assert asyncio.all_tasks() == tasks
    assert open_files(tmp_path) == []
    note.unlink()
    await start_and_close(kind, tmp_path)

"""Redis Streams: an append-only file synced every second, a consumer group with acks."""

from __future__ import annotations

from importlib.metadata import version as package_version
from pathlib import Path

from bench.peers.install import MissingError, debian_package, python_clients
from bench.peers.peer import Clients
from bench.peers.server import Server, free_port, output_of

__all__ = ["RedisStreams"]

_PROGRAM = "/usr/bin/redis-server"


class RedisStreams:
    """Debian's Redis server with the redis-py client and its C parser."""

    name = "Redis Streams"
    rate_hint = 50_000

    def __init__(self) -> None:
        self._server: Server | None = None

    def available(self) -> str | None:
        """Install the server and the client."""
        try:
            debian_package("redis-server", _PROGRAM)
            python_clients("redis", "hiredis")
        except MissingError as missing:
            return str(missing)
        return None

    def version(self) -> str:
        """Of the server and of the client."""
        server = output_of([_PROGRAM, "--version"]).split("v=")[1].split()[0]
        return f"redis {server}, redis-py {package_version('redis')}"

    def start(self, directory: Path) -> Clients:
        """Start it on a free loopback port."""
        from bench.peers.redis_clients import RedisClients

        port = free_port()
        options = {
            "--bind": "127.0.0.1",
            "--port": str(port),
            "--dir": str(directory),
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--save": "",
        }
        command = [_PROGRAM, *(word for option in options.items() for word in option)]
        self._server = Server(command, log=directory / "redis.log")
        self._server.wait_for_port(port)
        return RedisClients(port)

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def pids(self) -> list[int]:
        """The one process."""
        return [] if self._server is None else [self._server.pid]

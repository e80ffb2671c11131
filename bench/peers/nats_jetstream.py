"""NATS JetStream: a stream in files, a durable pull consumer with acks."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version as package_version
from pathlib import Path

from bench.peers.install import MissingError, python_clients
from bench.peers.peer import Clients
from bench.peers.server import Server, free_port, output_of

__all__ = ["NatsJetStream"]


class NatsJetStream:
    """The newest NATS server of the package index, with the nats-py client."""

    name = "NATS JetStream"
    rate_hint = 20_000

    def __init__(self) -> None:
        self._server: Server | None = None

    def available(self) -> str | None:
        """Install the server and the client, both from the package index."""
        try:
            python_clients("nats")
        except MissingError as missing:
            return str(missing)
        return None if _program() else "nats-server is not beside this Python"

    def version(self) -> str:
        """Of the server and of the client."""
        server = output_of([_program() or "nats-server", "--version"]).rpartition("v")[2]
        return f"nats-server {server}, nats-py {package_version('nats-py')}"

    def start(self, directory: Path) -> Clients:
        """Start it on a free loopback port."""
        from bench.peers.nats_clients import NatsClients

        port = free_port()
        config = directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: {json.dumps(str(directory))} }}\n"
        )
        command = [_program() or "nats-server", "-c", str(config)]
        self._server = Server(command, log=directory / "nats.log")
        self._server.wait_for_port(port)
        return NatsClients(port)

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def pids(self) -> list[int]:
        """The one process."""
        return [] if self._server is None else [self._server.pid]


def _program() -> str | None:
    """The server installed in this environment, else one on the path."""
    return shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which(
        "nats-server"
    )

"""RabbitMQ: a durable queue, persistent messages, confirms to producers, acks by consumers."""

from __future__ import annotations

from importlib.metadata import version as package_version
from pathlib import Path
from typing import Literal

from bench.peers.install import MissingError, debian_package, python_clients
from bench.peers.peer import Clients
from bench.peers.server import Server, free_port

__all__ = ["RabbitMQ"]

_LIBRARY = Path("/usr/lib/rabbitmq/lib")
_PORT_MAPPER = "/usr/bin/epmd"


class RabbitMQ:
    """Debian's RabbitMQ with the pika client, with either kind of durable queue."""

    def __init__(self, kind: Literal["quorum", "classic"]) -> None:
        self.name = f"RabbitMQ ({kind})"
        self.rate_hint = 15_000
        self._kind = kind
        self._servers: list[Server] = []

    def available(self) -> str | None:
        """Install the server and the client."""
        try:
            debian_package("rabbitmq-server", "/usr/sbin/rabbitmq-server")
            python_clients("pika")
        except MissingError as missing:
            return str(missing)
        return None

    def version(self) -> str:
        """Of the server and of the client."""
        return f"rabbitmq {_home().name.rpartition('-')[2]}, pika {package_version('pika')}"

    def start(self, directory: Path) -> Clients:
        """Start it on a free loopback port, with a port mapper of its own."""
        from bench.peers.rabbitmq_clients import RabbitClients

        port, mapper_port = free_port(), free_port()
        mapper = Server(
            [_PORT_MAPPER, "-port", str(mapper_port), "-address", "127.0.0.1"],
            log=directory / "epmd.log",
        )
        self._servers.append(mapper)
        mapper.wait_for_port(mapper_port)
        broker = Server(
            # Not the one on the path, which changes to another user.
            [str(_home() / "sbin" / "rabbitmq-server")],
            log=directory / "rabbitmq.log",
            environment=_environment(directory, port, mapper_port),
        )
        self._servers.append(broker)
        broker.wait_for_port(port)
        return RabbitClients(port, self._kind)

    def stop(self) -> None:
        """End the broker, then its port mapper."""
        while self._servers:
            self._servers.pop().stop()

    def pids(self) -> list[int]:
        """The broker and its port mapper."""
        return [server.pid for server in self._servers]


def _home() -> Path:
    return max(_LIBRARY.glob("rabbitmq_server-*"))


def _environment(directory: Path, port: int, mapper_port: int) -> dict[str, str]:
    config = directory / "rabbitmq.conf"
    config.write_text("")
    plugins = directory / "enabled_plugins"
    plugins.write_text("[].\n")
    return {
        "HOME": str(directory),  # holds the Erlang cookie
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(mapper_port),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        # The start script then becomes the server, so that signals and figures are the server's.
        "RUNNING_UNDER_SYSTEMD": "true",
    }

"""Apache Kafka 4: one node that is broker and controller, its jars resolved by Maven."""

from __future__ import annotations

import subprocess
from importlib.metadata import version as package_version
from pathlib import Path

from bench.peers.install import MissingError, maven_jars, python_clients
from bench.peers.peer import Clients
from bench.peers.server import Server, ServerFailedError, free_port

__all__ = ["Kafka"]

_VERSION = "4.3.1"
_COORDINATES = ("org.apache.kafka", "kafka_2.13", _VERSION)
_JARS = Path(__file__).parents[2] / ".bench" / f"kafka-{_VERSION}"
_CLUSTER_ID = "cHVscXVlLWJlbmNoLTE2Yg"  # any sixteen bytes in base 64
# What Kafka's own start script asks of Java.
_JAVA = ["java", "-server", "-Xms1G", "-Xmx1G", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
_JAVA += ["-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"]

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
log.dirs={directory}/logs
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""


class Kafka:
    """A current Kafka with the confluent-kafka client."""

    name = "Kafka"
    rate_hint = 300_000

    def __init__(self) -> None:
        self._server: Server | None = None
        self._jars: list[Path] = []

    def available(self) -> str | None:
        """Resolve the jars and install the client."""
        try:
            python_clients("confluent_kafka")
            self._jars = maven_jars(_COORDINATES, _JARS)
        except MissingError as missing:
            return str(missing)
        return None

    def version(self) -> str:
        """Of the server and of the client."""
        return f"kafka {_VERSION}, confluent-kafka {package_version('confluent-kafka')}"

    def start(self, directory: Path) -> Clients:
        """Format its storage, and start it on free loopback ports."""
        from bench.peers.kafka_clients import KafkaClients

        port, controller_port = free_port(), free_port()
        properties = directory / "server.properties"
        properties.write_text(
            _PROPERTIES.format(port=port, controller_port=controller_port, directory=directory)
        )
        self._format(properties)
        command = self._java("kafka.Kafka", str(properties))
        self._server = Server(command, log=directory / "kafka.log")
        self._server.wait_for_port(port)
        clients = KafkaClients(port)
        clients.wait_until_ready()
        return clients

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def pids(self) -> list[int]:
        """The one process."""
        return [] if self._server is None else [self._server.pid]

    def _format(self, properties: Path) -> None:
        words = [
            "format",
            "--standalone",
            "--cluster-id",
            _CLUSTER_ID,
            "--config",
            str(properties),
        ]
        done = subprocess.run(
            self._java("kafka.tools.StorageTool", *words),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode != 0:
            raise ServerFailedError(f"storage was not formatted: {done.stdout}{done.stderr}")

    def _java(self, *words: str) -> list[str]:
        return [*_JAVA, "-cp", ":".join(str(jar) for jar in self._jars), *words]

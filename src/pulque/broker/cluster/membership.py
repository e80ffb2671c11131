"""What ties a broker to its cluster: what may be sent, and whom to ask. Alone, it asks nobody."""

from dataclasses import dataclass
from typing import Any

from pulque.broker.cluster.meta_relay import Relay
from pulque.broker.cluster.registration import BrokerRegistration
from pulque.broker.config import BrokerSettings
from pulque.broker.receiving.admission import Gate
from pulque.client.connection.url import Address, parse_address
from pulque.errors import StorageError
from pulque.model.routes import Role
from pulque.model.standing import Standing
from pulque.serving.metalink import Describe
from pulque.storage.directory.cluster_membership import read_standing, write_standing
from pulque.storage.engine import Engine
from pulque.storage.files import FileSystem
from pulque.wire.registration import Register, ServerState

__all__ = ["ClusterSide", "advertised", "join_cluster", "register_of"]


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """One of each."""

    broker_group: str
    """Whose partitions are here."""
    gate: Gate
    registration: BrokerRegistration | None = None
    """None for a broker that stands alone."""
    relay: Relay | None = None
    """Likewise."""

    async def close(self) -> None:
        """Leave the cluster for now."""
        if self.relay is not None:
            await self.relay.close()
        if self.registration is not None:
            await self.registration.close()


def join_cluster(
    settings: BrokerSettings, files: FileSystem, describe: Describe, log: Any
) -> ClusterSide:
    """Make what ties a broker to its cluster, as it stood there at the last word.

    Args:
        settings: The broker's.
        files: Its data directory.
        describe: What it says to a meta server about itself.
        log: Where it says what happens.

    Raises:
        DataDirectoryError: What is written down about the cluster cannot be read.
    """
    addresses = settings.cluster.meta_addresses
    allowed = settings.limits.allowed_subjects
    if not addresses:
        return ClusterSide(settings.broker_group, Gate(settings.name, allowed))

    def changed(standing: Standing) -> None:
        log.info(
            "standing_changed",
            cluster=standing.cluster,
            is_read_only=standing.is_read_only,
            is_draining=standing.is_draining,
            may_create=standing.may_create,
            read_only_subjects=len(standing.read_only),
        )
        try:
            write_standing(files, standing)
        except StorageError as error:
            # It holds all the same; only a restart without a meta server would forget it.
            log.warning("standing_not_kept", reason=str(error))

    gate = Gate(settings.name, allowed, read_standing(files), changed)
    registration = BrokerRegistration(
        addresses, name=settings.name, describe=describe, gate=gate, warn=log.warning
    )
    relay = Relay(registration.links, settings.name)
    return ClusterSide(settings.broker_group, gate, registration, relay)


def register_of(  # a broker has many sides
    settings: BrokerSettings,
    engine: Engine,
    address: Address,
    cluster: str,
    state: ServerState,
    now_ms: int,
) -> Register:
    """Return what a broker says to a meta server about itself."""
    if state is ServerState.READY and engine.is_full:
        state = ServerState.FULL
    return Register(
        cluster,
        settings.name,
        settings.broker_group,
        Role.BROKER,
        *address,
        engine.identity.id,
        engine.start_count,
        now_ms,
        state,
        len(engine.partitions.by_id),
        engine.end - engine.segments[0].base,
    )


def advertised(settings: BrokerSettings, host: str, port: int) -> Address:
    """Return where clients reach a broker that listens at an address."""
    told = settings.cluster.advertise
    return parse_address(told, default_port=port) if told else Address(host, port)

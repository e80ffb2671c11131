"""How a broker belongs to a cluster: what it hears about its standing goes to the gate."""

from collections.abc import Callable, Sequence

from pulque.broker.receiving.admission import Gate
from pulque.client.connection.url import Address
from pulque.model.standing import Standing
from pulque.serving.metalink import Describe
from pulque.serving.registration import Registration
from pulque.wire.registration import Registered

__all__ = ["BrokerRegistration"]


class BrokerRegistration(Registration):
    """Keeps a broker known to its cluster.

    Args:
        addresses: Where the meta servers listen.
        name: The broker's own name.
        describe: Returns what it says about itself.
        gate: What is told how the broker stands.
        warn: Logs an event with its fields.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        name: str,
        describe: Describe,
        gate: Gate,
        warn: Callable[..., None],
    ) -> None:
        self._gate = gate
        super().__init__(
            addresses, name=name, describe=describe, warn=warn, server="broker", role="broker"
        )

    def _heard(self, answer: Registered) -> None:
        known = self._gate.standing.cluster
        self._check_cluster(known, answer, remedy="give the broker an empty data directory")
        self._gate.update(
            Standing(
                cluster=answer.cluster,
                is_read_only=answer.is_read_only,
                is_draining=answer.is_draining,
                may_create=answer.may_create,
                read_only=frozenset(answer.read_only),
            )
        )

"""The brokers behind a URL, as the pipeline talks to them: a lone one, or all of a cluster.

The same partition may be at several brokers, and each counts its messages for itself. So a
partition of a cluster goes by the name ``broker-1/orders`` in offsets, ranges and manifests; that
of a lone broker is just ``orders``.
"""

import functools
import os
import secrets

from pulque.client.blocking.connection_pool import Calls
from pulque.client.connection.url import Address, addresses_of
from pulque.client.routing.targets import HOME, place_of, route_of
from pulque.errors import UnavailableError
from pulque.model.names import EVERYTHING, PartitionName
from pulque.model.routes import PartitionRoute, Route, RouteKind
from pulque.wire.requests import Route as AskRoute

__all__ = ["BrokersOfUrl", "held_name", "split_held"]

_CLIENT = "pulque-pipeline"
_GROUP = "pipeline"
"""Who looks says for whom; who asks for nobody wants to send, and creates the subject."""
_OWNED = frozenset("%#")


def held_name(broker_group: str, partition: str) -> PartitionName:
    """Return the name of a partition of a broker group; of a lone broker's, its own."""
    return PartitionName(f"{broker_group}/{partition}" if broker_group else partition)


def split_held(name: str) -> tuple[str, PartitionName]:
    """Return the broker group, empty for a lone broker, and the partition."""
    head, slash, tail = name.partition("/")
    # A partition of a broadcast consumer's own may hold a slash, behind what no group's name has.
    if not slash or not head or not _OWNED.isdisjoint(head):
        return HOME, PartitionName(name)
    return head, PartitionName(tail)


class BrokersOfUrl:
    """Connections to brokers, made when they are needed. Used by one thread.

    Args:
        url: Where a broker or meta servers listen; else ``$PULQUE_URL``, else this machine.
        timeout_s: How long a broker may be away, restarting for one.
    """

    def __init__(self, url: str | None, *, timeout_s: float) -> None:
        self._draw = secrets.SystemRandom().random
        self._timeout_s = timeout_s
        self._home = Calls(addresses_of(url, os.environ), client=_CLIENT, draw=self._draw)
        self._calls = {HOME: self._home}

    def at(self, broker_group: str) -> Calls:
        """Return the connections to a broker."""
        found = self._calls.get(broker_group)
        if found is None:
            # It may come back elsewhere: so it is looked up for every connection.
            address = functools.partial(self._address_of, broker_group)
            found = Calls(address, client=_CLIENT, draw=self._draw)
            self._calls[broker_group] = found
        return found

    def route(self, subject: str, *, is_for_sending: bool = False) -> Route:
        """Ask who serves a subject or a pattern."""
        request = AskRoute(subject, "" if is_for_sending else _GROUP, RouteKind.REALTIME)
        return self._home.ask(request, self._timeout_s, route_of)

    def placed(self, subject: str) -> tuple[PartitionRoute, ...] | None:
        """Return all partitions of a subject or a pattern, also those whose broker is away.

        None of a broker that answers for itself alone: it has what it has.
        """
        request = AskRoute(subject, _GROUP, RouteKind.PLACED)
        found = self._home.ask(request, self._timeout_s, route_of).partitions
        if not self._home.cluster:
            return None
        # Without an address: its broker is away, or it is the one that was asked.
        is_unclear = any(not each.host for each in found)
        return None if is_unclear and HOME in self.places(subject) else found

    def places(self, subject: str, *, with_absent: bool = False) -> list[str]:
        """Return who may have messages of a subject or a pattern now.

        Args:
            subject: Or a pattern.
            with_absent: Whether brokers count that are away; whoever asks them is told.
        """
        if with_absent and (placed := self.placed(subject)) is not None:
            return sorted({each.broker_group for each in placed})
        found = list(dict.fromkeys(map(place_of, self.route(subject).partitions)))
        return found or ([] if self._home.cluster else [HOME])

    def close(self) -> None:
        """Close all connections."""
        for calls in self._calls.values():
            calls.close()

    def _address_of(self, broker_group: str) -> Address:
        for each in self.route(EVERYTHING).partitions:
            if each.broker_group == broker_group and each.host:
                return Address(each.host, each.port)
        raise UnavailableError(f"no broker of broker group {broker_group} is there at present")

"""A cluster in memory: what a meta server knows and decides, without a database."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pulque.admin.cluster import (
    ClusterPolicies,
    KnownServer,
    PlacedPartition,
    PlacedSubject,
    Standing,
    WatchingClient,
)
from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    UnavailableError,
    UnknownServerError,
    UnknownSubjectError,
)
from pulque.model.leadership import Leadership
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.positions import Epoch
from pulque.model.routes import SLOTS, Role, Slots
from pulque.wire.leadership import HandedOver, HandOver
from pulque.wire.requests import Request
from pulque.wire.responses import Response
from tests.unit.client.fake_broker import FakeBroker

__all__ = ["FakeCluster", "FakeLeader", "led_group", "server"]


def server(name: str, url: str = "pulque://127.0.0.1:1", **others: object) -> KnownServer:
    """Return a broker that is a broker group by itself."""
    host, _, port = url.removeprefix("pulque://").rpartition(":")
    found = KnownServer(
        name=name,
        broker_group=name,
        role=Role.BROKER,
        host=host,
        port=int(port),
        state="ready",
        silent_ms=0,
        is_read_only=False,
        is_draining=False,
        incarnation=1,
        partitions=0,
    )
    return found._replace(**others)  # type: ignore[arg-type]


@dataclass
class FakeCluster:
    """Implements ``pulque.admin.cluster.Cluster``."""

    known: dict[str, KnownServer] = field(default_factory=dict)
    placed: dict[Subject, tuple[PlacedPartition, ...]] = field(default_factory=dict)
    marks: set[Pattern] = field(default_factory=set)
    orders: dict[Subject, OrderStrategy] = field(default_factory=dict)
    watching: list[WatchingClient] = field(default_factory=list)
    said: ClusterPolicies = field(default_factory=ClusterPolicies)
    is_away: bool = False
    id: str = "0123456789abcdef"

    async def check_ready(self) -> None:
        if self.is_away:
            raise UnavailableError("the database is away")

    async def servers(self) -> Sequence[KnownServer]:
        return list(self.known.values())

    async def mark_server(
        self, name: str, *, is_read_only: bool | None = None, is_draining: bool | None = None
    ) -> KnownServer:
        found = self._known(name)
        self.known[name] = found._replace(
            is_read_only=found.is_read_only if is_read_only is None else is_read_only,
            is_draining=found.is_draining if is_draining is None else is_draining,
        )
        return self.known[name]

    def elect(self, directory: str) -> KnownServer:
        """Have the broker with that data directory lead its group in the next epoch."""
        (found,) = (each for each in self.known.values() if each.directory == directory)
        for each in list(self.known.values()):
            if each.broker_group == found.broker_group:
                standing: Standing = "leader" if each.name == found.name else "follower"
                self.known[each.name] = each._replace(standing=standing, epoch=each.epoch + 1)
        return self.known[found.name]

    async def remove_server(self, name: str) -> None:
        if self._known(name).is_alive:
            raise NotAllowedError(f"server {name} lives: stop it first")
        del self.known[name]

    async def subjects(self, after: str = "", limit: int = 100) -> Sequence[PlacedSubject]:
        names = sorted(name for name in self.placed if name > after)[:limit]
        return [self._placed(name) for name in names]

    async def subject(self, name: Subject) -> PlacedSubject | None:
        return self._placed(name) if name in self.placed else None

    async def create_subject(
        self, name: Subject, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        for each in broker_groups:
            if each not in self.known:
                raise InvalidRequestError(f"there is no broker group {each}")
        if name not in self.placed:
            groups = list(broker_groups) or sorted(self.known)
            number = len(broker_groups) or self.said.spread
            self.placed[name] = self._places(name, number, groups)
        return self._placed(name)

    async def extend_subject(
        self, name: Subject, partitions: int, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        if name not in self.placed:
            raise UnknownSubjectError(f"there is no subject {name}")
        if partitions < len(self.placed[name]):
            raise NotAllowedError(f"{name} has {len(self.placed[name])} partitions already")
        groups = list(broker_groups) or sorted(self.known)
        self.placed[name] = self._places(name, partitions, groups)
        return self._placed(name)

    async def merge_subject(self, name: Subject, partitions: int) -> PlacedSubject:
        if name not in self.placed:
            raise UnknownSubjectError(f"there is no subject {name}")
        self.placed[name] = self._places(name, partitions, sorted(self.known))
        return self._placed(name)

    async def order_subject(self, name: Subject, order: OrderStrategy) -> PlacedSubject:
        if name not in self.placed:
            raise UnknownSubjectError(f"there is no subject {name}")
        self.orders[name] = order
        return self._placed(name)

    async def mark_subject(self, name: Pattern, *, is_read_only: bool) -> None:
        (self.marks.add if is_read_only else self.marks.discard)(name)

    async def read_only_marks(self) -> Sequence[Pattern]:
        return sorted(self.marks)

    async def clients(self, after: str = "", limit: int = 100) -> Sequence[WatchingClient]:
        return sorted(each for each in self.watching if each.client > after)[:limit]

    async def policies(self) -> ClusterPolicies:
        return self.said

    async def set_policies(self, policies: ClusterPolicies) -> ClusterPolicies:
        self.said = policies
        return policies

    def _known(self, name: str) -> KnownServer:
        if name not in self.known:
            raise UnknownServerError(f"there is no server {name}")
        return self.known[name]

    @staticmethod
    def _places(
        name: Subject, partitions: int, groups: Sequence[str]
    ) -> tuple[PlacedPartition, ...]:
        if not groups:
            raise UnavailableError("no broker takes messages now")
        bounds = [SLOTS * number // partitions for number in range(partitions + 1)]
        return tuple(
            PlacedPartition(
                PartitionName(name if number < len(groups) else f"{name}#{number}"),
                groups[number % len(groups)],
                Slots(bounds[number], bounds[number + 1]),
            )
            for number in range(partitions)
        )

    def _placed(self, name: Subject) -> PlacedSubject:
        order = self.orders.get(name, OrderStrategy.BEST_EFFORT)
        return PlacedSubject(name, Pattern(name) in self.marks, self.placed[name], order)


class FakeLeader(FakeBroker):
    """Leads broker group ``g`` of a cluster in memory, until it is told to hand over."""

    def __init__(self, of: FakeCluster) -> None:
        super().__init__()
        self._of = of

    @property
    def handed_to(self) -> list[str]:
        """The data directories that it was told to hand over to."""
        return [each.to for each in self.requests if isinstance(each, HandOver)]

    def _handle(self, request: Request, peer: socket.socket) -> Response:
        if not isinstance(request, HandOver):
            return super()._handle(request, peer)
        found = self._of.elect(request.to)
        row = Leadership("g", Epoch(found.epoch), 9, request.to, "token", (request.to,), 1)
        return HandedOver(row)


def led_group(url: str) -> dict[str, KnownServer]:
    """Return a group of three: ``l``, which is at an address, leads; ``late`` is not in sync."""
    led: dict[str, Any] = {"broker_group": "g", "epoch": 3, "min_in_sync": 2}
    followers = {"standing": "follower", "state": "following", **led}
    return {
        "f": server("f", is_in_sync=True, directory="directory-of-f", **followers),
        "l": server("l", url, standing="leader", is_in_sync=True, directory="of-l", **led),
        "late": server("late", is_in_sync=False, directory="directory-of-late", **followers),
    }

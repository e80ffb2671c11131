"""A broker group of fakes that have the same: one leads, the others follow, and a meta server."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from pulque.errors import NotLeaderError
from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.model.routes import PartitionRoute, Route
from pulque.wire import requests, responses
from tests.unit.client.fake_broker import FakeBroker

ANYBODY = (
    requests.Hello,
    requests.Status,
    requests.Heartbeat,
    requests.Route,
    requests.Watch,
    requests.Clients,
)
"""What a broker answers that does not lead."""


class FakeMeta(FakeBroker):
    """Knows who leads, and gives all partitions to whoever attends."""

    leader: FakeBroker
    version = 0
    order = OrderStrategy.STRICT
    allots = True
    """Whether whoever attends has the partitions; nobody has them otherwise."""

    def _handle(self, request: requests.Request, peer: socket.socket) -> responses.Response:
        if not isinstance(request, requests.Attend):
            return super()._handle(request, peer)
        with self._changed:
            self._changed.wait_for(
                lambda: self.version != request.version or self._is_closed, request.wait_ms / 1000
            )
        mine = Allotted("g", PartitionName(request.subject), "127.0.0.1", self.leader.port)
        return responses.Attended(
            ConsumeStrategy.EXCLUSIVE,
            self.order,
            self.version,
            30_000,
            200,
            (mine,) if request.is_online and self.allots else (),
        )


class FakeMember(FakeBroker):
    """A broker of the group, which grants any lock."""

    leads = False
    lock_ms = 30_000

    def _handle(self, request: requests.Request, peer: socket.socket) -> responses.Response:
        if not self.leads and not isinstance(request, ANYBODY):
            raise NotLeaderError(f"{self.name} does not lead")
        if isinstance(request, requests.Lock):
            return responses.Locked(1, self.lock_ms, "")
        if isinstance(request, requests.Unlock):
            return responses.Unlocked(True)
        return super()._handle(request, peer)


class FakeGroup:
    """``with FakeGroup() as group: connect(group.url)``; the first of its brokers leads."""

    def __init__(self, count: int = 2, *, lease_ms: int = 30_000) -> None:
        self.meta = FakeMeta()
        self.meta.name = "meta"
        self.meta.cluster = "fakes"
        self.members = [FakeMember(lease_ms=lease_ms) for _ in range(count)]
        for number, each in enumerate(self.members):
            each.name = f"broker-{number}"
            each.cluster = "fakes"
            # It was started more often than those that follow it as leaders.
            each.start = 10 - number
        self.following = set(range(count))
        self.order = OrderStrategy.BEST_EFFORT
        self._changing = threading.Lock()
        self._epoch = 0
        self._leader = 0
        self.lead(0)

    @property
    def url(self) -> str:
        return self.meta.url

    @property
    def leader(self) -> FakeMember:
        return self.members[self._leader]

    def lead(self, number: int) -> None:
        """Elect a broker, which has all that the last leader had."""
        self.depose()
        with self._changing:
            old, new = self.leader, self.members[number]
            new.partitions, new.pull_logs = old.partitions, old.pull_logs
            self._epoch += 1
            self._leader = number
            new.epoch, new.leads = self._epoch, True
            self.tell()

    def depose(self) -> None:
        """Have nobody lead."""
        self.leader.leads = False

    def tell(self) -> None:
        """Have routes say who leads and who follows, and whoever watches them hear of it."""
        self.meta.version += 1
        version, leader = self.meta.version, self._leader
        self.meta.leader = self.leader

        def route(subject: str, numbers: list[int]) -> Route:
            return Route(
                Pattern(subject),
                version,
                tuple(
                    PartitionRoute(
                        PartitionName(subject), "g", "127.0.0.1", self.members[each].port
                    )
                    for each in numbers
                ),
                self.order,
            )

        followers = sorted(self.following - {leader})
        self.meta.follower_routes = lambda subject: route(subject, followers)
        self.meta.change_routes(lambda subject: route(subject, [leader]))

    def take_back(self) -> None:
        """Have nobody own a partition any more, and whoever attends hear of it."""
        self.meta.allots = False
        self.tell()

    def kill(self, number: int) -> None:
        """Refuse connections, and cut those that there are."""
        self.members[number].stop_listening()
        self.members[number].drop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            for broker in (self.meta, *self.members):
                stack.callback(broker.close)

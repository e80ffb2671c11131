"""A few fake brokers, and a fake meta server that knows which of them serve a subject."""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import ALONE, PartitionRoute, Route, Slots
from tests.unit.client.fake_broker import FakeBroker


class FakeCluster:
    """``with FakeCluster(3) as cluster: connect(cluster.url)``."""

    def __init__(self, count: int, *, lease_ms: int = 30_000) -> None:
        self.meta = FakeBroker()
        self.meta.name = "meta"
        self.meta.cluster = "fakes"
        self.meta.max_message = 0
        self.brokers = [FakeBroker(lease_ms=lease_ms) for _ in range(count)]
        for number, broker in enumerate(self.brokers):
            broker.name = f"g{number}"
            broker.cluster = "fakes"
        self.version = 0
        self.serve(range(count))

    @property
    def url(self) -> str:
        return self.meta.url

    def serve(
        self,
        serving: Sequence[int],
        writable: Sequence[int] | None = None,
        alone: Sequence[int] = (),
    ) -> None:
        """Have every subject served by these brokers from now on."""
        self.version += 1
        version, share = self.version, 1024 // max(1, len(serving))
        takes = serving if writable is None else writable

        def route(subject: str) -> Route:
            return Route(
                Pattern(subject),
                version,
                tuple(
                    PartitionRoute(
                        PartitionName(subject),
                        f"g{number}",
                        "127.0.0.1",
                        self.brokers[number].port,
                        ALONE if number in alone else int(number in takes),
                        Slots(at * share, 1024 if at == len(serving) - 1 else (at + 1) * share),
                    )
                    for at, number in enumerate(serving)
                ),
            )

        self.meta.change_routes(route)

    def serve_strictly(self, number: int, slots: Slots) -> None:
        """Have every subject kept in strict order, of which one broker has these slots."""
        self.version += 1
        version, port = self.version, self.brokers[number].port

        def route(subject: str) -> Route:
            where = PartitionRoute(
                PartitionName(subject), f"g{number}", "127.0.0.1", port, 1, slots
            )
            return Route(Pattern(subject), version, (where,), order=OrderStrategy.STRICT)

        self.meta.change_routes(route)

    def kill(self, number: int) -> None:
        """Refuse connections, and cut those that there are."""
        self.brokers[number].stop_listening()
        self.brokers[number].drop_all()

    def revive(self, number: int) -> None:
        self.brokers[number].listen_again()

    def bodies(self, number: int, subject: str = "orders") -> int:
        """Return how many messages a broker stored."""
        return self.brokers[number].partition(subject).end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            for broker in (self.meta, *self.brokers):
                stack.callback(broker.close)

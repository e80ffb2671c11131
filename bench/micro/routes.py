"""Finding out where a message goes, with a route that is known: no question is asked."""

from __future__ import annotations

from collections.abc import Iterator

from bench.micro.timing import Row, cpu_us
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.model.names import PartitionName, Pattern
from pulque.model.routes import PartitionRoute, Route, Slots

__all__ = ["look_ups"]

_SUBJECTS = 10_000


def look_ups() -> Iterator[Row]:
    """Yield what a look-up costs; the aim is 5 µs."""
    for groups in (1, 2, 6):
        table = _table(groups)
        targets = table.targets
        yield Row(
            f"{groups} broker groups, without an order key",
            cpu_us(lambda targets=targets: targets["subject.77"].pick(None, 4, 1000.0)),  # type: ignore[misc]
        )
        yield Row(
            f"{groups} broker groups, with an order key",
            cpu_us(lambda targets=targets: targets["subject.77"].pick("customer 5", 4, 1000.0)),  # type: ignore[misc]
        )


def _table(groups: int) -> RouteTable:
    table = RouteTable()
    share = 1024 // groups
    for number in range(_SUBJECTS):
        name = f"subject.{number}"
        partitions = tuple(
            PartitionRoute(
                PartitionName(name),
                f"group-{at}",
                "127.0.0.1",
                7450 + at,
                slots=Slots(at * share, 1024 if at == groups - 1 else (at + 1) * share),
            )
            for at in range(groups)
        )
        table.take_in(RouteKey(name), Route(Pattern(name), 1, partitions))
    return table

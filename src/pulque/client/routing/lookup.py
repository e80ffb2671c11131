"""How clients look for the servers of a subject: what they ask for, and for how long; no I/O."""

from pulque.client.routing.route_table import RouteKey
from pulque.client.routing.targets import Delayed, Way
from pulque.errors import (
    NoDelayServerError,
    PulqueError,
    UnavailableError,
    UnknownSubjectError,
    UsageError,
)
from pulque.model.names import DEFAULT_LEVEL, EVERYTHING, PartitionName, level_of
from pulque.model.routes import PartitionRoute, Route, RouteKind
from pulque.wire.requests import Acks

__all__ = [
    "ASK_LIMIT",
    "DELAY_PATIENCE",
    "DELAY_SERVERS",
    "LOOKING",
    "NOBODY_WAIT",
    "NO_DELAY_SERVER",
    "STALE_PAUSE",
    "chosen",
    "nobody_takes",
]

STALE_PAUSE = 1.0
"""Routes that seem to be wrong are asked for again after so many seconds at the earliest."""
LOOKING = "looking"
"""As a group: to look at a subject must not create it, as a producer's question does."""
DELAY_SERVERS = RouteKey(EVERYTHING, LOOKING, RouteKind.DELAYED)
"""What is asked for to find all of them."""
NOBODY_WAIT = 0.2
DELAY_PATIENCE = 5.0
"""How long to wait for the first delay server, in seconds: many clusters have none."""
ASK_LIMIT = 2.0
NO_DELAY_SERVER = (
    "there is no delay server here: `pulque up` has one, and `pulque delay` adds one to a cluster"
)


def nobody_takes(way: Way, acks: int = Acks.DISK) -> PulqueError:
    """Return what to say when messages have nowhere to go."""
    if not isinstance(way, Delayed):
        if acks == Acks.REPLICA:
            return UnavailableError(
                f'no broker serves {way} at present that can keep acks "replica": the broker '
                "groups of it that have followers are away"
            )
        return UnavailableError(f"no broker serves {way} at present")
    return NoDelayServerError(f"a message of {way.subject} is due later, and {NO_DELAY_SERVER}")


def chosen(route: Route, broker: str | None, partition: str | None = None) -> list[PartitionRoute]:
    """Return where to look for the messages of a route, or of one broker group in it.

    Args:
        route: Who has the subject, in which partitions.
        broker: Only this broker group.
        partition: Only this one, once at each broker group, which may have several. Without a
            name, those that are for messages of the usual priority.

    Raises:
        UnknownSubjectError: Nobody has the subject.
        UsageError: The broker that is named does not.
    """
    if not route.partitions:
        raise UnknownSubjectError(f"no broker has a subject {route.subject}")
    found = [each for each in route.partitions if broker in {None, each.broker_group}]
    if not found:
        names = ", ".join(sorted({each.broker_group for each in route.partitions}))
        raise UsageError(f"broker group {broker!r} does not serve {route.subject}; {names} do")
    if partition is None:
        return [each for each in found if level_of(each.partition) == DEFAULT_LEVEL]
    by_group = {each.broker_group: each for each in found}
    return [each._replace(partition=PartitionName(partition)) for each in by_group.values()]

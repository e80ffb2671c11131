"""Subjects that are new to a broker of a cluster: a meta server says whether they belong here.

A broker that stands alone makes a partition for whatever is sent. One of a cluster first asks, as
a client with an old route, or with a wrong name, must not leave messages where no consumer looks
for them. That happens once for each subject; what is stored here already is never asked about.
"""

from collections.abc import Callable

from pulque.broker.receiving.admission import Gate
from pulque.clock import Clock
from pulque.errors import PulqueError, RejectedError, StaleRouteError
from pulque.model.names import PartitionName, Subject, subject_of
from pulque.model.routes import Route
from pulque.rules.admission import is_served

__all__ = ["AskRoute", "Decided", "Newcomers"]

AskRoute = Callable[[Subject, Callable[[Route | PulqueError], None]], None]
"""Asks a meta server who serves a subject."""
Decided = Callable[[PulqueError | None], None]
"""Told why a subject may not be sent to here, or None if it may."""

_REMEMBERED_MS = 1000
_MOST_REMEMBERED = 10_000


class Newcomers:
    """Decides about subjects that this broker has no partition of.

    Args:
        gate: Says whether a first send may create a subject.
        broker_group: Whose partitions are here.
        ask: How to ask; None for a broker that stands alone.
        clock: For how long a refusal is remembered.
    """

    def __init__(self, gate: Gate, broker_group: str, ask: AskRoute | None, clock: Clock) -> None:
        self.gate = gate
        """What may be sent at all."""
        self._broker_group = broker_group
        self._ask = ask
        self._clock = clock
        self._asking: dict[PartitionName, list[Decided]] = {}
        self._refused: dict[PartitionName, tuple[int, PulqueError]] = {}
        """Refusals of the last second, so that a flood of them reaches no meta server."""

    @property
    def must_ask(self) -> bool:
        """Whether a send to a new partition has to wait for an answer."""
        return self._ask is not None

    def decide(self, partition: PartitionName, decided: Decided) -> None:
        """Find out whether a partition may be made here; ``decided`` may be called at once."""
        refused_at_ms, refusal = self._refused.get(partition, (0, None))
        if refusal is not None:
            if self._clock.monotonic_ms() - refused_at_ms < _REMEMBERED_MS:
                decided(refusal)
                return
            del self._refused[partition]
        if self._ask is None:
            decided(None)
            return
        waiting = self._asking.setdefault(partition, [])
        waiting.append(decided)
        if len(waiting) == 1:
            self._ask(subject_of(partition), lambda found: self._answered(partition, found))

    def _answered(self, partition: PartitionName, found: Route | PulqueError) -> None:
        refusal = self._refusal(partition, found)
        if refusal is not None:
            if len(self._refused) >= _MOST_REMEMBERED:
                self._refused.clear()
            self._refused[partition] = self._clock.monotonic_ms(), refusal
        for decided in self._asking.pop(partition, ()):
            decided(refusal)

    def _refusal(self, partition: PartitionName, found: Route | PulqueError) -> PulqueError | None:
        if isinstance(found, RejectedError):
            return found
        if isinstance(found, PulqueError):
            # Nobody can tell. Whoever sends was given a route, so it was allowed then.
            if self.gate.standing.may_create:
                return None
            return StaleRouteError(
                f"no meta server can say now whether {partition} belongs here: {found}"
            )
        if is_served(found, partition, self._broker_group):
            return None
        return StaleRouteError(
            f"{partition} is not served by broker group {self._broker_group}: ask for the route "
            "again"
        )

"""Leases: how long a consumer may be silent before its deliveries go to others.

Time is the monotonic clock's. Leases do not survive a restart: every consumer with deliveries
gets a new full lease, as it could not reach a broker that was down.
"""

from pulque.model.names import ConsumerId, Group

__all__ = ["Leases"]


class Leases:
    """The last sign of life of each consumer."""

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self._seen_at_ms: dict[tuple[Group, ConsumerId], int] = {}

    def __len__(self) -> int:
        return len(self._seen_at_ms)

    def renew(self, group: Group, consumer: ConsumerId, now_ms: int) -> None:
        """Record a sign of life of a consumer."""
        self._seen_at_ms[group, consumer] = now_ms

    def silent_ms(self, group: Group, consumer: ConsumerId, now_ms: int) -> int | None:
        """Return how long a consumer was silent; None if it is unknown."""
        seen_at_ms = self._seen_at_ms.get((group, consumer))
        return None if seen_at_ms is None else now_ms - seen_at_ms

    def of_group(self, group: Group) -> list[ConsumerId]:
        """Return the consumers of a group that have a lease."""
        return [consumer for found, consumer in self._seen_at_ms if found == group]

    def end(self, group: Group, consumer: ConsumerId) -> None:
        """Record that a consumer left, or is lost."""
        self._seen_at_ms.pop((group, consumer), None)

    def expired(self, now_ms: int) -> list[tuple[Group, ConsumerId]]:
        """Return the consumers whose lease ran out."""
        return [key for key, seen in self._seen_at_ms.items() if now_ms - seen > self.lease_ms]

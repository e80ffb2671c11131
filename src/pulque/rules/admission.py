"""Which sends a broker refuses whatever their contents: by its settings and its standing."""

from collections.abc import Set as AbstractSet

from pulque.errors import NotAllowedError, PulqueError, ReadOnlyError
from pulque.model.names import PartitionName, Subject, patterns_of
from pulque.model.routes import Route
from pulque.model.standing import Standing

__all__ = ["broker_refusal", "is_restricted", "is_served", "subject_refusal"]


def is_restricted(standing: Standing, allowed: AbstractSet[str]) -> bool:
    """Return whether any send would be refused; if not, callers skip the other checks."""
    return bool(allowed or standing.is_read_only or standing.is_draining or standing.read_only)


def broker_refusal(broker: str, standing: Standing) -> PulqueError | None:
    """Return why a broker takes no new messages at all, or None if it does."""
    if standing.is_draining:
        return ReadOnlyError(
            f"broker {broker} is being drained: it takes no sends, and what it has can still be "
            "pulled and settled"
        )
    if standing.is_read_only:
        return ReadOnlyError(
            f"broker {broker} is read-only: it takes no sends, and what it has can still be "
            "pulled and settled"
        )
    return None


def subject_refusal(
    subject: Subject, standing: Standing, allowed: AbstractSet[str]
) -> PulqueError | None:
    """Return why no messages may be sent to a subject, or None if they may.

    Args:
        subject: The subject.
        standing: The broker's standing in its cluster.
        allowed: The subjects and patterns that the settings allow; empty for all.
    """
    if not allowed and not standing.read_only:
        return None
    patterns = patterns_of(subject)
    if allowed and allowed.isdisjoint(patterns):
        return NotAllowedError(
            f"subject {subject} may not be sent to here; limits.allowed_subjects allows "
            f"{', '.join(sorted(allowed)[:10])}"
        )
    if not standing.read_only.isdisjoint(patterns):
        return ReadOnlyError(
            f"subject {subject} is read-only: it takes no sends, and what it has can still be "
            "pulled and settled"
        )
    return None


def is_served(route: Route, partition: PartitionName, broker_group: str) -> bool:
    """Return whether a route assigns a partition to a broker group.

    The levels of a subject (``orders#p7``) belong to its plain partition.
    """
    plain = partition.partition("#p")[0]
    return any(
        each.broker_group == broker_group and each.partition in (partition, plain)
        for each in route.partitions
    )

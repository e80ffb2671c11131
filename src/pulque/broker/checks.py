"""What a pull may ask for at all."""

from pulque.errors import InvalidRequestError, NotAllowedError
from pulque.model.names import Group, PartitionName, is_retry, owner_of, parse_partition
from pulque.wire.requests import Pull

__all__ = ["MOST_PARTITIONS", "check_pull"]

MOST_PARTITIONS = 10_000
_MOST_COVERS = 1000


def check_pull(request: Pull, group: Group) -> None:
    """Refuse a pull that cannot be.

    Raises:
        RejectedError: It asks for nothing, for too much, or for what is another group's.
    """
    fewest = 0 if request.covers else 1
    if not fewest <= len(request.wanted) <= MOST_PARTITIONS:
        raise InvalidRequestError(
            f"a pull from {len(request.wanted)} partitions; "
            f"{fewest} to {MOST_PARTITIONS} are allowed"
        )
    if len(request.covers) > _MOST_COVERS:
        raise InvalidRequestError(
            f"a pull covers {len(request.covers)} subjects and patterns; "
            f"at most {_MOST_COVERS} are allowed"
        )
    if not request.max_messages or not request.max_bytes:
        raise InvalidRequestError("a pull must ask for at least one message and one byte")
    if len({wanted.partition for wanted in request.wanted}) < len(request.wanted):
        raise InvalidRequestError("a pull names a partition twice")
    for wanted in request.wanted:
        _check_owner(parse_partition(wanted.partition), group)


def _check_owner(name: PartitionName, group: Group) -> None:
    """Refuse what belongs to another group, and what waits or is dead."""
    owner = owner_of(name)
    if owner is None:
        return
    if owner != group:
        raise NotAllowedError(f"{name} belongs to group {owner}, not {group}")
    if not is_retry(name):
        raise NotAllowedError(
            f"{name} cannot be pulled from: it can be read, and dead letters resent"
        )

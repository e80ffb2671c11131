"""What a pull may ask for at all."""

from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
)
from pulque.model.names import Group, PartitionName, is_retry, owner_of, parse_partition
from pulque.wire.requests import MAX_WANTED, Pull

__all__ = ["check_names", "check_pull"]


def check_pull(request: Pull) -> None:
    """Refuse a pull that cannot be, but for the names in it.

    Raises:
        InvalidRequestError: It asks for nothing, or for a partition twice.
    """
    if not request.wanted and not request.covers:
        raise InvalidRequestError(f"a pull from 0 partitions; 1 to {MAX_WANTED} are allowed")
    if not request.max_messages or not request.max_bytes:
        raise InvalidRequestError("a pull must ask for at least one message and one byte")
    if len({wanted.partition for wanted in request.wanted}) < len(request.wanted):
        raise InvalidRequestError("a pull names a partition twice")


def check_names(request: Pull, group: Group) -> None:
    """Refuse a pull of what is no partition, or another group's.

    Raises:
        RejectedError: It is.
    """
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

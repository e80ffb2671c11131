"""When a batch goes over to another broker: the same for producers and for a send without one."""

from pulque.errors import PulqueError, StorageError

__all__ = [
    "ANSWER_LIMIT",
    "FAILOVER_PATIENCE",
    "awaits_leader",
    "leaves_unknown",
    "may_go_elsewhere",
]

ANSWER_LIMIT = 5.0
"""A broker that owes an answer for so many seconds is given up, as there are others."""
FAILOVER_PATIENCE = 15.0
"""How long a batch without an answer waits for who leads its broker group next, in seconds, as
only that one knows it again; or for half of its time, if that is less."""


def awaits_leader(seconds: float, timeout: float) -> bool:
    """Return whether a batch without an answer still waits for who leads its group next.

    Args:
        seconds: For how long it has waited.
        timeout: How long it may take altogether.
    """
    return seconds < min(FAILOVER_PATIENCE, timeout / 2)


def may_go_elsewhere(error: PulqueError) -> bool:
    """Return whether another broker may take what one refused."""
    return error.retryable or isinstance(error, StorageError)


def leaves_unknown(error: PulqueError) -> bool:
    """Return whether the batch may be stored all the same: of a failed disk nobody knows."""
    return isinstance(error, StorageError) and not error.retryable

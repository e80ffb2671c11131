"""Which protocol versions there are, and which one two peers speak."""

from pulque.errors import UnsupportedError

__all__ = ["NEWEST", "OLDEST", "agree"]

OLDEST = 1
NEWEST = 1


def agree(oldest: int, newest: int) -> int:
    """Return the newest version that both we and a peer of ``oldest..newest`` speak.

    Raises:
        UnsupportedError: There is none.
    """
    version = min(newest, NEWEST)
    if version < max(oldest, OLDEST):
        raise UnsupportedError(
            f"the peer speaks versions {oldest} to {newest}, this side {OLDEST} to {NEWEST}"
        )
    return version

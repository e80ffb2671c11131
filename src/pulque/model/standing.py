"""The standing of a broker: what its cluster last said about it."""

from typing import NamedTuple

__all__ = ["ALONE", "Standing"]


class Standing(NamedTuple):
    """What the cluster says about one of its brokers."""

    cluster: str = ""
    """The id of the cluster; empty if it never belonged to one."""
    is_read_only: bool = False
    """It takes no sends, by command; consumption goes on."""
    is_draining: bool = False
    """It takes no sends, and is to be removed when everything is consumed."""
    may_create: bool = True
    """Whether a first send creates its subject."""
    read_only: frozenset[str] = frozenset()
    """Subjects and patterns that take no sends."""


ALONE = Standing()
"""The standing of a broker without a cluster."""

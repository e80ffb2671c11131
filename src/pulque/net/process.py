"""What the process of a server needs from its system."""

import asyncio
import resource
from collections.abc import Callable

__all__ = ["allow_descriptors", "loop_factory"]


def allow_descriptors() -> None:
    """Allow this process as many open files as it may have: clients and segments need them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

"""What the process of a server needs from its system."""

import asyncio
import resource
import signal
from collections.abc import Callable

__all__ = ["allow_descriptors", "loop_factory", "stop_on_signals"]


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


def stop_on_signals(stop: Callable[[], object]) -> None:
    """Call ``stop`` on SIGTERM and SIGINT, and ignore SIGHUP; for the running loop.

    A server has no log file to reopen, and should outlive the terminal that started it. SIGHUP
    has a handler that does nothing: what is set to be ignored, child processes inherit.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)

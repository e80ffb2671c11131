"""The life of a server as a process: run, start, listen, serve until a signal, close."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from pulque.errors import ConfigError
from pulque.net.garbage import ShortCollections
from pulque.net.process import allow_descriptors, loop_factory, stop_on_signals
from pulque.net.server import FrameServer
from pulque.settings.logs import configure_logging
from pulque.settings.sections import LogSection

__all__ = ["Runnable", "listen", "run_process", "serve"]


class Runnable(Protocol):
    """A server that can be run as a process."""

    url: str
    """Where it listens, once it is started."""

    async def start(self) -> object:
        """Begin to serve; if that fails, nothing runs."""

    def stop(self) -> None:
        """Ask the server to stop."""

    async def stopped(self) -> None:
        """Wait until the server is asked to stop, or has to."""

    async def close(self) -> None:
        """Stop serving."""


def run_process(log: LogSection, work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run the work of this process in an event loop of its own.

    Args:
        log: How the process logs.
        work: What it does, until it is to end.

    Raises:
        PulqueError: It cannot start, or cannot go on.
    """
    configure_logging(log)
    allow_descriptors()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


async def serve(server: Runnable, on_ready: Callable[[str], None]) -> None:
    """Run a server until SIGTERM or SIGINT.

    Args:
        server: Not started yet.
        on_ready: Called with its URL once it serves.

    Raises:
        PulqueError: It cannot start, or cannot go on.
    """
    stop_on_signals(server.stop)
    await server.start()
    try:
        ShortCollections().begin()
        on_ready(server.url)
        await server.stopped()
    finally:
        await server.close()


async def listen(server: FrameServer, host: str, port: int) -> tuple[str, int]:
    """Begin to accept connections; return the address.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    try:
        return await server.listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error

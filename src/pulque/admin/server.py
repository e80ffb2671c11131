"""The API over HTTP, in the event loop of the server that it is part of."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from pulque.admin.app import create_app
from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.cluster import Cluster
from pulque.admin.context import Context
from pulque.admin.group_requests import find_positions
from pulque.admin.http.connection import IDLE_S, HttpConnection
from pulque.clock import Clock
from pulque.errors import ConfigError, PulqueError

__all__ = ["AdminServer"]

_GRACE_S = 3
_LOOK_S = 10.0
_SHARE = 20
"""Looking at all groups takes at most one twentieth of the time."""


class _Uvicorn(uvicorn.Server):
    """Leaves the signals of the process to whoever owns it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Serves the API until it is stopped.

    Args:
        cluster: What is known of the cluster.
        clock: What time it is.
        host: A loopback address.
        port: 0 takes any free one.
    """

    def __init__(
        self, cluster: Cluster, clock: Clock, *, host: str = "127.0.0.1", port: int = 7480
    ) -> None:
        self._context = Context(cluster, BrokerRequests(), clock)
        self._host = host
        self._port = port
        self._server: _Uvicorn | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Listen; return where.

        Raises:
            ConfigError: The port is taken.
        """
        listening = _listen(self._host, self._port)
        config = uvicorn.Config(
            create_app(self._context, hosts=[self._host]),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=round(IDLE_S),
            timeout_graceful_shutdown=_GRACE_S,
            http=HttpConnection,
            ws="none",
        )
        self._server = server = _Uvicorn(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)
        self._tasks = [serving, asyncio.create_task(self._keep_looking())]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        """Answer what was asked, and end."""
        if self._server is None:
            return
        self._server.should_exit = True
        serving, looking = self._tasks
        looking.cancel()
        await asyncio.gather(serving, looking, return_exceptions=True)
        self._server = None
        await self._context.brokers.close()

    async def _keep_looking(self) -> None:
        """Look at all groups again and again: how fast they get on takes two looks at least."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            with contextlib.suppress(PulqueError):
                await find_positions(self._context)
            await asyncio.sleep(max(_LOOK_S, (loop.time() - started) * _SHARE))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"admin: cannot listen on {host}:{port}: {error.strerror}") from None
    return listening

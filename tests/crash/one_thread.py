"""Runs servers of asyncio so that their steps come in the same order in every run.

What could differ from run to run is not there: no thread, no clock of the machine, no network, and
``secrets`` draws from a seed. Work for executors is done at once. A sync of the log begins a
moment later, as a disk would, so that something can happen before it. Timers fire in the order
of their times as soon as nothing else is to be done: nobody sleeps. Connections are bytes in
memory.
"""

import asyncio
import itertools
import selectors
import socket
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from pulque.errors import StorageError

__all__ = ["run_in_one_thread"]

Result = TypeVar("Result")
_SYNC_S = 0.001
_BEGIN_NS = 1_794_820_200 * 10**9
"""When every run begins, in nanoseconds since 1970."""
_HOST = "127.0.0.1"


class _Loop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while there is nothing to do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ports = itertools.count(1)
        self._servers: dict[int, Callable[[], Any]] = {}
        self._links: dict[socket.socket, _Link] = {}
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 10**9)

    def time_ns(self) -> int:
        return _BEGIN_NS + self.monotonic_ns()

    def run_in_executor(
        self, executor: object, func: Callable[..., Any], *args: object
    ) -> asyncio.Future[Any]:
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # whoever waits for it gets it
            future.set_exception(error)
        return future

    async def create_server(  # type: ignore[override]
        self, factory: Any, *_: Any, **__: Any
    ) -> Any:
        port = next(self._ports)
        self._servers[port] = factory
        return _Listening(self._servers, port)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self._links[sock] = _Link(self, self._servers[address[1]]())

    async def sock_sendall(self, sock: socket.socket, data: Any) -> None:
        self._links[sock].to_server(bytes(data))

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        return await self._links[sock].read_into(buf)


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen again"
        self._loop.now_s += max(0.0, timeout)
        return []


class _Listening:
    """A server, as far as those who listen need it."""

    def __init__(self, servers: dict[int, Any], port: int) -> None:
        self._servers = servers
        self._port = port
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return _HOST, self._port

    def close(self) -> None:
        self._servers.pop(self._port, None)


class _Link(asyncio.Transport):
    """A connection: the server's transport, and what the client reads."""

    def __init__(self, loop: _Loop, protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._to_server = b""
        self._to_client = b""
        self._is_paused = False
        self._is_over = False
        self._has_come = asyncio.Event()
        loop.call_soon(protocol.connection_made, self)

    def to_server(self, data: bytes) -> None:
        self._to_server += data
        self._loop.call_soon(self._feed)

    def _feed(self) -> None:
        while self._to_server and not self._is_paused and not self._is_over:
            buffer = memoryview(self._protocol.get_buffer(-1))
            some, self._to_server = (
                self._to_server[: len(buffer)],
                self._to_server[len(buffer) :],
            )
            buffer[: len(some)] = some
            self._protocol.buffer_updated(len(some))

    async def read_into(self, buffer: Any) -> int:
        while not self._to_client and not self._is_over:
            self._has_come.clear()
            await self._has_come.wait()
        some, self._to_client = self._to_client[: len(buffer)], self._to_client[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)

    # What the server does with it.

    def write(self, data: Any) -> None:
        self._to_client += bytes(data)
        self._has_come.set()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._feed)

    def is_closing(self) -> bool:
        return self._is_over

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._has_come.set()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        ends = {"socket": self, "peername": (_HOST, 0), "sockname": (_HOST, 0)}
        return ends.get(name, default)

    # What is asked of its socket.

    def setsockopt(self, *_: object) -> None:
        pass

    def getpeername(self) -> tuple[str, int]:
        return _HOST, 0

    def fileno(self) -> int:
        return 0


class _SyncLater:
    """Takes the place of the thread that syncs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._loop.call_later(_SYNC_S, self._run, work, done)

    def _run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        problem: BaseException | None = None
        try:
            work()
        except StorageError as error:
            problem = error
        self._loop.call_soon(done, problem)

    def stop(self) -> None:
        """Do nothing: who stops it has waited for the last sync."""


def run_in_one_thread(work: Coroutine[Any, Any, Result], seed: object = 0) -> Result:
    """Run a coroutine as ``asyncio.run`` does, and nothing of it depends on the machine.

    Args:
        work: The coroutine.
        seed: What the code under test would take from ``secrets`` follows from it.
    """
    loop = _Loop()
    with (
        patch("pulque.serving.commit.SyncThread", _SyncLater),
        patch("time.time_ns", loop.time_ns),
        patch("time.monotonic_ns", loop.monotonic_ns),
        patch("time.monotonic", loop.time),
        patch("secrets.randbits", Random(f"{seed}").getrandbits),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(work)

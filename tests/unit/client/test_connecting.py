"""``connect(wait=…)``: a program may start before its broker does."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

import pulque
from pulque import aio
from pulque.client.connection.backoff import Backoff
from pulque.errors import DisconnectedError, UsageError
from tests.unit.client.fake_broker import FakeBroker


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Late:
    """Sends what comes to a port on to a broker, from the second that it is told to."""

    def __init__(self, port: int, broker: FakeBroker) -> None:
        self._listener = socket.socket()
        self._listener.settimeout(20)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port, self._broker = port, broker
        self._sockets: list[socket.socket] = [self._listener]

    def start(self) -> None:
        self._listener.bind(("127.0.0.1", self._port))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the end of the test
            self._accept()

    def _accept(self) -> None:
        broker = ("127.0.0.1", int(self._broker.url.rpartition(":")[2]))
        for _ in range(2):  # a client for asyncio has one for sends beside
            here, _ = self._listener.accept()
            there = socket.create_connection(broker)
            self._sockets += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._sockets:
            each.close()


@pytest.fixture
def late(port: int, broker: FakeBroker) -> Iterator[Late]:
    found = Late(port, broker)
    yield found
    found.stop()


def start_after_the_first_attempt(monkeypatch: pytest.MonkeyPatch, late: Late) -> None:
    next_wait = Backoff.next_wait
    has_started = False

    def start(self: Backoff) -> float:
        nonlocal has_started
        if not has_started:
            has_started = True
            late.start()
        return next_wait(self)

    monkeypatch.setattr(Backoff, "next_wait", start)


def test_connect_waits_for_a_broker(
    broker: FakeBroker, port: int, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_after_the_first_attempt(monkeypatch, late)
    with pulque.connect(f"pulque://127.0.0.1:{port}", wait=20, timeout=5) as client:
        assert client.send("orders", b"one").sequence == 0


async def test_connect_for_asyncio_waits_for_a_broker(
    broker: FakeBroker, port: int, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_after_the_first_attempt(monkeypatch, late)
    async with aio.connect(f"pulque://127.0.0.1:{port}", wait=20, timeout=5) as client:
        assert (await client.send("orders", b"one")).sequence == 0


@pytest.mark.parametrize("wait", [0, 0.05])
def test_the_error_says_what_to_try(port: int, wait: float) -> None:
    url = f"pulque://127.0.0.1:{port}"

    async def connect() -> None:
        async with aio.connect(url, wait=wait):
            pytest.fail("nobody listens there")

    for attempt in (lambda: pulque.connect(url, wait=wait), lambda: asyncio.run(connect())):
        with pytest.raises(DisconnectedError) as caught:
            attempt()
        for hint in ("cannot connect to 127.0.0.1", "`pulque up`", "check the URL", "wait="):
            assert hint in str(caught.value)


def test_a_wait_is_a_number() -> None:
    with pytest.raises(UsageError, match="wait is '5s'; a number of seconds is allowed"):
        pulque.connect(wait="5s")  # type: ignore[arg-type]

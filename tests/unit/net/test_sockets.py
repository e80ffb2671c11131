"""What connections ask of their sockets."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pulque.net.sockets import prepare_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is asked exists on Linux")


@contextmanager
def _connected(family: socket.AddressFamily, host: str) -> Iterator[socket.socket]:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} cannot be bound here")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as client:
            yield client


def _congestion(sock: socket.socket) -> bytes:
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return found.partition(b"\0")[0]


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_connections_within_the_machine_are_not_paced(
    family: socket.AddressFamily, host: str
) -> None:
    with _connected(family, host) as client:
        prepare_socket(client)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert _congestion(client) == b"reno"


def test_a_socket_that_is_connected_to_nobody_is_left_as_the_system_made_it() -> None:
    with socket.socket() as alone:
        before = _congestion(alone)
        prepare_socket(alone)
        assert alone.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert _congestion(alone) == before

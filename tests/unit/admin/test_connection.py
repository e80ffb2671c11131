"""Connections that ask nothing, or never end what they ask, beside somebody who does."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from pulque.admin.http import connection
from pulque.admin.http.guard import MAX_AT_ONCE
from tests.unit.admin.conftest import serving
from tests.unit.admin.fakes import FakeCluster

LIMIT = 30.0
Opened = Callable[[bytes], socket.socket]


@pytest.fixture
def url() -> Iterator[str]:
    with serving(FakeCluster({})) as url:
        yield url


@pytest.fixture
def opened(url: str) -> Iterator[Opened]:
    """Opens a connection and sends a few bytes."""
    address = httpx.URL(url)
    with contextlib.ExitStack() as stack:

        def open_one(data: bytes) -> socket.socket:
            one = socket.create_connection((address.host, address.port or 0), LIMIT)
            stack.callback(one.close)
            one.sendall(data)
            return one

        yield open_one


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: "])
def test_silent_connections_keep_nobody_from_asking(url: str, opened: Opened, sent: bytes) -> None:
    for _ in range(300):
        opened(sent)

    for path in ("/healthz", "/readyz", "/api/v1/cluster"):
        assert httpx.get(url + path, timeout=LIMIT).status_code == 200


def test_bodies_that_do_not_come_keep_only_other_bodies_out(url: str, opened: Opened) -> None:
    head = b"PUT /api/v1/definitions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
    for _ in range(MAX_AT_ONCE):
        opened(head + b"content-type: application/json\r\nexpect: 100-continue\r\n\r\n").recv(1)

    full = httpx.put(f"{url}/api/v1/definitions", json={}, timeout=LIMIT)
    assert (full.status_code, full.json()["error"]) == (503, "OverloadedError")
    for path in ("/healthz", "/readyz", "/api/v1/cluster"):
        assert httpx.get(url + path, timeout=LIMIT).status_code == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /api/v1/messages?key=" + b"%41" * 300_000 + b" HTTP/1.1\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 900_000 + b"\r\n", 431),
        (b"NONSENSE" + b"\r\n" * 300_000, 400),
    ],
    ids=["a long query", "a long header", "no request"],
)
def test_what_is_no_request_gets_an_answer_and_no_reset(
    opened: Opened, request_line: bytes, status: int
) -> None:
    one = opened(request_line + b"host: localhost\r\n\r\n")

    found = b""
    while part := one.recv(65536):
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"] == "InvalidRequestError"


@pytest.mark.parametrize(("count", "status"), [(400, 200), (50_000, 413)])
def test_a_body_in_very_many_chunks_is_refused(opened: Opened, count: int, status: int) -> None:
    head = b"PATCH /api/v1/config HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    kind = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"2\r\n{}\r\n" + b"1\r\n \r\n" * count + b"0\r\n\r\n"

    assert _end_of(opened(head + kind + body)).startswith(b"HTTP/1.1 %d " % status)


def test_a_health_check_does_not_wait_for_its_body(opened: Opened) -> None:
    asked = opened(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")

    assert asked.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nx: "])
def test_a_request_that_does_not_come_is_not_waited_for(
    opened: Opened, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HEAD_S", 0.05)

    assert _end_of(opened(sent)) == b""


def test_bytes_that_drip_in_after_an_answer_do_not_keep_a_connection(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.05)
    asked = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"

    assert _end_of(opened(asked + b"GET /healthz HT")).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_is_given_up(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_STALLED_S", 0.05)
    asked = b"GET /api/v1/openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with pytest.raises(ConnectionError):  # not a time-out, which is another OSError
        _ask_for_ever(opened(b""), asked * 100)


def _ask_for_ever(one: socket.socket, asked: bytes) -> None:
    while True:
        one.sendall(asked)


def _end_of(one: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(65536):
            data += part
    return data

"""The client's side of a conversation, byte by byte."""

import pytest

from pulque.client.connection.session import Session
from pulque.errors import (
    NotAllowedError,
    PulqueError,
    RemoteProtocolError,
    UnsupportedError,
)
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.wire.frame import HANDSHAKE_LIMIT, MAX_PAYLOAD, FrameReader
from pulque.wire.requests import Hello, Status, decode_request
from pulque.wire.responses import (
    Beaten,
    Response,
    StatusReport,
    Welcome,
    encode_error,
    encode_response,
)


def welcome(version: int = 1) -> Welcome:
    return Welcome(version, "b", Tenure(Epoch(9), StartCount(1)), MAX_PAYLOAD, 100, 30_000, 60_000)


def feed(session: Session, data: bytes) -> None:
    at = 0
    while at < len(data):
        buffer = session.reader.buffer()
        count = min(len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        session.reader.received(count)
        at += count


def answer(session: Session, response: Response, request_id: int = 0) -> None:
    feed(session, b"".join(encode_response(response, request_id, 0)))


def read_frame(data: bytes) -> tuple[object, int, int]:
    reader = FrameReader()
    reader.buffer()[: len(data)] = data
    reader.received(len(data))
    frame = reader.next_frame()
    assert frame is not None
    return decode_request(frame), frame.request_id, frame.epoch


def test_the_first_frame_says_who_is_there() -> None:
    assert read_frame(Session("shop").hello()) == (Hello(1, 1, "shop"), 0, 0)


def test_after_the_welcome_large_frames_may_come_and_the_epoch_is_told() -> None:
    session = Session("shop")
    assert session.receive_welcome() is None
    assert session.reader.limit == HANDSHAKE_LIMIT
    answer(session, welcome())

    assert session.receive_welcome() == welcome()
    assert session.reader.limit == MAX_PAYLOAD
    _, buffers = session.ask(Status())
    assert read_frame(b"".join(buffers)) == (Status(), 1, 9)


def test_answers_come_with_the_id_of_their_request() -> None:
    session = Session("shop")
    first, _ = session.ask(Status())
    second, _ = session.ask(Status())
    answer(session, StatusReport(b"{}"), second)

    assert first != second
    assert session.next_answer() == (second, StatusReport(b"{}"))
    assert session.next_answer() is None


def test_a_broker_that_refuses_is_heard() -> None:
    session = Session("shop")
    feed(session, encode_error(NotAllowedError("who are you"), 0, 0))

    with pytest.raises(NotAllowedError, match="who are you"):
        session.receive_welcome()


@pytest.mark.parametrize(
    ("response", "error"),
    [(Beaten(1), RemoteProtocolError), (welcome(version=7), UnsupportedError)],
)
def test_a_welcome_must_be_one(response: Response, error: type[PulqueError]) -> None:
    session = Session("shop")
    answer(session, response)

    with pytest.raises(error):
        session.receive_welcome()


def test_strange_bytes_are_refused() -> None:
    session = Session("shop")
    feed(session, b"HTTP/1.1 400 Bad Request\r\n")

    with pytest.raises(RemoteProtocolError):
        session.receive_welcome()


def test_request_ids_never_become_that_of_the_handshake() -> None:
    session = Session("shop")
    session._last_id = 0xFFFF_FFFE  # noqa: SLF001  # four billion requests later

    assert [session.next_id() for _ in range(2)] == [0xFFFF_FFFF, 1]

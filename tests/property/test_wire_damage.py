"""Bytes that are no frames, and payloads that lie, are refused with an error of ours."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import PulqueError, RemoteProtocolError
from pulque.wire.codec import Reader, Writer
from pulque.wire.frame import Frame, FrameReader, pack_frame_header
from pulque.wire.requests import Acks, Request, Send, decode_request, encode_request
from pulque.wire.responses import Response, decode_response, encode_response
from pulque.wire.single import read_single_send
from tests.property.wire_values import REQUESTS, RESPONSES, feed, frame_of, requests, responses

changes = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8)


def hear(frame: Frame) -> None:
    with suppress(PulqueError):
        decode_request(frame)
    with suppress(PulqueError):
        decode_response(frame)


def hear_all(stream: bytes) -> None:
    """Do what a connection does until it is closed."""
    reader = FrameReader()
    with suppress(RemoteProtocolError):
        feed(reader, stream)
        while (frame := reader.next_frame()) is not None:
            hear(frame)


def changed(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    edited = bytearray(data)
    for at, value in edits:
        if edited:
            edited[at % len(edited)] = value
    return bytes(edited)


@given(opcode=st.integers(0, 255), version=st.integers(0, 2), payload=st.binary(max_size=80))
def test_noise_as_a_payload_is_refused(opcode: int, version: int, payload: bytes) -> None:
    hear(Frame(opcode, version, 0, 0, memoryview(payload)))


@pytest.mark.parametrize("kind", REQUESTS)
@given(data=st.data(), edits=changes)
def test_a_request_with_changed_bytes_is_heard_or_refused(
    kind: type[Request], data: st.DataObject, edits: list[tuple[int, int]]
) -> None:
    frame = frame_of(encode_request(data.draw(REQUESTS[kind]), 1, 2))

    hear(frame._replace(payload=memoryview(changed(bytes(frame.payload), edits))))


@given(name=st.text(max_size=9), batch=st.binary(max_size=40), edits=changes | st.just([]))
def test_the_short_way_hears_what_the_long_way_hears(
    name: str, batch: bytes, edits: list[tuple[int, int]]
) -> None:
    send = Send(Acks.DISK, 500, ((name, batch),))
    frame = frame_of(encode_request(send, 1, 2))
    payload = memoryview(changed(bytes(frame.payload), edits))
    short = read_single_send(frame._replace(payload=payload))

    assert edits or short == (Acks.DISK, 500, name, batch)
    if short is not None:
        acks, timeout_ms, found, data_found = short
        long = Reader(payload)
        assert Send.read(long) == Send(Acks(acks), timeout_ms, ((found, data_found),))
        long.end()


@given(
    pairs=st.lists(st.tuples(st.text(max_size=9), st.binary(max_size=20)), max_size=4),
    edits=changes | st.just([]),
    asked=st.integers(-1, 1),
)
def test_pairs_are_taken_in_one_step_as_they_are_one_by_one(
    pairs: list[tuple[str, bytes]], edits: list[tuple[int, int]], asked: int
) -> None:
    writer = Writer()
    writer.named_blobs(pairs)
    payload = memoryview(changed(writer.join(), edits))
    count = max(len(pairs) + asked, 0)
    heard: list[list[object]] = [[], []]
    for take, said in zip((Reader.named_blobs, _one_by_one), heard, strict=True):
        reader = Reader(payload)
        with suppress(RemoteProtocolError):
            said.append(take(reader, count))
        try:
            reader.end()
        except RemoteProtocolError as error:
            said.append(str(error))  # which says how much is left

    assert heard[0] == heard[1]


def _one_by_one(reader: Reader, count: int) -> list[tuple[str, bytes]]:
    return [(reader.text(), bytes(reader.blob())) for _ in range(count)]


@pytest.mark.parametrize("kind", RESPONSES)
@given(data=st.data(), edits=changes)
def test_an_answer_with_changed_bytes_is_heard_or_refused(
    kind: type[Response], data: st.DataObject, edits: list[tuple[int, int]]
) -> None:
    frame = frame_of(encode_response(data.draw(RESPONSES[kind]), 1, 2))

    hear(frame._replace(payload=memoryview(changed(bytes(frame.payload), edits))))


@given(request=requests)
def test_a_request_that_was_cut_or_has_a_tail_is_refused(request: Request) -> None:
    frame = frame_of(encode_request(request, 1, 2))
    payload = bytes(frame.payload)

    for wrong in [*(payload[:size] for size in range(len(payload))), payload + b"\0"]:
        with pytest.raises(RemoteProtocolError):
            decode_request(frame._replace(payload=memoryview(wrong)))


@given(response=responses)
def test_an_answer_that_was_cut_or_has_a_tail_is_refused(response: Response) -> None:
    frame = frame_of(encode_response(response, 1, 2))
    payload = bytes(frame.payload)

    for wrong in [*(payload[:size] for size in range(len(payload))), payload + b"\0"]:
        with pytest.raises(RemoteProtocolError):
            decode_response(frame._replace(payload=memoryview(wrong)))


@given(request=requests, edits=changes)
def test_a_stream_with_changed_bytes_is_heard_or_refused(
    request: Request, edits: list[tuple[int, int]]
) -> None:
    hear_all(changed(b"".join(encode_request(request, 1, 2)) * 3, edits))


@given(stream=st.binary(max_size=200))
def test_noise_as_a_stream_is_refused(stream: bytes) -> None:
    hear_all(stream)
    hear_all(b"PQ" + stream)
    hear_all(pack_frame_header(3, 1, len(stream), 0, 0) + stream)


@given(text=st.binary(max_size=40), code=st.integers(0, 2**16 - 1), tail=st.binary(max_size=5))
def test_an_error_is_always_an_error(text: bytes, code: int, tail: bytes) -> None:
    payload = code.to_bytes(2, "little") + len(text).to_bytes(2, "little") + text + tail
    try:
        heard = decode_response(Frame(0xFF, 1, 0, 0, memoryview(payload)))
    except RemoteProtocolError as problem:
        assert "UTF-8" in str(problem)  # noqa: PT017  # the other way to be an error
        return

    assert isinstance(heard, PulqueError)
    assert str(heard) == text.decode()

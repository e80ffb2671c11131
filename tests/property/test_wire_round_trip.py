"""What one side says, the other side hears, however the bytes are cut on the way."""

from struct import unpack_from
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import PulqueError
from pulque.wire.frame import Frame, FrameReader, pack_frame_header
from pulque.wire.requests import Opcode, Request, decode_request, encode_request
from pulque.wire.responses import Response, decode_response, encode_response
from tests.property.wire_values import (
    REQUESTS,
    RESPONSES,
    copied,
    epochs,
    frame_of,
    request_ids,
    requests,
    responses,
)


class Plain(NamedTuple):
    """A frame with bytes that may be kept."""

    opcode: int
    version: int
    request_id: int
    epoch: int
    payload: bytes


def plain(frame: Frame) -> Plain:
    return Plain(frame.opcode, frame.version, frame.request_id, frame.epoch, bytes(frame.payload))


def parsed(stream: bytes) -> list[Plain]:
    """The oracle: cut a whole stream into frames, as the page about the protocol says."""
    frames: list[Plain] = []
    at = 0
    while at < len(stream):
        assert stream[at : at + 2] == b"PQ"
        opcode, version, size, request_id, epoch = unpack_from("<BBIII", stream, at + 2)
        payload = stream[at + 16 : at + 16 + size]
        frames.append(Plain(opcode, version, request_id, epoch, payload))
        at += 16 + size
    return frames


@pytest.mark.parametrize("kind", REQUESTS)
@given(data=st.data(), request_id=request_ids, epoch=epochs)
def test_a_request_is_heard_as_it_was_said(
    kind: type[Request], data: st.DataObject, request_id: int, epoch: int
) -> None:
    request = data.draw(REQUESTS[kind])
    frame = frame_of(encode_request(request, request_id, epoch))

    assert (frame.opcode, frame.version) == (kind.opcode, 1)
    assert (frame.request_id, frame.epoch) == (request_id, epoch)
    assert decode_request(frame) == request


@pytest.mark.parametrize("kind", RESPONSES)
@given(data=st.data(), request_id=request_ids, epoch=epochs)
def test_an_answer_is_heard_as_it_was_said(
    kind: type[Response], data: st.DataObject, request_id: int, epoch: int
) -> None:
    response = data.draw(RESPONSES[kind])
    frame = frame_of(encode_response(response, request_id, epoch))
    heard = decode_response(frame)

    assert (frame.opcode, frame.version) == (kind.opcode | 0x80, 1)
    assert (frame.request_id, frame.epoch) == (request_id, epoch)
    assert not isinstance(heard, PulqueError)
    assert copied(heard) == copied(response)


def test_every_opcode_has_a_request_and_an_answer() -> None:
    assert {kind.opcode for kind in REQUESTS} == set(Opcode)
    assert {kind.opcode for kind in RESPONSES} == set(Opcode)


@given(
    said=st.lists(
        st.one_of(
            requests.map(lambda r: encode_request(r, 1, 2)),
            responses.map(lambda r: encode_response(r, 3, 4)),
        ),
        max_size=8,
    ),
    steps=st.lists(st.integers(1, 90), min_size=1, max_size=30),
)
def test_frames_are_the_same_however_the_bytes_are_cut(
    said: list[list[bytes | memoryview]], steps: list[int]
) -> None:
    stream = b"".join(b"".join(buffers) for buffers in said)

    assert frames_of(stream, steps) == parsed(stream)


@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 40),
            st.integers(16_300, 16_450),
            st.sampled_from([32_752, 65_536, 262_144, 524_272, 524_288, 600_000, 1_100_000]),
        ),
        min_size=1,
        max_size=5,
    ),
    steps=st.lists(
        st.one_of(st.integers(1, 20), st.integers(1_000, 70_000), st.just(10_000_000)),
        min_size=1,
        max_size=8,
    ),
)
def test_large_frames_are_the_same_too(sizes: list[int], steps: list[int]) -> None:
    stream = b"".join(
        pack_frame_header(3, 1, size, i, 0) + bytes([i + 1]) * size for i, size in enumerate(sizes)
    )
    # One byte at a time through a megabyte would take minutes.
    steps = [step if sum(sizes) < 2_000 else step * 1_000 for step in steps]

    assert frames_of(stream, steps) == parsed(stream)


def frames_of(stream: bytes, steps: list[int]) -> list[Plain]:
    """Feed a reader in steps, over and over, and look at payloads as late as is allowed."""
    reader = FrameReader()
    found: list[Plain] = []
    at = turn = 0
    while at < len(stream):
        room = reader.buffer()
        assert len(room) > 0
        count = min(steps[turn % len(steps)], len(room), len(stream) - at)
        room[:count] = stream[at : at + count]
        reader.received(count)
        at += count
        turn += 1
        frames = []
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
        found += map(plain, frames)
    assert not reader.is_inside_frame
    return found

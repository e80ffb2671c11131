"""A reader knows bytes that are not frames at once, and allocates nothing for those that lie."""

import tracemalloc
from struct import pack

import pytest

from pulque.errors import RemoteProtocolError
from pulque.wire.frame import (
    FRAME_HEADER_SIZE,
    HANDSHAKE_LIMIT,
    MAX_PAYLOAD,
    FrameReader,
    pack_frame_header,
)
from tests.property.wire_values import feed

TLS_HELLO = bytes.fromhex("16030100f8010000f40303")


def reader_of(data: bytes, limit: int = MAX_PAYLOAD) -> FrameReader:
    reader = FrameReader(limit)
    feed(reader, data)
    return reader


def test_a_header_is_these_bytes() -> None:
    assert pack_frame_header(3, 1, 0x01020304, 5, 6) == b"PQ" + pack(
        "<BBIII", 3, 1, 0x01020304, 5, 6
    )
    assert FRAME_HEADER_SIZE == 16


@pytest.mark.parametrize(
    ("data", "stranger"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"POST /send HTTP/1.1\r\n", "HTTP"),
        (b"HEAD / HTTP/1.0\r\n", "HTTP"),
        (b"OPTIONS * HTTP/1.1\r\n", "HTTP"),
        (b"DELETE /x HTTP/1.1\r\n", "HTTP"),
        (b"PATCH /x HTTP/1.1\r\n", "HTTP"),
        (b"CONNECT x:1 HTTP/1.1\r\n", "HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (b"\0" * 64, "something else"),
        (b"QP" + bytes(30), "something else"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "something else"),
    ],
)
def test_strangers_are_known_by_two_bytes(data: bytes, stranger: str) -> None:
    for size in (2, 3, 15, len(data)):
        with pytest.raises(RemoteProtocolError, match=f"Pulque port.*{stranger}"):
            reader_of(data[:size]).next_frame()


def test_one_byte_says_nothing_yet() -> None:
    assert reader_of(b"G").next_frame() is None
    assert reader_of(b"").next_frame() is None


def test_wrong_magic_is_found_in_any_frame() -> None:
    reader = reader_of(pack_frame_header(6, 1, 3, 0, 0) + b"abc" + b"GET / HTTP/1.1")
    frame = reader.next_frame()
    assert frame is not None
    assert bytes(frame.payload) == b"abc"

    with pytest.raises(RemoteProtocolError, match="HTTP"):
        reader.next_frame()


@pytest.mark.parametrize("size", [HANDSHAKE_LIMIT + 1, MAX_PAYLOAD + 1, 2**31, 2**32 - 1])
def test_a_size_over_the_limit_is_refused_before_anything_is_allocated(size: int) -> None:
    reader = reader_of(pack_frame_header(1, 1, size, 0, 0), limit=HANDSHAKE_LIMIT)
    tracemalloc.start()

    try:
        # Again and again: a caller that goes on after an error must not get the room either.
        for _ in range(3):
            with pytest.raises(RemoteProtocolError, match=f"{size} bytes; at most 8192"):
                reader.next_frame()
            reader.buffer()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_largest_allowed_frame_is_read() -> None:
    reader = FrameReader(HANDSHAKE_LIMIT)
    feed(reader, pack_frame_header(1, 1, HANDSHAKE_LIMIT, 0, 0))
    assert reader.next_frame() is None
    feed(reader, b"x" * HANDSHAKE_LIMIT)
    frame = reader.next_frame()

    assert frame is not None
    assert bytes(frame.payload) == b"x" * HANDSHAKE_LIMIT


def test_the_limit_may_rise_after_the_handshake() -> None:
    reader = reader_of(
        pack_frame_header(1, 1, 0, 0, 0) + pack_frame_header(3, 1, 9000, 0, 0), 8192
    )
    assert reader.next_frame() is not None

    reader.limit = MAX_PAYLOAD

    assert reader.next_frame() is None
    feed(reader, b"y" * 9000)
    frame = reader.next_frame()
    assert frame is not None
    assert bytes(frame.payload) == b"y" * 9000


def test_a_payload_is_valid_until_the_next_buffer() -> None:
    first = pack_frame_header(1, 1, 3, 0, 0) + b"one"
    reader = reader_of(first + pack_frame_header(2, 1, 3, 0, 0) + b"two" + b"PQ")
    one, two = reader.next_frame(), reader.next_frame()
    assert reader.next_frame() is None
    assert one is not None
    assert two is not None

    assert (bytes(one.payload), bytes(two.payload)) == (b"one", b"two")


def test_a_payload_is_a_view_and_no_copy() -> None:
    reader = FrameReader()
    feed(reader, pack_frame_header(1, 1, 3, 0, 0) + b"one")
    frame = reader.next_frame()
    assert frame is not None

    feed(reader, pack_frame_header(1, 1, 3, 0, 0) + b"two")

    # Not promised, but the reason for the rule above: the room is used again.
    assert bytes(frame.payload) == b"two"


def test_a_reader_knows_whether_it_is_inside_a_frame() -> None:
    reader = FrameReader()
    claims = [reader.is_inside_frame]
    for part in (b"PQ", pack_frame_header(1, 1, 3, 0, 0)[2:], b"ab", b"c"):
        feed(reader, part)
        reader.next_frame()
        claims.append(reader.is_inside_frame)

    assert claims == [False, True, True, True, False]


def test_frames_without_a_payload_follow_each_other() -> None:
    reader = reader_of(b"".join(pack_frame_header(6, 1, 0, i, 0) for i in range(5)))

    found = []
    while (frame := reader.next_frame()) is not None:
        found.append((frame.request_id, bytes(frame.payload)))

    assert found == [(i, b"") for i in range(5)]


def test_the_buffer_grows_for_a_fast_peer_and_ends_at_its_limit() -> None:
    reader = FrameReader()
    frame = pack_frame_header(1, 1, 1000, 0, 0) + bytes(1000)
    stream = frame * 2000
    largest = 0
    while stream:
        room = reader.buffer()
        largest = max(largest, len(room))
        count = min(len(room), len(stream))
        room[:count] = stream[:count]
        reader.received(count)
        stream = stream[count:]
        while reader.next_frame() is not None:
            pass

    assert 16 * 1024 < largest <= 512 * 1024

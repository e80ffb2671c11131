"""Requests that nobody knows are refused, and the connection lives on."""

import pytest

from pulque.errors import LocalProtocolError, RejectedError, UnsupportedError
from pulque.wire.frame import Frame
from pulque.wire.requests import Acks, Opcode, Send, decode_request, encode_request

NOTHING = memoryview(b"")


@pytest.mark.parametrize("opcode", [0, 30, 31, 39, 127, 128, 131, 255])
def test_an_unknown_opcode_is_refused_by_name(opcode: int) -> None:
    with pytest.raises(UnsupportedError, match=f"opcode {opcode} is unknown.*3 send"):
        decode_request(Frame(opcode, 1, 0, 0, NOTHING))


@pytest.mark.parametrize("opcode", Opcode)
@pytest.mark.parametrize("version", [0, 2, 255])
def test_an_unknown_version_is_refused(opcode: Opcode, version: int) -> None:
    with pytest.raises(UnsupportedError, match=f"version {version} of .* known is 1"):
        decode_request(Frame(opcode, version, 0, 0, NOTHING))


def test_acks_that_nobody_knows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="acks 3 is unknown"):
        decode_request(Frame(Opcode.SEND, 1, 0, 0, memoryview(b"\x03" + bytes(6))))


def test_what_is_unsupported_does_not_end_the_connection() -> None:
    assert issubclass(UnsupportedError, RejectedError)


def test_a_batch_is_handed_on_as_it_is() -> None:
    batch = memoryview(bytearray(100_000))
    buffers = encode_request(Send(Acks.DISK, 1000, (("orders", batch),)), 1, 0)

    assert any(each is batch for each in buffers)


def test_a_decoded_batch_may_be_kept() -> None:
    payload = bytearray(b"".join(encode_request(Send(Acks.DISK, 1, (("p", b"abc"),)), 1, 0)[1:]))
    request = decode_request(Frame(Opcode.SEND, 1, 0, 0, memoryview(payload)))
    payload[:] = bytes(len(payload))

    assert request == Send(Acks.DISK, 1, (("p", b"abc"),))


def test_a_number_that_does_not_fit_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(Send(Acks.DISK, -1, ()), 1, 0)

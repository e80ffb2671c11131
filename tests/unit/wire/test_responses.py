"""Answers carry errors as well as results, and a newer broker does not confuse an older client."""

import pytest

from pulque.errors import (
    ErrorCode,
    NotLeaderError,
    PulqueError,
    RemoteProtocolError,
    UnsupportedError,
)
from pulque.model.positions import ConsumeSequence, PullSequence
from pulque.wire.frame import Frame
from pulque.wire.requests import Opcode
from pulque.wire.responses import (
    Outcome,
    Pulled,
    ReadBack,
    Sent,
    State,
    decode_response,
    encode_error,
    encode_response,
)
from pulque.wire.versions import NEWEST, OLDEST, agree
from tests.property.wire_values import frame_of

FUTURE = 9_999


def told(error: PulqueError) -> PulqueError:
    frame = frame_of([encode_error(error, 7, 8)])
    assert (frame.opcode, frame.request_id, frame.epoch) == (0xFF, 7, 8)
    heard = decode_response(frame)
    assert isinstance(heard, PulqueError)
    return heard


def test_an_error_is_returned_as_what_it_was() -> None:
    heard = told(NotLeaderError("broker b leads orders#3"))

    assert type(heard) is NotLeaderError
    assert str(heard) == "broker b leads orders#3"


def test_a_long_text_of_an_error_is_cut() -> None:
    assert str(told(NotLeaderError("é" * 60_000))) == "é" * 2_000


def test_a_text_of_an_error_that_is_no_utf8_is_told_all_the_same() -> None:
    assert str(told(NotLeaderError("file \udcff"))) == r"file \udcff"


def test_bytes_after_the_text_of_an_error_are_left_to_later_versions() -> None:
    frame = frame_of([encode_error(NotLeaderError("no"), 7, 8)])
    longer = memoryview(bytes(frame.payload) + b"more")
    heard = decode_response(frame._replace(version=2, payload=longer))

    assert type(heard) is NotLeaderError


@pytest.mark.parametrize("opcode", [0, 1, 3, 0x80, 0x9E, 0xFE])
def test_what_is_no_answer_is_refused(opcode: int) -> None:
    with pytest.raises(RemoteProtocolError, match="is not an answer known here"):
        decode_response(Frame(opcode, 1, 0, 0, memoryview(b"")))


@pytest.mark.parametrize("opcode", Opcode)
def test_an_answer_of_an_unknown_version_is_refused(opcode: Opcode) -> None:
    with pytest.raises(RemoteProtocolError, match="version 2"):
        decode_response(Frame(opcode | 0x80, 2, 0, 0, memoryview(b"")))


def test_an_outcome_with_a_code_of_a_newer_broker_counts_as_unknown() -> None:
    sent = Sent((Outcome(FUTURE, False, ConsumeSequence(0), 0, "new"),))  # type: ignore[arg-type]
    heard = decode_response(frame_of(encode_response(sent, 1, 0)))

    assert heard == Sent((Outcome(ErrorCode.UNKNOWN, False, ConsumeSequence(0), 0, "new"),))


def test_a_state_with_a_code_of_a_newer_broker_counts_as_unknown() -> None:
    state = State(FUTURE, PullSequence(1), PullSequence(2))  # type: ignore[arg-type]
    heard = decode_response(frame_of(encode_response(Pulled((state,), ()), 1, 0)))

    assert heard == Pulled((State(ErrorCode.UNKNOWN, PullSequence(1), PullSequence(2)),), ())


def test_records_are_handed_on_as_they_are() -> None:
    records = (memoryview(b"one"), memoryview(b"two"))
    buffers = encode_response(
        ReadBack(ConsumeSequence(0), 1, ConsumeSequence(0), ConsumeSequence(1), records), 1, 0
    )

    assert buffers[-2] is records[0]
    assert buffers[-1] is records[1]


@pytest.mark.parametrize(
    ("oldest", "newest", "version"), [(1, 1, 1), (1, 9, 1), (0, 1, 1), (0, 255, 1)]
)
def test_two_peers_speak_the_newest_version_that_both_know(
    oldest: int, newest: int, version: int
) -> None:
    assert agree(oldest, newest) == version


@pytest.mark.parametrize(("oldest", "newest"), [(2, 9), (0, 0), (9, 1)])
def test_peers_without_a_common_version_part(oldest: int, newest: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{oldest} to {newest}, this side 1 to 1"):
        agree(oldest, newest)


def test_there_is_one_version_so_far() -> None:
    assert (OLDEST, NEWEST) == (1, 1)

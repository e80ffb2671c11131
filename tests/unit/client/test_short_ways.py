"""The short ways of a single send give the bytes that the long ways give."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pulque.client.sending.outgoing_message import as_body
from pulque.errors import ErrorCode, LocalProtocolError, UsageError
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.positions import ConsumeSequence
from pulque.model.single import pack_single
from pulque.wire.frame import MAX_PAYLOAD, Frame, FrameReader
from pulque.wire.requests import Acks, Send, encode_request
from pulque.wire.responses import Outcome, Sent, encode_response
from pulque.wire.single import (
    SingleStored,
    encode_single_send,
    encode_single_stored,
    read_single_stored,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(
    body=st.binary(max_size=300),
    seed=u32,
    message_id=st.binary(min_size=16, max_size=16),
    created_at_ms=st.integers(0, 2**62),
    producer_id=u64,
    number=u64,
)
def test_a_single_message_is_packed_as_any_batch(
    body: bytes, seed: int, message_id: bytes, created_at_ms: int, producer_id: int, number: int
) -> None:
    packer = BatchPacker()
    packer.bodies.append(body)
    long = packer.encode(
        seed=seed,
        ids=message_id,
        created_at_ms=created_at_ms,
        produced_by=ProducedBy(producer_id, 0, number),
    )

    short = pack_single(
        body,
        seed=seed,
        message_id=message_id,
        created_at_ms=created_at_ms,
        producer_id=producer_id,
        producer_sequence=number,
    )

    assert short == long


@given(
    partition=st.text(max_size=50),
    batch=st.binary(max_size=300),
    acks=st.sampled_from(Acks),
    timeout_ms=u32,
    request_id=u32,
    epoch=u32,
)
def test_a_single_batch_is_sent_in_the_same_frame(
    partition: str, batch: bytes, acks: Acks, timeout_ms: int, request_id: int, epoch: int
) -> None:
    send = Send(acks, timeout_ms, ((partition, batch),))

    short = encode_single_send(
        partition, batch, acks=acks, timeout_ms=timeout_ms, request_id=request_id, epoch=epoch
    )

    assert short == b"".join(encode_request(send, request_id, epoch))


def test_a_frame_over_the_limit_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        encode_single_send("s", bytes(MAX_PAYLOAD), acks=1, timeout_ms=1, request_id=1, epoch=0)


def frame_of(sent: Sent) -> Frame:
    data = b"".join(encode_response(sent, 1, 0))
    reader = FrameReader()
    reader.buffer()[: len(data)] = data
    reader.received(len(data))
    frame = reader.next_frame()
    assert frame is not None
    return frame


@given(is_duplicate=st.booleans(), first=u64, stored_at_ms=st.integers(-(2**63), 2**63 - 1))
def test_good_news_is_read_the_short_way(
    *, is_duplicate: bool, first: int, stored_at_ms: int
) -> None:
    outcome = Outcome(ErrorCode.NONE, is_duplicate, ConsumeSequence(first), stored_at_ms)

    found = read_single_stored(frame_of(Sent((outcome,))))

    assert found == SingleStored(is_duplicate, first, stored_at_ms)


@given(
    is_duplicate=st.booleans(),
    first=u64,
    stored_at_ms=st.integers(-(2**63), 2**63 - 1),
    request_id=u32,
    epoch=u32,
)
def test_good_news_is_written_in_the_same_frame(
    *, is_duplicate: bool, first: int, stored_at_ms: int, request_id: int, epoch: int
) -> None:
    outcome = Outcome(ErrorCode.NONE, is_duplicate, ConsumeSequence(first), stored_at_ms)

    short = encode_single_stored(
        is_duplicate=is_duplicate,
        first_sequence=first,
        stored_at_ms=stored_at_ms,
        request_id=request_id,
        epoch=epoch,
    )

    assert short == b"".join(encode_response(Sent((outcome,)), request_id, epoch))


@pytest.mark.parametrize(
    "outcomes",
    [
        (),
        (Outcome(ErrorCode.OVERLOADED, False, ConsumeSequence(0), 0),),
        (Outcome(ErrorCode.NONE, False, ConsumeSequence(0), 0, "text"),),
        (Outcome(ErrorCode.NONE, False, ConsumeSequence(0), 0),) * 2,
    ],
)
def test_other_news_is_left_to_the_long_way(outcomes: tuple[Outcome, ...]) -> None:
    assert read_single_stored(frame_of(Sent(outcomes))) is None


def test_a_body_is_bytes() -> None:
    assert as_body(bytearray(b"x")) == b"x"
    with pytest.raises(UsageError, match="not int"):
        as_body(1)

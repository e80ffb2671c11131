"""Bytes that are not a batch are refused as such: nothing passes, and nothing else goes wrong."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pulque.errors import InvalidBatchError
from pulque.model.batch import (
    HEADER,
    HEADER_SIZE,
    Codec,
    read_header,
    seal,
    slice_batch,
    verify_crc,
)
from tests.property.batch_values import SEED, Draft, drafts, messages_of, packed, read_all

SAMPLE = [
    Draft(body=b"plain"),
    Draft(body=b"full", key="k", order_key="o", tags=("a", "b"), headers=(("h", "v"),)),
    Draft(body=b"passed on", expires_at_ms=5, created_at_ms=6, attempt=7, id=b"0123456789abcdef"),
]


def passes(batch: bytes) -> bool:
    """Say whether a reader would take these bytes for a batch that is whole."""
    try:
        read_header(batch)
    except InvalidBatchError:
        return False
    return verify_crc(batch, SEED)


def read_or_refuse(batch: bytes) -> None:
    """Read everything; the only thing that may go wrong is that the batch is invalid."""
    with suppress(InvalidBatchError):
        read_all(messages_of(batch))
    with suppress(InvalidBatchError):
        slice_batch(batch, 0, 1, SEED)


@pytest.mark.parametrize("codec", Codec)
def test_every_change_of_one_byte_is_caught(codec: Codec, seed: int) -> None:
    batch = packed(SAMPLE, codec=codec)
    random = Random(seed)
    assert passes(batch)

    for at in range(len(batch)):
        for change in {1, 0x80, 0xFF, random.randrange(1, 256)}:
            damaged = bytearray(batch)
            damaged[at] ^= change
            assert not passes(bytes(damaged)), (at, change)


@given(messages=st.lists(drafts, min_size=1, max_size=4), data=st.data())
def test_any_change_of_one_byte_of_any_batch_is_caught(
    messages: list[Draft], data: st.DataObject
) -> None:
    damaged = bytearray(packed(messages))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))

    assert not passes(bytes(damaged))


@given(messages=st.lists(drafts, min_size=1, max_size=4), data=st.data())
def test_a_batch_that_was_cut_or_has_a_tail_is_caught(
    messages: list[Draft], data: st.DataObject
) -> None:
    batch = packed(messages, codec=data.draw(st.sampled_from(Codec)))
    size = data.draw(st.integers(0, len(batch) - 1))
    tail = data.draw(st.binary(min_size=1, max_size=20))

    assert not passes(batch[:size])
    assert not passes(batch + tail)


def test_zeros_are_no_batch() -> None:
    for size in (0, 1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, 4096):
        assert not passes(bytes(size))


@given(data=st.binary(max_size=400))
def test_noise_is_refused(data: bytes) -> None:
    read_or_refuse(data)
    assert not passes(data)


@given(
    messages=st.lists(drafts, min_size=1, max_size=4),
    codec=st.sampled_from(Codec),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 30),
)
def test_a_forged_batch_is_read_or_refused(
    messages: list[Draft], codec: Codec, changes: list[tuple[int, int]], cut: int
) -> None:
    """Its crc is right, so that all that is left to trust are its parts."""
    forged = bytearray(packed(messages, codec=codec))
    for at, value in changes:
        forged[at % len(forged)] = value
    del forged[len(forged) - min(cut, len(forged) - 4) :]

    read_or_refuse(seal(bytes(forged[4:]), SEED))


@given(
    flags=st.one_of(st.integers(0, 511), st.integers(0, 0xFFFF)),
    codec=st.one_of(st.integers(0, 2), st.integers(0, 255)),
    priority=st.one_of(st.integers(0, 9), st.integers(0, 255)),
    count=st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)),
    size=st.one_of(st.none(), st.integers(0, 200), st.integers(0, 2**32 - 1)),
    rest=st.binary(max_size=400),
)
@example(flags=0, codec=0, priority=0, count=1, size=16, rest=b"\0\0\0\0" + bytes(16))
@example(flags=2, codec=0, priority=0, count=1, size=18, rest=bytes(8 + 16) + b"\xff\xff")
@example(flags=1, codec=1, priority=0, count=1, size=2**32 - 1, rest=bytes(20))
@example(flags=1, codec=2, priority=0, count=1, size=2**32 - 1, rest=bytes(20))
def test_a_made_up_header_is_read_or_refused(
    flags: int, codec: int, priority: int, count: int, size: int | None, rest: bytes
) -> None:
    records_size = len(rest) if size is None else size
    header = HEADER.pack(0, flags, codec, priority, count, records_size, 0, 0, 0, 0, 0)

    read_or_refuse(seal(header[4:] + rest, SEED))


@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 12), st.integers(0, 2**32 - 1)), min_size=3, max_size=3
    ),
    key_sizes=st.lists(st.integers(0, 14), min_size=3, max_size=3),
    data=st.binary(min_size=18, max_size=18),
)
def test_sizes_that_lie_never_show_one_message_in_another(
    sizes: list[int], key_sizes: list[int], data: bytes
) -> None:
    """Either all three messages are where the sizes say, and lie in the data, or none is."""
    columns = b"".join(size.to_bytes(4, "little") for size in sizes) + bytes(12)
    records = (
        b"i" * 48 + b"".join(size.to_bytes(2, "little") for size in key_sizes) + data
    )  # ids, key sizes, data
    header = HEADER.pack(0, 2, 0, 0, 3, len(records), 0, 0, 0, 0, 0)
    batch = seal(header[4:] + columns + records, SEED)
    is_true = sum(sizes) == 18 and all(k <= s for k, s in zip(key_sizes, sizes, strict=True))

    try:
        bodies = [message.body for message in messages_of(batch)]
    except InvalidBatchError:
        assert not is_true
        return
    assert is_true
    starts = [sum(sizes[:i]) for i in range(3)]
    assert bodies == [
        data[start + key : start + size]
        for start, key, size in zip(starts, key_sizes, sizes, strict=True)
    ]

"""An envelope comes back as it was packed, or in words what is wrong with it."""

from struct import pack

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.model.positions import ConsumeSequence, Epoch, MessageOffset, PartitionId
from pulque.model.record import (
    ENVELOPE_SIZE,
    Envelope,
    RecordType,
    pack_batch_envelope,
    pack_envelope,
    read_envelope,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
envelopes = st.builds(
    Envelope,
    type=st.sampled_from(RecordType),
    size=st.integers(ENVELOPE_SIZE, 2**32 - 1),
    offset=u64,
    synced=u64,
    epoch=u32,
    partition=u32,
    first_sequence=u64,
    stored_at_ms=st.integers(-(2**63), 2**63 - 1),
    count=u32,
)
SAMPLE = Envelope(
    RecordType.BATCH,
    1234,
    MessageOffset(5678),
    MessageOffset(4444),
    Epoch(7),
    PartitionId(8),
    ConsumeSequence(9),
    1_700_000_000_000,
    10,
)


@given(envelope=envelopes, before=st.binary(max_size=20), after=st.binary(max_size=20))
def test_an_envelope_comes_back_wherever_it_lies(
    envelope: Envelope, before: bytes, after: bytes
) -> None:
    data = before + pack_envelope(envelope) + after
    found = read_envelope(data, len(before))

    assert found == envelope
    assert isinstance(found, Envelope)
    assert isinstance(found.type, RecordType)


def test_an_envelope_is_these_bytes() -> None:
    fields = b"PL" + pack("<BBIQQIIQqI", 1, 1, 1234, 5678, 4444, 7, 8, 9, 1_700_000_000_000, 10)

    assert pack_envelope(SAMPLE) == fields + pack("<I", google_crc32c.value(fields))


@given(envelopes)
def test_the_short_way_packs_the_same_bytes(envelope: Envelope) -> None:
    _, *fields = envelope

    assert pack_batch_envelope(*fields) == pack_envelope(envelope._replace(type=RecordType.BATCH))


def test_every_flip_of_a_byte_is_refused() -> None:
    packed = pack_envelope(SAMPLE)

    for at in range(ENVELOPE_SIZE):
        for change in range(1, 256):
            damaged = bytearray(packed)
            damaged[at] ^= change
            assert isinstance(read_envelope(bytes(damaged)), str), (at, change)


def test_every_cut_is_refused() -> None:
    packed = pack_envelope(SAMPLE)

    for size in range(ENVELOPE_SIZE):
        assert read_envelope(packed[:size]) == (
            f"{size} bytes left, an envelope has {ENVELOPE_SIZE}"
        )


def test_zeros_are_no_envelope() -> None:
    assert read_envelope(bytes(1000)) == "magic 0x0000 is not 0x4c50"


@pytest.mark.parametrize(
    ("kind", "version", "size", "complaint"),
    [
        (1, 2, 1234, "version 2 or type 1 is unknown"),
        (3, 1, 1234, "version 1 or type 3 is unknown"),
        (1, 1, ENVELOPE_SIZE - 1, "smaller than the envelope"),
    ],
)
def test_what_another_version_may_have_written_is_told(
    kind: int, version: int, size: int, complaint: str
) -> None:
    fields = b"PL" + pack("<BBIQQIIQqI", kind, version, size, 0, 0, 0, 0, 0, 0, 1)
    found = read_envelope(fields + pack("<I", google_crc32c.value(fields)))

    assert isinstance(found, str)
    assert complaint in found


@given(data=st.binary(max_size=ENVELOPE_SIZE + 10), at=st.integers(0, 80))
def test_noise_is_refused_in_words(data: bytes, at: int) -> None:
    assert isinstance(read_envelope(data, at), str)

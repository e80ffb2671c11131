"""The short way to a record of one message leads where the long way does, or nowhere."""

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from pulque.client.receiving.delivery_decoder import batches_of
from pulque.client.receiving.log_records import read_record, read_single
from pulque.client.receiving.received_message import ReceivedBatch
from pulque.errors import CorruptionError, InvalidBatchError, RemoteProtocolError
from pulque.model.batch import Codec, seal
from pulque.model.message import Message, StoredBatch
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.model.record import ENVELOPE_SIZE, pack_batch_envelope
from pulque.wire.responses import Delivered
from tests.property.batch_values import (
    FIRST_SEQUENCE,
    PARTITION,
    SEED,
    STORED_AT_MS,
    Draft,
    drafts,
    opened,
    packed,
    read_all,
)

TENURE = Tenure(Epoch(3), StartCount(5))
codecs = st.sampled_from(Codec)
SLOTS = (*StoredBatch.__slots__, *ReceivedBatch.__slots__)


def record(batch: bytes, count: int, first: int = FIRST_SEQUENCE) -> bytes:
    size = ENVELOPE_SIZE + len(batch)
    return pack_batch_envelope(size, 9, 0, 3, 1, first, STORED_AT_MS, count) + batch


def delivered(records: bytes, first: int, count: int) -> Delivered:
    pull = PullSequence(1000 + first)
    return Delivered(0, TENURE, pull, ConsumeSequence(first), count, memoryview(records))


def long_way(batch: bytes) -> ReceivedBatch:
    return ReceivedBatch(
        batch,
        partition=PARTITION,
        first_sequence=FIRST_SEQUENCE,
        stored_at_ms=STORED_AT_MS,
        pull_base=1000 + FIRST_SEQUENCE,
        start=0,
        end=1,
        tenure=TENURE,
    )


@given(message=drafts)
def test_both_ways_give_the_same(message: Draft) -> None:
    batch = packed([message])
    records = record(batch, 1)
    assert read_single(records, 0, SEED) is not None, "the long way was taken"

    (short,) = batches_of(PARTITION, delivered(records, FIRST_SEQUENCE, 1))
    assert isinstance(short, ReceivedBatch)

    long = long_way(batch)
    assert [getattr(short, name) for name in SLOTS] == [getattr(long, name) for name in SLOTS]
    assert read_all([Message(short, 0)]) == read_all([Message(long, 0)])


@given(piles=st.lists(st.lists(drafts, min_size=1, max_size=3), max_size=5), codec=codecs)
def test_singles_and_others_come_in_order(piles: list[list[Draft]], codec: Codec) -> None:
    first, records, expected = 0, b"", list[tuple[int, Draft]]()
    for pile in piles:
        batch = packed(pile, codec=codec)
        records += record(batch, len(pile), first)
        stored = opened(batch)
        read = read_all([Message(stored, i) for i in range(len(pile))])
        expected += [(first + i, each) for i, each in enumerate(read)]
        first += len(pile) + 2  # some are left out between them

    found = [
        Message(batch, index)
        for batch in batches_of(PARTITION, delivered(records, 0, first))
        if isinstance(batch, ReceivedBatch)
        for index in range(batch.start, batch.end)
    ]

    sequences = [each.sequence for each in found]
    assert list(zip(sequences, read_all(found), strict=True)) == expected


@given(message=drafts, codec=codecs, data=st.data())
def test_damage_is_not_taken_for_a_single(
    message: Draft, codec: Codec, data: st.DataObject
) -> None:
    records = bytearray(record(packed([message], codec=codec), 1))
    at = data.draw(st.integers(0, len(records) - 1))
    records[at] ^= data.draw(st.integers(1, 255))

    assert read_single(bytes(records), 0, SEED) is None
    whole = record(packed([message]), 1)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert read_single(whole[:cut], 0, SEED) is None


@given(message=drafts, data=st.data())
def test_nonsense_under_a_good_crc_is_left_to_the_long_way(
    message: Draft, data: st.DataObject
) -> None:
    rest = bytearray(packed([message])[4:])
    at = data.draw(st.integers(0, 51))
    rest[at] = data.draw(st.integers(0, 255))
    records = record(seal(bytes(rest), SEED), 1)

    short = read_single(records, 0, SEED)

    if short is not None:
        served = read_record(records, 0, PARTITION, FIRST_SEQUENCE, FIRST_SEQUENCE + 1)
        assert long_way(served.data).header == short[1]
    else:
        with suppress(InvalidBatchError, CorruptionError, RemoteProtocolError):
            list(batches_of(PARTITION, delivered(records, FIRST_SEQUENCE, 1)))

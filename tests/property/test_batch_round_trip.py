"""What goes into a batch comes out of it, whole or sliced, compressed or not.

The oracle is what was put in: no test here compares the code with itself.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.model.batch import Codec, read_header, seed_of, slice_batch, verify_crc
from pulque.model.pack import ProducedBy
from pulque.model.tags import bits_of_tag
from tests.property.batch_values import (
    CREATED_AT_MS,
    FIRST_SEQUENCE,
    PARTITION,
    SEED,
    STORED_AT_MS,
    Draft,
    drafts,
    ids_for,
    messages_of,
    opened,
    packed,
    read_all,
)

plain_drafts = st.builds(Draft, body=st.binary(max_size=40))
keyed_drafts = st.builds(
    Draft, body=st.binary(max_size=20), key=st.text(st.characters(codec="utf-8"), max_size=5)
)
any_batch = st.one_of(
    st.lists(drafts, min_size=1, max_size=8),
    st.lists(plain_drafts, min_size=1, max_size=8),
    st.lists(keyed_drafts, min_size=1, max_size=8),
)


def expected(messages: list[Draft]) -> list[Draft]:
    """What a reader must see: the id and the time of a message that brought none are given."""
    ids = ids_for(len(messages))
    return [
        replace(
            message,
            id=message.id or ids[16 * i : 16 * i + 16],
            created_at_ms=message.created_at_ms or CREATED_AT_MS,
        )
        for i, message in enumerate(messages)
    ]


@given(messages=any_batch, codec=st.sampled_from(Codec))
def test_messages_come_out_as_they_went_in(messages: list[Draft], codec: Codec) -> None:
    batch = packed(messages, codec=codec)

    assert verify_crc(batch, SEED)
    assert read_all(messages_of(batch)) == expected(messages)


@given(
    messages=any_batch,
    priority=st.integers(0, 9),
    produced_by=st.builds(
        ProducedBy,
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.booleans(),
    ),
    codec=st.sampled_from(Codec),
)
def test_the_header_says_who_packed_what(
    messages: list[Draft], priority: int, produced_by: ProducedBy, codec: Codec
) -> None:
    batch = packed(messages, priority=priority, produced_by=produced_by, codec=codec)
    header = read_header(batch)

    assert (header.priority, header.codec, header.count) == (priority, codec, len(messages))
    found = (header.producer_id, header.incarnation, header.producer_sequence)
    assert (*found, bool(header.flags & 256)) == produced_by
    assert header.created_at_ms == CREATED_AT_MS


@given(messages=any_batch)
def test_a_message_knows_where_it_lies(messages: list[Draft]) -> None:
    found = messages_of(packed(messages, priority=7))

    for i, message in enumerate(found):
        assert message.sequence == FIRST_SEQUENCE + i
        assert message.partition == PARTITION
        assert message.subject == "orders"
        assert message.stored_at_ms == STORED_AT_MS
        assert message.priority == 7


@given(messages=any_batch)
def test_tag_bits_cover_every_tag(messages: list[Draft]) -> None:
    batch = packed(messages)
    stored = opened(batch)
    union = read_header(batch).tag_union

    for i, message in enumerate(messages):
        for tag in message.tags:
            assert stored.column("tag_bits")[i] & bits_of_tag(tag) == bits_of_tag(tag)
            assert union & bits_of_tag(tag) == bits_of_tag(tag)
    if not any(message.tags for message in messages):
        assert union == 0


@given(messages=any_batch)
def test_every_slice_is_a_batch_of_those_messages(messages: list[Draft]) -> None:
    batch = packed(messages)
    whole = expected(messages)

    for start in range(len(messages)):
        for end in range(start + 1, len(messages) + 1):
            part = slice_batch(batch, start, end, SEED)
            assert verify_crc(part, SEED)
            assert read_all(messages_of(part)) == whole[start:end]
    assert slice_batch(batch, 0, len(messages), SEED) == batch


@given(messages=any_batch, codec=st.sampled_from(Codec), other=st.text(min_size=1, max_size=10))
def test_a_batch_verifies_in_its_own_partition_only(
    messages: list[Draft], codec: Codec, other: str
) -> None:
    batch = packed(messages, codec=codec)

    assert verify_crc(batch, SEED)
    assert verify_crc(batch, seed_of(other)) is (other == PARTITION)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_compression_shrinks_what_repeats(codec: Codec) -> None:
    messages = [Draft(body=b"the same again and again " * 10)] * 100

    assert len(packed(messages, codec=codec)) < len(packed(messages)) / 5


@pytest.mark.parametrize("codec", Codec)
def test_the_largest_count_fits(codec: Codec) -> None:
    messages = [Draft(body=b"%d" % i) for i in range(10_000)]
    found = messages_of(packed(messages, codec=codec))

    assert [message.body for message in found] == [message.body for message in messages]

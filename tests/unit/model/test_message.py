"""A message shows its fields, or says that they cannot be read."""

from struct import pack

import pytest

from pulque.errors import InvalidBatchError
from pulque.model.batch import Flag
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, parse_partition
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence

PLACE = PartitionName("p")


def message_with(**parts: bytes) -> Message:
    return Message(stored(batch_with(**parts)), 0)


def batch_with(**parts: bytes) -> bytes:
    packer = BatchPacker()
    packer.add_encoded(b"body", **parts)  # type: ignore[arg-type]
    return packer.encode(seed=0, ids=bytes(range(16)), created_at_ms=1)


def stored(batch: bytes, partition: PartitionName = PLACE) -> StoredBatch:
    return StoredBatch(
        batch, partition=partition, first_sequence=ConsumeSequence(7), stored_at_ms=9
    )


def test_a_plain_message_has_no_more_than_a_body() -> None:
    message = message_with()

    assert message.body == b"body"
    assert (message.key, message.order_key, message.tags, message.headers) == (None, None, (), {})
    assert (message.attempt, message.priority, message.expires_at_ms) == (1, 4, 0)
    assert (message.created_at_ms, message.stored_at_ms, message.sequence) == (1, 9, 7)
    assert repr(message) == "<Message 000102030405060708090a0b0c0d0e0f p/7 attempt=1 4 bytes>"


@pytest.mark.parametrize("partition", ["orders", "orders#2", "%retry%orders%billing"])
def test_the_subject_is_the_one_that_was_sent_to(partition: str) -> None:
    message = Message(stored(batch_with(), parse_partition(partition)), 0)

    assert message.subject == "orders"


@pytest.mark.parametrize("field", ["key", "order_key", "tags", "headers"])
def test_what_is_no_text_is_refused_on_access(field: str) -> None:
    message = message_with(**{field: b"a\0\xff"})

    assert message.body == b"body"
    with pytest.raises(InvalidBatchError, match="not UTF-8"):
        getattr(message, field)


@pytest.mark.parametrize("headers", [b"a\0b\0c", b"\0b", b"a\0b\0\0d", b"a"])
def test_a_header_without_a_name_or_a_value_is_refused_on_access(headers: bytes) -> None:
    with pytest.raises(InvalidBatchError, match="no name, or no value"):
        _ = message_with(headers=headers).headers


def test_parts_longer_than_their_message_are_refused() -> None:
    packer = BatchPacker()
    packer.add(b"body", key="key")
    packer.add(b"the next one", key="secret")
    batch = packer.encode(seed=0, ids=bytes(32), created_at_ms=1)
    sizes = pack("<2H", 3, 6)
    assert batch.count(sizes) == 1
    forged = stored(batch.replace(sizes, pack("<2H", 14, 6)))

    with pytest.raises(InvalidBatchError, match="longer than the message"):
        _ = Message(forged, 0).key
    with pytest.raises(InvalidBatchError, match="longer than the message"):
        _ = Message(forged, 0).body


def test_a_part_that_the_batch_does_not_have_is_empty() -> None:
    packer = BatchPacker()
    packer.add(b"body", key="key")
    batch = stored(packer.encode(seed=0, ids=bytes(16), created_at_ms=1))

    assert batch.part(0, Flag.KEYS) == b"key"
    assert batch.part(0, Flag.TAGS) == b""
    assert batch.part(0, Flag.DUE) == b""

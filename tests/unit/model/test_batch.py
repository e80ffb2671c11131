"""The batch as the format page has it, built by hand; and what is refused."""

from struct import pack

import google_crc32c
import pytest

from pulque.errors import InvalidBatchError
from pulque.model.batch import (
    HEADER_SIZE,
    MAX_RECORDS_SIZE,
    BatchHeader,
    Codec,
    Flag,
    layout_of,
    read_header,
    seal,
    seed_of,
    slice_batch,
    verify_crc,
)
from pulque.model.message import StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.positions import ConsumeSequence

IDS = bytes(range(48))


def header_with(**changes: int) -> bytes:
    """One message without a body, sealed, with some fields of the header changed."""
    header = BatchHeader(0, 0, 0, 4, 1, 16, 0, 0, 0, 0, 0)._replace(**changes)
    return seal(pack("<HBBIIQIQqQ", *header[1:]) + pack("<I", 0) + IDS[:16], 0)


def test_a_batch_of_bodies_is_these_bytes() -> None:
    packer = BatchPacker()
    packer.bodies += [b"one", b"", b"three"]
    produced_by = ProducedBy(producer_id=11, incarnation=12, sequence=13)
    batch = packer.encode(
        seed=seed_of("orders"), ids=IDS, created_at_ms=14, produced_by=produced_by, priority=9
    )

    rest = (
        pack("<HBBII", 0, 0, 9, 3, 48 + 8)  # flags, codec, priority, count, size of records
        + pack("<QIQqQ", 11, 12, 13, 14, 0)  # producer, created, tag union
        + pack("<3I", 3, 0, 5)  # sizes
        + IDS
        + b"onethree"
    )
    seed = google_crc32c.value(b"orders")
    assert batch == pack("<I", google_crc32c.extend(seed, rest)) + rest


def test_a_batch_with_everything_is_these_bytes() -> None:
    packer = BatchPacker()
    packer.add(b"B", key="K", order_key="OO", tags=["t", "uu"], headers={"h": "vv"})
    packer.add_encoded(b"bb", expires_at_ms=5, created_at_ms=6, attempt=7, message_id=b"i" * 16)
    batch = packer.encode(
        seed=0, ids=IDS[:32], created_at_ms=14, produced_by=ProducedBy(1, 2, 3, named=True)
    )

    tag_bits = 0
    for crc in map(google_crc32c.value, (b"t", b"uu")):
        tag_bits |= 1 << crc % 64 | 1 << crc // 64 % 64 | 1 << crc // 4096 % 64
    data = b"K" + b"OO" + b"t\0uu" + b"h\0vv" + b"B" + b"bb"
    records = (
        IDS[:16]
        + b"i" * 16
        + pack("<2q", 0, 6)  # created
        + pack("<2q", 0, 5)  # expires
        + pack("<2H", 1, 7)  # attempt
        + pack("<2H", 1, 0)  # size of the key
        + pack("<2H", 2, 0)  # … of the order key
        + pack("<2H", 4, 0)  # … of the tags
        + pack("<2I", 4, 0)  # … of the headers
        + data
    )
    rest = (
        pack("<HBBII", 1 | 2 | 8 | 16 | 32 | 64 | 128 | 256, 0, 4, 2, len(records))
        + pack("<QIQqQ", 1, 2, 3, 14, tag_bits)
        + pack("<2I", 12, 2)
        + pack("<2Q", tag_bits, 0)
        + pack("<2I", google_crc32c.value(b"K"), 0)
        + records
    )
    assert batch[4:] == rest


def test_the_seed_is_the_crc_of_the_name() -> None:
    assert seed_of("orders") == google_crc32c.value(b"orders")
    assert seed_of("a") != seed_of("b")


def test_every_flag_adds_its_columns() -> None:
    assert layout_of(0).visible_width + layout_of(0).record_width == 20
    assert layout_of(0x1FF).visible_width == 4 + 8 + 4 + 8
    assert layout_of(0x1FF).record_width == 16 + 8 + 8 + 2 + 2 + 2 + 2 + 4


def test_the_smallest_batch_is_read() -> None:
    assert read_header(header_with()).count == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"count": 0}, "0 messages; 1 to 10000"),
        ({"count": 10_001, "records_size": 160_016}, "10001 messages"),
        ({"count": 2**32 - 1}, "4294967295 messages"),
        ({"count": 2}, "shorter than their columns"),
        ({"flags": 512}, "flags 0x200"),
        ({"codec": 3}, "codec 3"),
        ({"priority": 10}, "priority 10"),
        ({"records_size": 15}, "shorter than their columns"),
        ({"records_size": 17}, "does not fit"),
        ({"codec": 1, "records_size": MAX_RECORDS_SIZE + 1}, "at most 67108864"),
        ({"flags": 4}, "does not fit"),
    ],
)
def test_a_header_that_cannot_be_is_refused(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(InvalidBatchError, match=complaint):
        read_header(header_with(**changes))


@pytest.mark.parametrize("size", [0, 1, 51])
def test_what_is_shorter_than_a_header_is_refused(size: int) -> None:
    with pytest.raises(InvalidBatchError, match=f"batch of {size} bytes is shorter"):
        read_header(header_with()[:size])


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (2, 1), (-1, 1), (0, 4), (3, 4)])
def test_a_slice_outside_of_the_batch_is_refused(start: int, end: int) -> None:
    packer = BatchPacker()
    packer.bodies += [b"one", b"two", b"three"]
    batch = packer.encode(seed=0, ids=IDS, created_at_ms=0)

    with pytest.raises(InvalidBatchError, match=f"messages {start}..{end} of a batch of 3"):
        slice_batch(batch, start, end, 0)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_compressed_batch_is_not_sliced(codec: Codec) -> None:
    packer = BatchPacker()
    packer.bodies += [b"one", b"two", b"three"]
    batch = packer.encode(seed=0, ids=IDS, created_at_ms=0, codec=codec)

    with pytest.raises(InvalidBatchError, match="cannot be sliced"):
        slice_batch(batch, 0, 1, 0)


def test_sizes_beyond_the_data_are_not_sliced() -> None:
    batch = seal(header_with()[4:HEADER_SIZE] + pack("<I", 1) + IDS[:16], 0)

    with pytest.raises(InvalidBatchError, match="do not add up"):
        slice_batch(batch, 0, 1, 0)


@pytest.mark.parametrize("size", [0, 3, 4, 51])
def test_what_is_shorter_than_a_header_does_not_verify(size: int) -> None:
    rest = bytes(max(0, size - 4))

    assert not verify_crc(seal(rest, 0)[:size], 0)


def test_a_batch_with_due_times_is_read_and_sliced() -> None:
    """No packer writes them yet; the format has them."""
    header = BatchHeader(0, Flag.DUE, 0, 4, 2, 32 + 5, 0, 0, 0, 0, 0)
    columns = pack("<2I", 3, 2) + pack("<2q", 111, -222)
    batch = seal(pack("<HBBIIQIQqQ", *header[1:]) + columns + IDS[:32] + b"onetw", 0)
    part = slice_batch(batch, 1, 2, 0)

    assert column(batch, "due_at_ms") == (111, -222)
    assert column(part, "due_at_ms") == (-222,)
    assert part.endswith(IDS[16:32] + b"tw")


def column(batch: bytes, name: str) -> tuple[int, ...]:
    return StoredBatch(
        batch, partition=PartitionName("p"), first_sequence=ConsumeSequence(0), stored_at_ms=0
    ).column(name)


def test_a_slice_has_a_crc_of_its_own() -> None:
    packer = BatchPacker()
    packer.bodies += [b"one", b"two", b"three"]
    batch = packer.encode(seed=5, ids=IDS, created_at_ms=0)

    assert verify_crc(slice_batch(batch, 1, 2, 5), 5)
    assert not verify_crc(slice_batch(batch, 1, 2, 6), 5)

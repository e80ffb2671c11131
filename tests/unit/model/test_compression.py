"""Compressed records give exactly what their header declares, and never blow up."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import zstandard
from lz4 import block

from pulque.errors import InvalidBatchError, UsageError
from pulque.model.batch import HEADER, Codec, seal
from pulque.model.compression import compress, decompress
from pulque.model.message import StoredBatch
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence

MIB = 1024 * 1024
SMALL = 2 * MIB


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """Tell how many bytes were allocated at most; both packages allocate through Python."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def zeros(codec: Codec, size: int) -> bytes:
    return compress(bytes(size), codec)


def open_batch(codec: Codec, records: bytes, records_size: int) -> StoredBatch:
    header = HEADER.pack(0, 0, codec, 4, 1, records_size, 0, 0, 0, 0, 0)
    size = (records_size - 16).to_bytes(4, "little")
    return StoredBatch(
        seal(header[4:] + size + records, 0),
        partition=PartitionName("p"),
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_allocation_is_seen_by_these_tests(codec: Codec, peak: Callable[[], int]) -> None:
    records = zeros(codec, 8 * MIB)
    tracemalloc.reset_peak()

    decompress(records, codec, 8 * MIB)

    assert peak() >= 8 * MIB


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("declared", [1, 100, 65_536])
def test_records_that_hold_more_than_declared_are_refused(
    codec: Codec, declared: int, peak: Callable[[], int]
) -> None:
    records = zeros(codec, 64 * MIB)
    tracemalloc.reset_peak()
    before = peak()

    with pytest.raises(InvalidBatchError):
        decompress(records, codec, declared)
    assert peak() - before < SMALL


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_records_that_hold_less_than_declared_are_refused(codec: Codec) -> None:
    with pytest.raises(InvalidBatchError):
        decompress(zeros(codec, 100), codec, 101)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("declared", [64 * MIB + 1, 2**31, 2**32 - 1])
def test_a_header_that_declares_too_much_is_refused_unopened(
    codec: Codec, declared: int, peak: Callable[[], int]
) -> None:
    with pytest.raises(InvalidBatchError, match=f"records of {declared} bytes"):
        open_batch(codec, zeros(codec, 100), declared)
    assert peak() < SMALL


def test_a_frame_that_declares_more_than_the_header_is_refused(peak: Callable[[], int]) -> None:
    records = bytearray(zeros(Codec.ZSTD, 300))
    assert zstandard.frame_content_size(bytes(records)) == 300
    # Frame header: descriptor 0x60 (single segment, two bytes of size), then the size less 256.
    assert records[4:7] == b"\x60\x2c\x00"
    records[4:7] = b"\xa0" + (2**31).to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(records)) == 2**31

    with pytest.raises(InvalidBatchError, match="not a zstd frame of 300 bytes"):
        decompress(bytes(records), Codec.ZSTD, 300)
    assert peak() < SMALL


def test_a_frame_that_declares_no_size_is_refused() -> None:
    records = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))

    with pytest.raises(InvalidBatchError):
        decompress(records, Codec.ZSTD, 100)


def test_a_frame_that_holds_more_than_it_declares_is_refused() -> None:
    records = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    assert records[4:6] == b"\x20\xc8"  # single segment, one byte of size
    records[5] = 100

    with pytest.raises(InvalidBatchError):
        decompress(bytes(records), Codec.ZSTD, 100)


def test_bytes_after_the_frame_are_refused() -> None:
    with pytest.raises(InvalidBatchError):
        decompress(zeros(Codec.ZSTD, 100) + b"more", Codec.ZSTD, 100)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("records", [b"", b"\0", b"\xff" * 30, b"plain text"])
def test_what_was_never_compressed_is_refused(codec: Codec, records: bytes) -> None:
    with pytest.raises(InvalidBatchError):
        decompress(records, codec, 100)


@pytest.mark.parametrize(("codec", "package"), [(Codec.LZ4, "lz4"), (Codec.ZSTD, "zstandard")])
def test_a_package_that_is_missing_is_named(
    codec: Codec, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(UsageError, match=rf"{package} is not installed: pip install 'pulque\["):
        compress(b"abc", codec)
    with pytest.raises(UsageError, match=package):
        decompress(b"abc", codec, 3)


def test_lz4_records_are_one_block_without_its_size() -> None:
    assert compress(b"abc" * 50, Codec.LZ4) == block.compress(b"abc" * 50, store_size=False)

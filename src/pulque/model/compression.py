"""Compression of a batch's records: lz4 for speed, zstd for size, both optional.

Decompression never gives more than the header declares, and ``read_header`` has checked that
against ``MAX_RECORDS_SIZE``, so a small batch cannot fill the memory.
"""

from typing import Any

from pulque.errors import InvalidBatchError, UsageError
from pulque.model.batch import Codec

__all__ = ["check_compressed", "compress", "decompress"]

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEAD = 18
"""The longest header of a zstd frame."""
_LZ4_RATIO = 255
"""The most bytes that a byte of an lz4 block expands to."""


def compress(records: bytes, codec: Codec) -> bytes:
    """Return ``records`` compressed with ``codec``."""
    if codec is Codec.NONE:
        return records
    if codec is Codec.LZ4:
        return bytes(_lz4().compress(records, store_size=False))
    return bytes(_zstd().ZstdCompressor(level=3).compress(records))


def decompress(records: bytes, codec: int, size: int) -> bytes:
    """Return ``records`` decompressed, which must give exactly ``size`` bytes.

    Raises:
        InvalidBatchError: The size differs.
    """
    if codec == Codec.NONE:
        plain = records
    elif codec == Codec.LZ4:
        plain = _decompress_lz4(records, size)
    else:
        plain = _decompress_zstd(records, size)
    if len(plain) != size:
        raise InvalidBatchError(f"records decompress to {len(plain)} bytes, not to {size}")
    return plain


def check_compressed(records: bytes | memoryview, codec: int, size: int) -> None:
    """Refuse records that cannot decompress to ``size`` bytes, by their first bytes alone.

    Needs no compression library. Records that pass may still be damaged further on.

    Raises:
        InvalidBatchError: The records are invalid.
    """
    if codec == Codec.ZSTD and _zstd_size(bytes(records[:_ZSTD_HEAD])) != size:
        raise InvalidBatchError(f"records are not a zstd frame of {size} bytes")
    if codec == Codec.LZ4 and not 0 < size <= _LZ4_RATIO * len(records):
        raise InvalidBatchError(f"records of {len(records)} bytes are not lz4 of {size} bytes")


def _zstd_size(head: bytes) -> int | None:
    """Return the content size that the header of a zstd frame declares (RFC 8878)."""
    if len(head) < 6 or not head.startswith(_ZSTD_MAGIC):
        return None
    descriptor = head[4]
    is_single = bool(descriptor & 0x20)
    width = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    field = head[at : at + width]
    if not width or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


def _decompress_lz4(records: bytes, size: int) -> bytes:
    block = _lz4()
    try:
        return bytes(block.decompress(records, uncompressed_size=size))
    except block.LZ4BlockError as error:
        raise InvalidBatchError(f"records are not lz4 of {size} bytes: {error}") from None


def _decompress_zstd(records: bytes, size: int) -> bytes:
    zstd = _zstd()
    try:
        # A frame may declare any size and would get it allocated: it must be ours.
        if zstd.frame_content_size(records) != size:
            raise InvalidBatchError(f"records are not a zstd frame of {size} bytes")
        plain = zstd.ZstdDecompressor().decompress(
            records, max_output_size=size, allow_extra_data=False
        )
        return bytes(plain)
    except zstd.ZstdError as error:
        raise InvalidBatchError(f"records are not zstd of {size} bytes: {error}") from None


def _lz4() -> Any:
    try:
        from lz4 import block
    except ImportError:
        raise UsageError("lz4 is not installed: pip install 'pulque[lz4]'") from None
    return block


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UsageError("zstandard is not installed: pip install 'pulque[zstd]'") from None
    return zstandard

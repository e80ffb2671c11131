"""Compression of a batch's records: lz4 for speed, zstd for size, both optional.

Decompression never gives more than the header declares, and ``read_header`` has checked that
against ``MAX_RECORDS_SIZE``: a small batch cannot blow up.
"""

from typing import Any

from pulque.errors import InvalidBatchError, UsageError
from pulque.model.batch import Codec

__all__ = ["compress", "decompress"]


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
        InvalidBatchError: They do not.
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

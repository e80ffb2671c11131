"""CRC-32C of a batch without copying it: the crc stands before the bytes that it covers.

``google_crc32c`` takes whole ``bytes`` objects only, so leaving out the first four bytes would
cost a copy of the batch, more than the checksum itself. Instead the four bytes are included and
their effect is cancelled beforehand. After four bytes ``b`` a register ``r`` holds
``T(r ^ b)``, and ``T``, the passing of 32 zero bits, is invertible: to be at ``seed`` after them,
begin at ``back(seed) ^ b``.
"""

from functools import lru_cache
from struct import Struct

import google_crc32c

__all__ = ["before_crc", "crc_after_crc", "is_crc_of_rest"]

_POLYNOMIAL = 0x82F63B78
_ALL_BITS = 0xFFFFFFFF
_TOP_BIT = 0x80000000
_CRC = Struct("<I")


def crc_after_crc(data: bytes, seed: int) -> int:
    """Return the CRC-32C of ``data[4:]``, seeded, without copying it."""
    (first,) = _CRC.unpack_from(data)
    return int(google_crc32c.extend(before_crc(seed) ^ first, data))


def is_crc_of_rest(crc: int, data: bytes, seed: int) -> bool:
    """Return whether ``crc``, which ``data`` begins with, is the CRC-32C of the rest, seeded."""
    return google_crc32c.extend(before_crc(seed) ^ crc, data) == crc  # type: ignore[no-any-return]


@lru_cache(maxsize=65536)
def before_crc(seed: int) -> int:
    """Return the crc from which four zero bytes lead to ``seed``.

    For callers that check many batches: ``crc_after_crc`` begins with this, xor the four bytes.
    """
    register = seed ^ _ALL_BITS
    for _ in range(32):
        if register & _TOP_BIT:
            register = (register ^ _POLYNOMIAL) << 1 | 1
        else:
            register <<= 1
        register &= _ALL_BITS
    return register ^ _ALL_BITS

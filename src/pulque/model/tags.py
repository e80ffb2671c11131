"""Tags as bits: each tag sets three bits of a u64.

A filter tests bits first, vectorised and without opening records; different tags may share
bits, so the reader of the records compares the real strings afterwards. The bits are part of
the format: the same tag must give the same bits in every version.
"""

from collections.abc import Iterable
from functools import lru_cache

import google_crc32c

__all__ = ["bits_of_tag", "bits_of_tags"]


@lru_cache(maxsize=4096)
def bits_of_tag(tag: str) -> int:
    """Return the three bits (sometimes fewer, where they coincide) of one tag."""
    digest = int(google_crc32c.value(tag.encode()))
    return (1 << (digest & 63)) | (1 << (digest >> 6 & 63)) | (1 << (digest >> 12 & 63))


def bits_of_tags(tags: Iterable[str]) -> int:
    """Return the union of the bits of all tags."""
    bits = 0
    for tag in tags:
        bits |= bits_of_tag(tag)
    return bits

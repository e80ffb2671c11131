"""Message ids: 16 bytes, ordered by time, made by the producer.

The layout is that of a UUID of version 7, so that other tools can show and sort them::

    48 bits  milliseconds since 1970
     4 bits  0111, the version
    12 bits  the counter's high bits
     2 bits  10, the variant
    24 bits  the counter's low bits
    38 bits  random, drawn once per source

The counter orders ids of one millisecond; the random part keeps two sources apart. Ids of one
call are consecutive, so that a batch of a thousand is one multiplication: the first id in every
place of a very long number, plus the steps of the counter.
"""

import struct
from functools import lru_cache

__all__ = ["ID_SIZE", "IdSource", "created_at_ms_of", "show_id"]

ID_SIZE = 16
RANDOM_BITS = 38
_LOW_BITS = 24
_LOW_MASK = (1 << _LOW_BITS) - 1
_VERSION = 7 << 12
_VARIANT = 2 << 62
_PAIR = struct.Struct(">QQ")


@lru_cache(maxsize=16)
def _places(power: int) -> tuple[int, int]:
    """Return numbers of ``2**power`` places, 16 bytes each: ones, and the counter's steps."""
    count = 1 << power
    ones = int.from_bytes((b"\0" * (ID_SIZE - 1) + b"\1") * count, "big")
    steps = b"".join((i << RANDOM_BITS).to_bytes(ID_SIZE, "big") for i in range(count))
    return ones, int.from_bytes(steps, "big")


class IdSource:
    """Makes ids. One owner at a time; not thread-safe.

    Args:
        random: At least 38 random bits, drawn by the caller.
    """

    def __init__(self, random: int) -> None:
        self._tail = random & ((1 << RANDOM_BITS) - 1)
        self._counter = 0

    def one(self, now_ms: int) -> bytes:
        """Return a new id."""
        return self.many(now_ms, 1)

    def many(self, now_ms: int, count: int) -> bytes:
        """Return ``count`` new ids, one after the other in one bytes object."""
        counter = self._counter
        self._counter = counter + count
        if (counter & _LOW_MASK) + count > _LOW_MASK:
            return b"".join(self._pair(now_ms, counter + i) for i in range(count))
        first = self._pair(now_ms, counter)
        if count == 1:
            return first
        power = (count - 1).bit_length()
        ones, steps = _places(power)
        places = int.from_bytes(first, "big") * ones + steps
        # There are more places than ids; those in front are the first ids.
        return places.to_bytes(ID_SIZE << power, "big")[: ID_SIZE * count]

    def _pair(self, now_ms: int, counter: int) -> bytes:
        high = (now_ms & 0xFFFF_FFFF_FFFF) << 16 | _VERSION | (counter >> _LOW_BITS & 0xFFF)
        return _PAIR.pack(high, _VARIANT | (counter & _LOW_MASK) << RANDOM_BITS | self._tail)


def created_at_ms_of(message_id: bytes) -> int:
    """Return the time at which an id was made."""
    return int.from_bytes(message_id[:6], "big")


def show_id(message_id: bytes) -> str:
    """Format an id as 32 hexadecimal digits."""
    return message_id.hex()

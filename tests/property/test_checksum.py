"""The crc of what follows the crc, against the same over a copy."""

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from pulque.model.checksum import crc_after_crc


@given(st.binary(min_size=4, max_size=300), st.integers(0, 2**32 - 1))
def test_the_first_four_bytes_do_not_count(data: bytes, seed: int) -> None:
    assert crc_after_crc(data, seed) == google_crc32c.extend(seed, data[4:])

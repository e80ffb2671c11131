"""The first message of an instant is found, in sealed segments as in the open one."""

import pytest

from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import index_all, opened, partition_of, store

TIMES = [10, 10, 20, 30, 30, 30, 40, 60, 60, 70]
"""When a message each was stored; the segments end after the second, the sixth and the eighth."""
SEALED_AFTER = (2, 6, 8)


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_an_instant_is_the_first_message_stored_then_or_later(
    *, is_indexed: bool, is_open: bool
) -> None:
    engine = opened(MemoryFileSystem())
    for number, now_ms in enumerate(TIMES, 1):
        store(engine, "orders", b"x", now_ms=now_ms)
        store(engine, "others", b"x", now_ms=now_ms)
        if number in SEALED_AFTER and not is_open:
            engine.roll(now_ms)
    if is_indexed:
        index_all(engine)
    partition = partition_of(engine, "orders")

    for at_ms in range(TIMES[0] - 2, TIMES[-1] + 3):
        first = sum(stored < at_ms for stored in TIMES)
        assert engine.at_time(partition, at_ms) == first, f"at {at_ms} ms"

"""Who must not wait for the disk does not: what is new is in memory, the rest says so."""

import pytest

from pulque.model.positions import ConsumeSequence
from pulque.storage.files import WouldBlockError
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import index_all, opened, partition_of, store


def test_the_newest_messages_are_read_without_a_file() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    batch = store(engine, "orders", b"1", b"2")
    files.cold = True
    partition = partition_of(engine, "orders")
    span = engine.span(
        partition, ConsumeSequence(1), max_messages=9, max_bytes=999, may_block=False
    )

    assert span.length == 1
    assert engine.read(partition, span, may_block=False)[1] != batch


def test_a_message_that_is_in_no_cache_makes_them_come_back() -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    store(engine, "orders", b"1")
    files.cold = True
    partition = partition_of(engine, "orders")
    first = ConsumeSequence(0)
    span = engine.span(partition, first, max_messages=9, max_bytes=999, may_block=False)

    with pytest.raises(WouldBlockError):
        engine.read(partition, span, may_block=False)
    assert len(engine.read(partition, span)) == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_an_index_in_a_file_makes_them_come_back(*, is_known: bool) -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    store(engine, "orders", b"1")
    engine.roll(1)
    index_all(engine)
    partition = partition_of(engine, "orders")
    first = ConsumeSequence(0)
    if is_known:
        assert engine.span(partition, first, max_messages=9, max_bytes=999).length == 1
    files.cold = True

    with pytest.raises(WouldBlockError):
        engine.span(partition, first, max_messages=9, max_bytes=999, may_block=False)
    assert engine.span(partition, first, max_messages=9, max_bytes=999).length == 1


def test_an_index_that_must_be_made_again_is_not_made_by_who_must_not_wait() -> None:
    files = MemoryFileSystem()
    engine = opened(files, tail_cache_bytes=0)
    store(engine, "orders", b"1")
    engine.roll(1)
    index_all(engine)
    files.remove("messages/00000000000000000000.index")
    partition = partition_of(engine, "orders")
    first = ConsumeSequence(0)

    with pytest.raises(WouldBlockError):
        engine.span(partition, first, max_messages=9, max_bytes=999, may_block=False)
    assert engine.span(partition, first, max_messages=9, max_bytes=999).length == 1
    # From now on it is in memory.
    assert (
        engine.span(partition, first, max_messages=9, max_bytes=999, may_block=False).length == 1
    )


def test_a_sealed_segment_without_index_file_is_served_from_memory() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.roll(1)
    files.cold = True
    partition = partition_of(engine, "orders")
    first = ConsumeSequence(0)

    assert (
        engine.span(partition, first, max_messages=9, max_bytes=999, may_block=False).length == 1
    )

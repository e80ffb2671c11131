"""A search by tags finds every message that matches, in order, and never more than was asked."""

from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.batch import Codec, read_header, seed_of
from pulque.model.groups import Filter, tag_filter
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.options import StorageOptions
from pulque.storage.reading.tag_search import Budget, TagMatches, TagTest
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import messages_in
from tests.crash.opening import open_engine

NOW_MS = 1_700_000_000_000
TAGS = ("a", "b", "c", "north", "south")
tag_sets = st.frozensets(st.sampled_from(TAGS), max_size=3)


class Step(NamedTuple):
    """One batch, and what happens after it."""

    partition: str
    tags: list[frozenset[str]]
    codec: Codec
    rolls: bool


steps = st.builds(
    Step,
    st.sampled_from(["orders", "orders", "orders", "others"]),
    st.lists(tag_sets, min_size=1, max_size=12),
    st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4]),
    st.sampled_from([False, False, False, True]),
)
filters = st.builds(
    tag_filter,
    st.lists(st.sampled_from(TAGS), max_size=2),
    st.lists(st.sampled_from(TAGS), max_size=2),
).filter(lambda wanted: bool(wanted.kind))
budgets = st.builds(
    Budget,
    messages=st.integers(1, 20),
    size=st.sampled_from([1, 200, 1000, 1 << 20]),
    entries=st.sampled_from([1, 3, 1000]),
    read=st.sampled_from([1, 500, 1 << 20]),
)


def pack(partition: str, bodies: Iterable[tuple[bytes, frozenset[str]]], codec: Codec) -> bytes:
    packer = BatchPacker()
    for body, tags in bodies:
        packer.add(body, tags=sorted(tags))
    ids = bytes(16 * len(packer))
    return packer.encode(seed=seed_of(partition), ids=ids, created_at_ms=NOW_MS, codec=codec)


def store(engine: Engine, drawn: list[Step]) -> list[frozenset[str]]:
    """Store batches; return the tags of the messages of orders, in order."""
    stored: list[frozenset[str]] = []
    for step in drawn:
        partition = engine.create_partition(PartitionName(step.partition), NOW_MS)
        bodies = ((f"{partition.end + i}".encode(), tags) for i, tags in enumerate(step.tags))
        batch = pack(step.partition, bodies, step.codec)
        engine.append(partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=False)
        engine.write()
        if step.partition == "orders":
            stored += step.tags
        if step.rolls:
            engine.roll(NOW_MS)
    return stored


def matching(found: TagMatches, wanted: Filter) -> list[int]:
    """Return the sequences of what a consumer would hand out."""
    data = b"".join(found.buffers)
    messages = messages_in("orders", found.first_sequence, found.length, memoryview(data))
    return [message.sequence for message in messages if wanted.matches(message.tags)]


@given(
    drawn=st.lists(steps, max_size=25),
    wanted=filters,
    budget=budgets,
    start=st.integers(0, 40),
    cache=st.sampled_from([0, 1 << 20]),
)
def test_every_match_is_found_once(
    drawn: list[Step], wanted: Filter, budget: Budget, start: int, cache: int
) -> None:
    options = StorageOptions(tail_cache_bytes=cache)
    engine = open_engine(MemoryFileSystem(), options, NOW_MS).engine
    stored = store(engine, drawn)
    partition = engine.create_partition(PartitionName("orders"), NOW_MS)
    test = TagTest(wanted.any_bits, wanted.all_bits)

    at, seen = ConsumeSequence(min(start, partition.confirmed)), list[int]()
    while at < partition.confirmed:
        found = engine.search.find(partition, at, test, budget)
        assert at <= found.first_sequence <= found.end <= found.examined <= partition.confirmed
        assert found.examined > at, "it does not come forward"
        assert found.matched <= budget.messages
        assert bool(found.matched) == bool(found.length)
        matched = matching(found, wanted)
        assert len(matched) <= found.matched
        seen += matched
        at = found.examined

    expected = [i for i, tags in enumerate(stored) if i >= start and wanted.matches(tags)]
    assert seen == expected


@given(drawn=st.lists(steps, min_size=1, max_size=25), wanted=filters, data=st.data())
def test_a_search_ends_where_it_is_told(
    drawn: list[Step], wanted: Filter, data: st.DataObject
) -> None:
    engine = open_engine(MemoryFileSystem(), StorageOptions(), NOW_MS).engine
    stored = store(engine, drawn)
    partition = engine.create_partition(PartitionName("orders"), NOW_MS)
    end = ConsumeSequence(data.draw(st.integers(0, len(stored))))
    test = TagTest(wanted.any_bits, wanted.all_bits)
    whole = Budget(10_000, 1 << 20, 10_000, 1 << 20)

    found = engine.search.find(partition, ConsumeSequence(0), test, whole, end=end)

    assert found.examined == end
    assert matching(found, wanted) == [
        i for i, tags in enumerate(stored[:end]) if wanted.matches(tags)
    ]

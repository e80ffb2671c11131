"""Messages that a search gathers out of many batches are the messages that were stored."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.batch import Codec, layout_of, read_header, seal
from pulque.model.groups import tag_filter
from pulque.model.message import Message
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, pack_batch_envelope
from pulque.storage.engine import Engine
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions
from pulque.storage.reading.tag_search import Budget, TagTest
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import messages_in
from tests.crash.opening import open_engine
from tests.property.batch_values import PARTITION, SEED, Draft, packed, read_all

NOW_MS = 1_700_000_000_000
WANTED = tag_filter(["wanted"], [])
EVERYTHING = Budget(10_000, 1 << 24, 10_000, 1 << 24)


class Kind(NamedTuple):
    """What the messages of a batch have beside bodies: it decides where the columns lie."""

    keys: bool
    headers: bool
    expires: bool
    passed_on: bool


class Batch(NamedTuple):
    """One batch: how many messages it has, and which of them are wanted."""

    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    wanted: frozenset[int]
    kind: Kind
    codec: Codec


kinds = st.sampled_from(
    [
        Kind(keys=False, headers=False, expires=False, passed_on=False),
        Kind(keys=True, headers=False, expires=False, passed_on=False),
        Kind(keys=False, headers=True, expires=False, passed_on=True),
        Kind(keys=True, headers=True, expires=True, passed_on=True),
    ]
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.sampled_from([1, 2, 7, 40, 90]))
    few = st.frozensets(st.integers(0, count - 1), max_size=3)
    many = st.frozensets(st.integers(0, count - 1), max_size=count)
    codec = draw(st.sampled_from([Codec.NONE] * 5 + [Codec.LZ4]))
    return Batch(count, draw(st.one_of(few, few, many)), draw(kinds), codec)


def draft(batch: Batch, index: int, number: int) -> Draft:
    """Return a message that is like no other, of a size like few others."""
    tags: tuple[str, ...] = ("other",) if number % 3 else ()
    kind = batch.kind
    return Draft(
        body=b"%d" % number * (1 + number % 5),
        key=f"key-{number}" if kind.keys else "",
        order_key=f"order-{number % 3}" if kind.keys else "",
        tags=("wanted", *tags) if index in batch.wanted else tags,
        headers=(("number", str(number)),) if kind.headers else (),
        expires_at_ms=NOW_MS + number if kind.expires else 0,
        created_at_ms=NOW_MS - number if kind.passed_on else 0,
        attempt=1 + number % 4 if kind.passed_on else 1,
        id=b"%016d" % number if kind.passed_on else b"",
    )


def store(engine: Engine, drawn: list[Batch]) -> tuple[Partition, list[list[Draft]]]:
    """Store batches; return what a reader must get, batch by batch."""
    partition = engine.create_partition(PARTITION, NOW_MS)
    stored: list[list[Draft]] = []
    number = 0
    for batch in drawn:
        messages = [draft(batch, index, number + index) for index in range(batch.count)]
        number += batch.count
        data = packed(messages, codec=batch.codec)
        engine.append(partition, data, read_header(data), now_ms=NOW_MS, wants_disk=False)
        engine.write()
        whole = messages_in(PARTITION, 0, batch.count, record_of(data, batch.count))
        stored.append(read_all(list(whole)))
    return partition, stored


def record_of(data: bytes, count: int) -> bytes:
    return pack_batch_envelope(ENVELOPE_SIZE + len(data), 0, 0, 0, 0, 0, 0, count) + data


def found_in(engine: Engine, partition: Partition) -> dict[int, Draft]:
    """Return what a consumer would be handed, by sequence."""
    test = TagTest(WANTED.any_bits, WANTED.all_bits)
    found = engine.search.find(partition, ConsumeSequence(0), test, EVERYTHING)
    assert found.examined == partition.confirmed
    records = b"".join(found.buffers)
    served = list(messages_in(PARTITION, found.first_sequence, found.length, records))
    wanted: list[Message] = [each for each in served if WANTED.matches(each.tags)]
    return dict(zip([each.sequence for each in wanted], read_all(wanted), strict=True))


def expected_of(stored: list[list[Draft]]) -> dict[int, Draft]:
    everything = [message for batch in stored for message in batch]
    return {i: each for i, each in enumerate(everything) if "wanted" in each.tags}


@given(drawn=st.lists(batches(), max_size=30), cache=st.sampled_from([0, 1 << 24]))
def test_what_is_found_is_what_was_stored(drawn: list[Batch], cache: int) -> None:
    options = StorageOptions(tail_cache_bytes=cache)
    engine = open_engine(MemoryFileSystem(), options, NOW_MS).engine
    partition, stored = store(engine, drawn)

    assert found_in(engine, partition) == expected_of(stored)


@given(
    drawn=st.lists(batches(), min_size=1, max_size=12),
    where=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
)
def test_a_damaged_batch_is_reported_and_left_out(
    drawn: list[Batch], where: float, change: int
) -> None:
    files = MemoryFileSystem()
    opened = open_engine(files, StorageOptions(tail_cache_bytes=0), NOW_MS)
    engine = opened.engine
    partition, stored = store(engine, drawn)
    span = engine.span(partition, ConsumeSequence(0), max_messages=10_000, max_bytes=1 << 24)
    entries = [piece.entry for piece in span.pieces]
    victim = entries[int(where * len(entries))]
    at = victim.offset + int(where * 997) % victim.size
    log = files.open("messages/00000000000000000000.log")
    log.write([bytes([log.read(1, at)[0] ^ change])], at)

    found = found_in(engine, partition)

    damaged = range(victim.first_sequence, victim.first_sequence + victim.count)
    assert found == {i: each for i, each in expected_of(stored).items() if i not in damaged}
    is_read = victim.tag_union & WANTED.any_bits[0] == WANTED.any_bits[0]
    places = [(offset, size) for _, offset, size, _ in opened.heard.corruptions]
    assert places == ([(victim.offset, victim.size)] if is_read else [])


def nonsense(draft: Draft, column: str, value: int) -> bytes:
    """Return a batch of one message and one other, sealed, of which a size is not what it is."""
    batch = bytearray(packed([draft, Draft(b"other", tags=("other",))]))
    header = read_header(bytes(batch))
    at = layout_of(header.flags).column_start(column, header.count)
    batch[at : at + 2] = value.to_bytes(2, "little")
    return seal(bytes(batch[4:]), SEED)


@given(
    drawn=st.lists(batches(), min_size=1, max_size=6),
    column=st.sampled_from(["size", "tags_size"]),
    value=st.integers(40, 65_535),
)
def test_what_cannot_be_taken_apart_spoils_nothing_else(
    drawn: list[Batch], column: str, value: int
) -> None:
    engine = open_engine(MemoryFileSystem(), StorageOptions(tail_cache_bytes=0), NOW_MS).engine
    partition, stored = store(engine, drawn)
    bad = nonsense(Draft(b"bad", tags=("wanted",)), column, value)
    at = partition.confirmed
    engine.append(partition, bad, read_header(bad), now_ms=NOW_MS, wants_disk=False)
    engine.write()
    test = TagTest(WANTED.any_bits, WANTED.all_bits)

    found = engine.search.find(partition, ConsumeSequence(0), test, EVERYTHING)

    *good, last = found.buffers
    assert last[ENVELOPE_SIZE:] == bad, "it is handed out as it is"
    served = messages_in(PARTITION, 0, int(at), b"".join(good))
    wanted = [each for each in served if WANTED.matches(each.tags)]
    assert dict(zip([each.sequence for each in wanted], read_all(wanted), strict=True)) == (
        expected_of(stored)
    )

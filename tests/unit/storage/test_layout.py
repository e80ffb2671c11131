"""How the logs lie on the disk, and how a sequence leads to a message."""

from itertools import pairwise

import pytest

from pulque.model.actions import (
    GroupOpened,
    Pulled,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    MessageOffset,
    StartCount,
    Tenure,
)
from pulque.model.record import Envelope, RecordType, read_envelope
from pulque.rules.consumption import Consumption
from pulque.storage.indexes.consume_log import Span
from pulque.storage.indexes.segment_index import ENTRY_SIZE, SealedIndex
from pulque.storage.logs.partitions import decode_table
from pulque.storage.logs.segment import DamagedBytes, Segment, walk
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import bodies_of, index_all, opened, packed, partition_of, store


def logs(files: MemoryFileSystem) -> dict[str, bytes]:
    return {n: d for n, d in sorted(files.contents().items()) if n.startswith("messages/0")}


def segments(files: MemoryFileSystem) -> list[tuple[int, bytes]]:
    return [(int(n[9:29]), d) for n, d in logs(files).items() if n.endswith(".log")]


@pytest.mark.accepts("000-15", "001-22", "003-16")
def test_a_log_is_only_ever_appended_to() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "a", b"one")
    ((_, before),) = segments(files)

    store(engine, "a", b"two")

    ((_, after),) = segments(files)
    assert after.startswith(before)
    assert len(after) > len(before)


@pytest.mark.accepts("000-52", "001-24", "001-27", "003-01", "004-40")
def test_batches_of_all_subjects_lie_in_one_log_in_order_of_arrival() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    sent = [store(engine, name, b"body") for name in ("a", "b", "a", "c")]

    ((_, data),) = segments(files)

    places = [data.index(sent[1]), data.index(sent[3])]
    assert [engine.partition(n) is not None for n in "abc"] == [True] * 3
    assert data.index(sent[0]) < places[0] < data.rindex(sent[2]) < places[1]


@pytest.mark.accepts("003-06", "003-07", "003-09", "003-10", "004-40", "004-41")
def test_segments_are_named_by_their_first_offset_and_follow_each_other() -> None:
    assert StorageOptions().segment_bytes == 1024**3
    files = MemoryFileSystem()
    engine = opened(files, segment_bytes=2000)
    for number in range(50):
        store(engine, "a", b"%d" % number * 10)

    found = segments(files)

    assert len(found) > 3
    assert found[0][0] == 0
    for (base, data), (following, _) in pairwise(found):
        assert base + len(data) == following
        assert len(data) <= 2000
    assert all(len(name) == len("messages/") + 20 + len(".log") for name in logs(files))
    for base, data in found:
        record = read_envelope(data)
        assert isinstance(record, Envelope)
        assert record.offset == base


@pytest.mark.accepts("003-11", "000-49")
def test_a_record_is_its_size_what_leads_to_it_and_the_batch_as_it_came() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    batch = store(engine, "a", b"one", b"two")

    ((base, data),) = segments(files)
    segment = Segment("x", files.open("messages/" + f"{0:020d}.log"), base, base + len(data))
    records = [r for r in walk(segment, MessageOffset(base)) if not isinstance(r, DamagedBytes)]

    envelope, content = records[-1]
    assert content == batch
    assert envelope.size == len(data) - envelope.offset
    assert (envelope.first_sequence, envelope.count) == (0, 2)


def test_a_segment_explains_itself() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "a", b"one", b"two")
    store(engine, "b", b"three")
    engine.roll(2)

    base, data = segments(files)[-1]
    envelope = read_envelope(data)
    assert isinstance(envelope, Envelope)
    rows = decode_table(data[56 : envelope.size])

    assert envelope.type is RecordType.PARTITION_TABLE
    assert rows is not None
    assert {(name, end) for _, name, end in rows} == {("a", 2), ("b", 1)}
    assert base == envelope.offset


@pytest.mark.accepts("000-22", "001-28", "003-12", "003-13")
def test_the_consume_log_gives_offset_and_size_of_what_holds_a_sequence() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    for number in range(10):
        store(engine, "a", *[b"%d-%d" % (number, i) for i in range(3)])
        store(engine, "other", b"noise")
    ((base, data),) = segments(files)

    def span_of(most: int) -> Span:
        partition = partition_of(engine, "a")
        return engine.span(partition, ConsumeSequence(13), max_messages=most, max_bytes=1 << 20)

    span = span_of(4)

    assert span.first_sequence == 13
    # The rest of a batch of three, and whole ones as long as they fit.
    assert [span_of(most).length for most in (1, 4, 5, 7, 8, 100)] == [1, 2, 5, 5, 8, 17]
    for piece in span.pieces:
        at = piece.entry.offset - base
        record = data[at : at + piece.entry.size]
        number = piece.entry.first_sequence // 3
        assert record.endswith(b"%d-0%d-1%d-2" % (number, number, number))
    assert bodies_of(engine, "a", 13, step=4)[:2] == [b"4-1", b"4-2"]


@pytest.mark.accepts("003-15")
def test_reading_goes_on_over_the_end_of_a_segment() -> None:
    engine = opened(MemoryFileSystem(), segment_bytes=1500, tail_cache_bytes=0)
    sent = [b"%d" % number for number in range(60)]
    for body in sent:
        store(engine, "a", body)
    index_all(engine)

    assert len(engine.segments) > 3
    assert [bodies_of(engine, "a", step=step) for step in (1, 7, 1000)] == [sent] * 3


@pytest.mark.accepts("000-53", "004-42", "004-43", "004-44")
def test_a_sealed_segment_has_one_index_of_fixed_entries_for_all_partitions() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    for number in range(40):
        store(engine, f"s{number % 4}", b"body", b"body")
    engine.roll(2)
    index_all(engine)
    names = [name for name in files.contents() if name.endswith(".index")]

    index = SealedIndex(files.open(names[0]), names[0], MessageOffset(0))
    entries = index.all_entries()

    assert len(names) == 1
    assert entries.itemsize == ENTRY_SIZE == 44
    assert len(entries) == 40
    assert {"offset", "size", "tag_union"} <= set(entries.dtype.names or ())
    for name in ("s0", "s1", "s2", "s3"):
        mine = entries[entries["partition"] == partition_of(engine, name).id]
        # Like an array: the entry of the n-th batch is the n-th of its partition.
        assert mine["first_sequence"].tolist() == list(range(0, 20, 2))


@pytest.mark.accepts("001-26")
def test_the_worked_example_of_the_three_logs() -> None:
    engine = opened(MemoryFileSystem())
    offsets = []
    for number in range(21):
        # Messages 3, 6, 9 and 20 of all that arrive are of subject1.
        name = "subject1" if number in (3, 6, 9, 20) else "subject2"
        offset = engine.end
        store(engine, name, b"%d" % number)
        if name == "subject1":
            offsets.append(offset)
    subject1 = partition_of(engine, "subject1")
    consumption = Consumption()
    group, tenure = Group("g"), Tenure(Epoch(0), StartCount(1))
    consumption.handle(GroupOpened(subject1.id, group, ConsumeSequence(0)))
    handed = {"first": [(0, 1), (3, 1)], "second": [(1, 2)]}
    for number, (consumer, ranges) in enumerate(handed.items()):
        mine = SubscriptionId(number)
        consumption.handle(SubscriptionOpened(mine, subject1.id, group, ConsumerId(consumer), 1))
        for first, length in ranges:
            next_pull = consumption.subscriptions[mine].next_pull
            consumption.handle(Pulled(mine, tenure, next_pull, ConsumeSequence(first), length, 1))

    span = engine.span(subject1, ConsumeSequence(0), max_messages=10, max_bytes=1 << 20)
    held = {
        s.consumer: [int(r.first_sequence) + i for r in s.held for i in range(r.length)]
        for s in consumption.subscriptions.values()
    }

    # The consume log: four entries that lead to the four places in the message log.
    assert [p.entry.first_sequence for p in span.pieces] == [0, 1, 2, 3]
    assert [p.entry.offset for p in span.pieces][1:] == offsets[1:]
    assert bodies_of(engine, "subject1") == [b"3", b"6", b"9", b"20"]
    # The pull logs: positions of their own, which lead to consume sequences.
    assert held == {"first": [0, 3], "second": [1, 2]}


@pytest.mark.accepts("000-46", "000-47")
def test_what_was_appended_after_the_last_checkpoint_is_indexed_at_the_start() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "a", b"indexed")
    checkpoint = engine.begin_checkpoint({})
    checkpoint.run()
    store(engine, "a", b"not in any index")
    engine.close()

    again = opened(files, tail_cache_bytes=0)

    assert bodies_of(again, "a") == [b"indexed", b"not in any index"]


@pytest.mark.accepts("004-10", "004-12")
def test_a_backlog_lies_on_the_disk_and_goes_by_whole_segments() -> None:
    files = MemoryFileSystem()
    engine = opened(files, segment_bytes=4000, tail_cache_bytes=1000)
    sent = [b"%04d" % number * 20 for number in range(200)]
    for body in sent:
        store(engine, "a", body)
    index_all(engine)
    everything = bodies_of(engine, "a")
    stored = sum(len(data) for _, data in segments(files))

    while len(engine.segments) > 2:
        engine.remove_oldest().run()
    left = bodies_of(engine, "a")

    assert everything == sent
    assert stored > len(sent) * len(packed("a", sent[0]))
    assert left == sent[partition_of(engine, "a").start :]
    assert 0 < len(left) < len(sent)
    assert sum(len(data) for _, data in segments(files)) < stored / 4

"""A gathered record gives back what was put in, and damage to it is noticed."""

from struct import pack

from hypothesis import assume, given
from hypothesis import strategies as st

from pulque.client.receiving.delivery_decoder import batches_of
from pulque.client.receiving.received_message import ReceivedBatch
from pulque.errors import CorruptionError, InvalidBatchError, RemoteProtocolError
from pulque.model.gathered import Gathered, pack_gathered, read_gathered
from pulque.model.message import Message, StoredBatch
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.wire.responses import Delivered
from tests.property.batch_values import PARTITION, Draft, drafts, messages_of, packed, read_all

FIRST = 41
AHEAD = 1000
members = st.lists(
    st.tuples(drafts, st.integers(1, 5000), st.integers(0, 2**62)), min_size=1, max_size=6
)


def places_of(chosen: list[tuple[Draft, int, int]]) -> list[int]:
    places = [0]
    for _, gap, _ in chosen[1:]:
        places.append(places[-1] + gap)
    return places


def record_of(chosen: list[tuple[Draft, int, int]]) -> bytes:
    count = len(chosen)
    return pack_gathered(
        FIRST,
        count,
        pack(f"<{count}I", *places_of(chosen)),
        pack(f"<{count}q", *[stored for _, _, stored in chosen]),
        packed([draft for draft, _, _ in chosen]),
    )


def delivered(records: bytes, first: int, count: int) -> Delivered:
    tenure = Tenure(Epoch(3), StartCount(5))
    pull = PullSequence(AHEAD + first)
    return Delivered(0, tenure, pull, ConsumeSequence(first), count, memoryview(records))


@given(chosen=members, before=st.integers(0, 40), after=st.integers(0, 40))
def test_a_record_gives_back_what_was_put_in(
    chosen: list[tuple[Draft, int, int]], before: int, after: int
) -> None:
    places = places_of(chosen)
    first, count = FIRST - before, before + places[-1] + 1 + after

    (batch,) = batches_of(PARTITION, delivered(record_of(chosen), first, count))
    assert isinstance(batch, ReceivedBatch)

    messages = [Message(batch, index) for index in range(batch.start, batch.end)]
    alone = messages_of(packed([draft for draft, _, _ in chosen]))
    assert read_all(messages) == read_all(alone)
    assert [message.sequence for message in messages] == [FIRST + place for place in places]
    assert [message.stored_at_ms for message in messages] == [stored for _, _, stored in chosen]
    pulls = [batch.pull_of(index) for index in range(len(messages))]
    assert pulls == [AHEAD + FIRST + place for place in places]
    for index, pull in enumerate(pulls):
        assert batch.index_at(pull) == index
        assert batch.index_at(pull + 1) == index + 1
    assert batch.pull_until(batch.end) == pulls[-1] + 1


@given(chosen=members, data=st.data())
def test_a_part_ends_where_it_is_cut(
    chosen: list[tuple[Draft, int, int]], data: st.DataObject
) -> None:
    count = len(chosen)
    (whole,) = batches_of(PARTITION, delivered(record_of(chosen), FIRST, 100_000))
    assert isinstance(whole, ReceivedBatch)
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    part = whole.window(start, end)
    following = whole.pull_of(end) if end < count else whole.pull_of(count - 1) + 1
    assert part.pull_until(part.end) == following, "what lies before the next one belongs to it"
    pull = data.draw(st.integers(part.pull_of(start), following - 1))

    part.cut(pull)

    # A broker that lost its last second gives the numbers from here on to others.
    assert part.pull_until(part.end) <= pull
    kept = [whole.pull_of(index) for index in range(start, part.end)]
    assert kept == [each for each in map(whole.pull_of, range(start, end)) if each < pull]


@given(chosen=members)
def test_a_broker_reads_it_as_a_client_does(chosen: list[tuple[Draft, int, int]]) -> None:
    found = read_gathered(b"before" + record_of(chosen), 6)
    assert isinstance(found, Gathered)

    batch = StoredBatch.gathered(found, PARTITION)

    sequences = [Message(batch, index).sequence for index in range(len(batch))]
    assert sequences == [FIRST + place for place in places_of(chosen)]


@given(chosen=members, where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed(
    chosen: list[tuple[Draft, int, int]], where: float, change: int
) -> None:
    record = bytearray(record_of(chosen))
    record[int(where * len(record))] ^= change
    try:
        list(batches_of(PARTITION, delivered(bytes(record), FIRST, 100_000)))
    except (CorruptionError, RemoteProtocolError, InvalidBatchError):
        return
    raise AssertionError("damage went unnoticed")


@given(chosen=members, kept=st.floats(0, 1, exclude_max=True))
def test_a_cut_record_is_noticed(chosen: list[tuple[Draft, int, int]], kept: float) -> None:
    record = record_of(chosen)
    cut = int(kept * len(record))
    assume(cut)
    try:
        list(batches_of(PARTITION, delivered(record[:cut], FIRST, 100_000)))
    except (CorruptionError, RemoteProtocolError, InvalidBatchError):
        return
    raise AssertionError("half a record went unnoticed")


@given(chosen=members, data=st.data())
def test_it_must_lie_in_the_run_that_was_announced(
    chosen: list[tuple[Draft, int, int]], data: st.DataObject
) -> None:
    end = FIRST + places_of(chosen)[-1] + 1
    first = data.draw(st.integers(0, end + 10))
    count = data.draw(st.integers(1, 2 * end))
    is_inside = first <= FIRST and end <= first + count
    try:
        list(batches_of(PARTITION, delivered(record_of(chosen), first, count)))
    except RemoteProtocolError:
        assert not is_inside
    else:
        assert is_inside


def test_places_must_ascend() -> None:
    batch = packed([Draft(b"a"), Draft(b"b")])
    for places in ((0, 0), (1, 2), (0, 5, 3)[:2][::-1]):
        record = pack_gathered(FIRST, 2, pack("<2I", *places), pack("<2q", 1, 2), batch)
        assert isinstance(read_gathered(record, 0), str)
    record = pack_gathered(FIRST, 1, pack("<I", 0), pack("<q", 1), batch)
    assert isinstance(read_gathered(record, 0), str), "the batch has two messages"

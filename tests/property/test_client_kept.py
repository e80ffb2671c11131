"""What a consumer kept: a file gives back what was put in, and divides batches by it."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from pulque.client.receiving.received_message import ACKED, NACKED, OPEN, ReceivedBatch
from pulque.client.receiving.saved_positions import (
    Kept,
    KeptPosition,
    KeptRange,
    decode_positions,
    encode_positions,
    finish,
    finished_of,
)
from pulque.model.batch import seed_of
from pulque.model.gathered import Gathered
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence, Epoch, StartCount, Tenure
from pulque.wire.requests import Nacked

OWNER = {"group": "kitchen", "consumer": "one"}
ORDERS = PartitionName("orders")
NUMBERS = st.integers(0, 2**62)


def tenures() -> st.SearchStrategy[Tenure]:
    return st.builds(
        lambda e, s: Tenure(Epoch(e), StartCount(s)), st.integers(0, 2), st.integers(1, 3)
    )


def positions() -> st.SearchStrategy[KeptPosition]:
    nacked = st.builds(Nacked, NUMBERS, st.integers(-1, 2**40), st.text())
    ranges = st.builds(KeptRange, tenures(), NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.tuples(nacked))
    names = st.sampled_from(["orders", "%retry%orders%kitchen", "ümlaut"]).map(PartitionName)
    return st.builds(KeptPosition, names, NUMBERS, NUMBERS, st.lists(ranges).map(tuple))


@given(st.lists(positions(), unique_by=lambda each: each.partition))
def test_a_file_gives_back_what_was_put_in(given_positions: list[KeptPosition]) -> None:
    contents = encode_positions(OWNER, given_positions)

    assert decode_positions(contents, OWNER) == given_positions


@given(st.lists(positions(), min_size=1, max_size=1), st.data())
def test_a_damaged_file_says_so(given_positions: list[KeptPosition], data: st.DataObject) -> None:
    contents = bytearray(encode_positions(OWNER, given_positions))
    at = data.draw(st.integers(0, len(contents) - 2))  # not the line's end
    contents[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_positions(bytes(contents), OWNER)
    except ValueError:
        return
    raise AssertionError("damage went unnoticed")


def batch(
    start: int, end: int, pull_base: int, tenure: Tenure, stored_at_ms: int
) -> ReceivedBatch:
    packer = BatchPacker()
    for _ in range(10):
        packer.add(b"")
    return ReceivedBatch(
        packer.encode(seed=seed_of(ORDERS), ids=bytes(160), created_at_ms=0),
        partition=ORDERS,
        first_sequence=ConsumeSequence(100),
        stored_at_ms=stored_at_ms,
        pull_base=pull_base,
        start=start,
        end=end,
        tenure=tenure,
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 8), st.booleans(), tenures(), st.integers(1, 2)
        ),
        max_size=6,
    ),
    st.integers(0, 9),
    st.integers(0, 20),
    tenures(),
)
def test_a_batch_is_divided_as_message_by_message(
    kept: list[tuple[int, int, bool, Tenure, int]], start: int, pull_base: int, tenure: Tenure
) -> None:
    ranges = tuple(
        KeptRange(
            found,
            pull,
            length,
            100 - pull_base + pull,
            stored,
            (Nacked(pull, 5, "why"),) * is_nack,
        )
        for pull, length, is_nack, found, stored in kept
    )
    delivered = batch(start, 10, pull_base, tenure, 1)

    windows = list(Kept([KeptPosition(ORDERS, 0, 0, ranges)]).windows(delivered))

    # They cover what was delivered, without gap or overlap.
    assert [i for first, end, _ in windows for i in range(first, end)] == list(range(start, 10))
    for first, end, found in windows:
        part = delivered.window(first, end)
        if found is not None:
            finish(part, found)
        for index in range(first, end):
            pull = pull_base + index
            by_hand = [
                r
                for r in ranges
                if r.first_pull <= pull < r.end_pull and r[0] == tenure and r.stored_at_ms == 1
            ]
            assert (part.states[index] != OPEN) == bool(by_hand)
            if len(by_hand) == 1:
                is_nacked = any(nacked.sequence == pull for nacked in by_hand[0].nacked)
                assert part.states[index] == (NACKED if is_nacked else ACKED)


@given(
    gaps=st.lists(st.integers(1, 4), min_size=9, max_size=9),
    times=st.lists(st.integers(1, 3), min_size=10, max_size=10),
    finished=st.integers(1, 10),
    nacked=st.sets(st.integers(0, 9)),
    again=st.integers(0, 9),
)
def test_what_was_gathered_is_known_again_however_it_comes(
    gaps: list[int], times: list[int], finished: int, nacked: set[int], again: int
) -> None:
    tenure = Tenure(Epoch(0), StartCount(1))
    places = (0, *accumulate(gaps))
    stored = tuple(sorted(times))

    def delivered(start: int) -> ReceivedBatch:
        """Return messages as they come if the first ones are left out."""
        count = 10 - start
        packer = BatchPacker()
        for _ in range(count):
            packer.add(b"")
        data = packer.encode(seed=seed_of(ORDERS), ids=bytes(16 * count), created_at_ms=0)
        own = tuple(place - places[start] for place in places[start:])
        found = Gathered(0, 100 + places[start], own, stored[start:], data)
        received = ReceivedBatch(
            data,
            partition=ORDERS,
            first_sequence=ConsumeSequence(100 + places[start]),
            stored_at_ms=stored[start],
            pull_base=7 + places[start],
            start=0,
            end=count,
            tenure=tenure,
        )
        received.gather(found)
        return received

    before = delivered(0)
    for index in range(finished):
        before.states[index] = ACKED
        if index in nacked:
            before.nacks[index] = "why", 5
            before.states[index] = NACKED
    ranges = tuple(kept for each in finished_of([before]) for kept in each.as_ranges())

    after = delivered(again)
    for first, end, found in Kept([KeptPosition(ORDERS, 0, 0, ranges)]).windows(after):
        part = after.window(first, end)
        if found is not None:
            finish(part, found)
        for index in range(first, end):
            assert part.states[index] == before.states[again + index]


def test_what_was_passed_is_forgotten() -> None:
    tenure = Tenure(Epoch(0), StartCount(1))
    kept = Kept([KeptPosition(ORDERS, 3, 5, (KeptRange(tenure, 3, 2, 3, 1),))])
    kept.pass_over(ORDERS, 4)
    assert kept
    kept.compare(PartitionName("other"), 99)
    assert kept
    kept.pass_over(ORDERS, 5)
    assert not kept


def test_what_the_broker_set_back_is_wanted_again() -> None:
    tenure = Tenure(Epoch(0), StartCount(1))
    kept = Kept([KeptPosition(ORDERS, 3, 5, (KeptRange(tenure, 3, 2, 3, 1),))])
    kept.compare(ORDERS, 3)
    assert kept
    kept.compare(ORDERS, 2)
    assert not kept

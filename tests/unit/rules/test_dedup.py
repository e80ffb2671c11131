"""A batch that is sent again is stored once; what cannot be told is refused, not guessed."""

import pytest

from pulque.errors import FencedError, InvalidRequestError
from pulque.model.batch import BatchHeader, Flag
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.dedup import IDLE_MS, WINDOW, Dedup

P = PartitionId(1)


def header(number: int, producer: int = 7, incarnation: int = 1, flags: int = 0) -> BatchHeader:
    return BatchHeader(0, flags, 0, 4, 1, 0, producer, incarnation, number, 0, 0)


def dedup(*numbers: int, now_ms: int = 0, flags: int = 0) -> Dedup:
    """Return a dedup that has seen batches; batch n is stored at sequence 100 + n."""
    made = Dedup()
    for number in numbers:
        made.stored(P, header(number, flags=flags), ConsumeSequence(100 + number), now_ms)
    return made


def state_of(found: Dedup) -> dict[bytes, bytes]:
    return {key: value for key, value in found.encode_changes().items() if value is not None}


def test_a_new_batch_is_not_known() -> None:
    assert Dedup().find(P, header(0)) is None


def test_a_stored_batch_is_found_where_it_is() -> None:
    found = dedup(0, 1, 2)

    assert [found.find(P, header(number)) for number in range(4)] == [100, 101, 102, None]


def test_batches_without_a_producer_are_never_the_same() -> None:
    found = Dedup()
    found.stored(P, header(0, producer=0), ConsumeSequence(5), 0)

    assert found.find(P, header(0, producer=0)) is None
    assert len(found) == 0


def test_producers_and_partitions_have_numbers_of_their_own() -> None:
    found = dedup(0)

    assert found.find(P, header(0, producer=8)) is None
    assert found.find(PartitionId(2), header(0)) is None


def test_a_refused_batch_leaves_a_gap_and_may_still_come() -> None:
    found = dedup(0, 2, 3)

    assert found.find(P, header(1)) is None
    found.stored(P, header(1), ConsumeSequence(999), 0)

    assert [found.find(P, header(number)) for number in range(4)] == [100, 999, 102, 103]


def test_the_first_batch_that_is_seen_need_not_be_the_first() -> None:
    found = dedup(40)

    assert found.find(P, header(40)) == 140
    assert found.find(P, header(39)) is None
    assert found.find(P, header(0)) is None


def test_the_last_64_batches_are_remembered_and_older_ones_refused() -> None:
    found = dedup(*range(100))

    assert [found.find(P, header(number)) for number in range(36, 100)] == list(range(136, 200))
    for number in (0, 35):
        with pytest.raises(InvalidRequestError):
            found.find(P, header(number))


@pytest.mark.parametrize("jump", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 10**12])
def test_a_jump_moves_the_window(jump: int) -> None:
    found = dedup(0, 1)
    found.stored(P, header(1 + jump), ConsumeSequence(500), 0)

    assert found.find(P, header(1 + jump)) == 500
    assert found.find(P, header(2 + jump - WINDOW + 1)) is None
    oldest = 1 + jump - WINDOW
    with pytest.raises(InvalidRequestError):
        found.find(P, header(max(oldest, 0)))


def test_a_batch_that_could_not_be_written_may_come_again() -> None:
    found = dedup(0, 1)

    found.take_back(P, header(1))

    assert found.find(P, header(1)) is None
    assert found.find(P, header(0)) == 100


def test_what_was_taken_back_is_in_the_next_checkpoint() -> None:
    found = dedup(0, 1)
    state = state_of(found)
    found.take_back(P, header(1))
    state |= state_of(found)

    again = Dedup()
    again.load(state)

    assert (again.find(P, header(0)), again.find(P, header(1))) == (100, None)


@pytest.mark.parametrize("unknown", [header(5), header(0, producer=9), header(0, incarnation=3)])
def test_taking_back_what_was_never_there_changes_nothing(unknown: BatchHeader) -> None:
    found = dedup(0)

    found.take_back(P, unknown)

    assert found.find(P, header(0)) == 100


def test_a_newer_incarnation_counts_anew_and_fences_the_older_off() -> None:
    found = dedup(0, 1)

    assert found.find(P, header(0, incarnation=2)) is None
    found.stored(P, header(0, incarnation=2), ConsumeSequence(200), 0)

    assert found.find(P, header(0, incarnation=2)) == 200
    assert found.find(P, header(1, incarnation=2)) is None
    with pytest.raises(FencedError):
        found.find(P, header(1, incarnation=1))


def test_a_silent_producer_is_forgotten_after_ten_minutes() -> None:
    found = dedup(0, now_ms=1000)

    found.forget_idle(1000 + IDLE_MS)
    assert found.find(P, header(0)) == 100
    found.forget_idle(1001 + IDLE_MS)

    assert found.find(P, header(0)) is None
    assert len(found) == 0


def test_a_producer_with_a_name_is_never_forgotten() -> None:
    found = dedup(0, now_ms=0, flags=Flag.NAMED_PRODUCER)

    found.forget_idle(10 * IDLE_MS)

    assert found.find(P, header(0)) == 100


def test_a_checkpoint_has_only_what_changed_and_what_was_forgotten() -> None:
    found = dedup(0)
    assert len(found.encode_changes()) == 1

    assert found.encode_changes() == {}
    found.forget_idle(2 * IDLE_MS)

    assert list(found.encode_changes().values()) == [None]


def test_a_checkpoint_brings_everything_back() -> None:
    found = dedup(0, 1, 3, now_ms=77, flags=Flag.NAMED_PRODUCER)
    state = state_of(found)

    again = Dedup()
    again.load({**state, b"something else": b"of somebody else", b"d": b"short"})

    assert [again.find(P, header(number)) for number in range(5)] == [100, 101, None, 103, None]
    again.forget_idle(10 * IDLE_MS)
    assert again.find(P, header(0)) == 100

"""Which dead letters are open, against a model that is nothing but a set."""

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.actions import DeadPurged
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.dead import DeadLetterState

P, Q = PartitionId(1), PartitionId(2)
END = 40
ranges = st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted)


def resolved(steps: list[list[int]]) -> DeadLetterState:
    letters = DeadLetterState()
    for start, end in steps:
        letters.resolve(P, ConsumeSequence(start), ConsumeSequence(end))
    return letters


def open_in(letters: DeadLetterState, partition: PartitionId, start: int, end: int) -> list[int]:
    found = letters.open_ranges(partition, ConsumeSequence(start), ConsumeSequence(end))
    return [s for each in found for s in range(each.start, each.end)]


@given(steps=st.lists(ranges, max_size=15), window=ranges)
def test_open_letters_are_those_that_nobody_dealt_with(
    steps: list[list[int]], window: list[int]
) -> None:
    letters = resolved(steps)
    done = {s for start, end in steps for s in range(start, end)}

    assert open_in(letters, P, *window) == [s for s in range(*window) if s not in done]
    assert open_in(letters, Q, *window) == list(range(*window))
    for sequence in range(END):
        assert letters.is_resolved(P, ConsumeSequence(sequence)) is (sequence in done)


@given(steps=st.lists(ranges, max_size=15), end=st.integers(0, END))
def test_a_checkpoint_and_a_recovery_keep_what_is_stored(steps: list[list[int]], end: int) -> None:
    letters = resolved(steps)
    before = open_in(letters, P, 0, end)
    letters.clip({P: ConsumeSequence(end)})
    saved = {key: value for key, value in letters.encode_changes().items() if value is not None}
    again = DeadLetterState()
    again.load(saved)

    assert open_in(again, P, 0, end) == before
    assert open_in(again, P, end, END) == list(range(end, END)), "numbers are given anew there"
    assert again.encode_changes() == {}
    assert again.clip({}) is bool(saved)
    assert open_in(again, P, 0, END) == list(range(END))


def test_a_purge_is_a_fact() -> None:
    letters = DeadLetterState()

    letters.handle(DeadPurged(P, ConsumeSequence(3), ConsumeSequence(5), 0))

    assert open_in(letters, P, 0, 8) == [0, 1, 2, 6, 7]

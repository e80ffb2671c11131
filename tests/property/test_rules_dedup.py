"""Of all batches of a producer, whatever their order, each is stored once.

The oracle is a dictionary of all numbers ever stored, and the highest one.
"""

from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import InvalidRequestError
from pulque.model.batch import BatchHeader
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.dedup import WINDOW, Dedup

P = PartitionId(1)

numbers = st.integers(0, 150) | st.integers(0, 2**40)
steps = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "fail", "checkpoint"]), numbers),
    max_size=120,
)


def header(number: int) -> BatchHeader:
    return BatchHeader(0, 0, 0, 4, 1, 0, 7, 1, number, 0, 0)


@given(steps=steps)
def test_each_number_is_stored_once_within_the_window(steps: list[tuple[str, int]]) -> None:
    dedup, state = Dedup(), dict[bytes, bytes]()
    stored: dict[int, int] = {}
    highest = -1
    for at, (step, number) in enumerate(steps):
        if step == "checkpoint":
            state |= {k: v for k, v in dedup.encode_changes().items() if v is not None}
            dedup = Dedup()
            dedup.load(state)
            continue
        try:
            found = dedup.find(P, header(number))
        except InvalidRequestError:
            assert number <= highest - WINDOW
            continue
        assert found == stored.get(number)
        assert found is not None or number > highest - WINDOW
        if found is None:
            dedup.stored(P, header(number), ConsumeSequence(at), at)
            highest = max(highest, number)
            if step == "fail":
                dedup.take_back(P, header(number))
            else:
                stored[number] = at


@given(ahead=st.lists(st.integers(0, WINDOW - 1), max_size=200))
def test_whatever_is_sent_within_the_window_can_be_sent_again(ahead: list[int]) -> None:
    """Progress: a producer with up to 63 batches on the way is never refused."""
    dedup = Dedup()
    lowest, stored = 0, dict[int, int]()
    for at, step in enumerate(ahead):
        number = lowest + step
        assert dedup.find(P, header(number)) == stored.get(number)
        if number not in stored:
            dedup.stored(P, header(number), ConsumeSequence(at), at)
            stored[number] = at
        while lowest in stored:
            lowest += 1

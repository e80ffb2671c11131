"""A tally is the same for the same messages in any order, and another for any others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
import numpy as np
import pyarrow as pa

from pulque.pipeline.archive.totals import Tally, tally_of, tally_of_entries
from pulque.storage.indexes.segment_index import ENTRY_TYPE

Message = tuple[str, int, bytes]
ids = st.text("0123456789abcdef", min_size=32, max_size=32)
messages = st.lists(st.tuples(ids, st.integers(0, 2**62), st.binary(max_size=40)), max_size=20)


def batch(found: list[Message]) -> pa.RecordBatch:
    columns = list(zip(*found, strict=True)) if found else [(), (), ()]
    arrays = [
        pa.array(columns[0], pa.string()),
        pa.array(columns[1], pa.int64()),
        pa.array(columns[2], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(arrays, ["message_id", "sequence", "body"])


@given(messages, st.randoms(use_true_random=False), st.integers(0, 20))
def test_order_and_parts_do_not_matter(found: list[Message], draw: object, cut: int) -> None:
    shuffled = list(found)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    whole = tally_of(batch(found))

    assert whole.count == len(found)
    assert tally_of(batch(shuffled)) == whole
    assert tally_of(batch(found[:cut])) + tally_of(batch(found[cut:])) == whole
    rows = batch(found)
    assert tally_of(rows.slice(0, cut)) + tally_of(rows.slice(cut)) == whole


@given(messages.filter(bool), st.data())
def test_another_message_is_another_tally(found: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(found) - 1))
    message_id, sequence, body = found[at]
    other = data.draw(
        st.sampled_from(
            [
                (message_id[:-1] + ("0" if message_id[-1] != "0" else "1"), sequence, body),
                (message_id, sequence ^ 1, body),
                (message_id, sequence, body + b"\0"),
                (message_id, sequence, bytes([body[0] ^ 1]) + body[1:] if body else b"x"),
            ]
        )
    )
    assert tally_of(batch([*found[:at], other, *found[at + 1 :]])) != tally_of(batch(found))
    assert tally_of(batch(found[:at] + found[at + 1 :])) != tally_of(batch(found))
    assert tally_of(batch([*found, found[at]])) != tally_of(batch(found))


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 1000)), max_size=10))
def test_an_index_adds_up_to_the_same(runs: list[tuple[int, int]]) -> None:
    entries = np.zeros(len(runs), ENTRY_TYPE)
    for at, (first, count) in enumerate(runs):
        entries[at]["first_sequence"], entries[at]["count"] = first, count
    expected = [sequence for first, count in runs for sequence in range(first, first + count)]

    assert tally_of_entries(entries) == (len(expected), sum(expected) % 2**64)


def test_nothing_adds_up_to_nothing() -> None:
    assert tally_of(batch([])) == Tally()

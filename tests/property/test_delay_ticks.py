"""Ticks and wheels over a virtual clock: all that was scheduled and not cancelled, none early."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.delay.schedule import entries as placing
from pulque.delay.schedule.entries import ReplayedStep, place
from pulque.delay.schedule.tick_index import RowState, TickIndex
from pulque.model.batch import seed_of, verify_crc
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.storage.message_table import MessageTable, Scratch
from pulque.storage.schedule.schedule_log import ScheduleEntry

START = 1_794_820_200_000
TICK_MS = 300_000
SUBJECTS = ("orders", "refunds")

sends = st.lists(
    st.tuples(
        st.sampled_from(SUBJECTS),
        st.lists(
            st.one_of(st.integers(0, 3000), st.integers(0, 3 * TICK_MS)), min_size=1, max_size=12
        ),
    ),
    min_size=1,
    max_size=8,
)


@contextmanager
def cut(*, is_fine: bool) -> Iterator[None]:
    """Have few messages cut as many are: by windows, into small entries."""
    with ExitStack() as stack:
        if is_fine:
            sizes = {"WORTH_WINDOWS": 1, "WORTH_KEEPING": 300, "MOST_MESSAGES": 5}
            for name, size in sizes.items():
                stack.enter_context(patch.object(placing, f"_{name}", size))
        yield


def replayed(
    messages: list[tuple[str, list[int]]], *, is_even: bool = False
) -> list[ReplayedStep]:
    """Return batches whose bodies are their numbers and due times; all of one size if asked."""
    found = []
    number = 0
    for i, (subject, delays) in enumerate(messages):
        packer = BatchPacker()
        for delay in delays:
            number += 1
            packer.add_encoded(
                (b"%06d %d" if is_even else b"%d %d") % (number, START + delay),
                key=b"k" * (1 if is_even else number % 3),
                due_at_ms=START + delay,
                message_id=number.to_bytes(16, "big"),
            )
        batch = packer.encode(
            seed=seed_of(subject), ids=bytes(16 * len(delays)), created_at_ms=START + i
        )
        found.append(ReplayedStep(PartitionName(subject), i * 100, i * 100 + 100, batch))
    return found


def messages_of(batch: bytes, partition: PartitionName) -> list[Message]:
    assert verify_crc(batch, seed_of(partition))
    stored = StoredBatch(
        batch, partition=partition, first_sequence=ConsumeSequence(0), stored_at_ms=0
    )
    return [Message(stored, i) for i in range(len(stored))]


def indexes_of(
    batches: list[ReplayedStep], scratch: Scratch
) -> tuple[list[TickIndex], dict[int, dict[int, ScheduleEntry]]]:
    """Return the index of each tick, and its entries by offset."""
    indexes = []
    kept: dict[int, dict[int, ScheduleEntry]] = {}
    for tick, placed in sorted(place(batches, TICK_MS, None, scratch).items()):
        index = TickIndex(tick)
        offset = 0
        kept[tick] = {}
        for partition, parts, first_ms, last_ms, columns, first, last in placed:
            batch = b"".join(parts)
            messages = messages_of(batch, partition)
            due_ms = [message.due_at_ms for message in messages]
            assert columns["due_at_ms"][first:last].tolist() == due_ms
            entry = ScheduleEntry(
                offset, len(batch), partition, len(messages), first_ms, last_ms, 1, batch
            )
            index.add([entry])
            kept[tick][offset] = entry
            offset += len(batch)
            assert tick <= first_ms <= last_ms < tick + TICK_MS
        indexes.append(index)
    return indexes, kept


@pytest.mark.accepts("001-33")
@given(
    messages=sends,
    cancelled=st.sets(st.integers(1, 96)),
    steps=st.lists(st.integers(1, 120_000), min_size=1, max_size=30),
    is_even=st.booleans(),
    is_fine=st.booleans(),
    scratch=st.sampled_from((0, 700, 1_000_000)),
)
def test_what_is_delivered_is_what_was_scheduled_without_what_was_cancelled(  # noqa: C901
    messages: list[tuple[str, list[int]]],
    cancelled: set[int],
    steps: list[int],
    is_even: bool,  # noqa: FBT001
    is_fine: bool,  # noqa: FBT001
    scratch: int,
) -> None:
    batches = replayed(messages, is_even=is_even)
    with cut(is_fine=is_fine):
        indexes, kept = indexes_of(batches, Scratch(scratch))
    expected = set()
    for each in batches:
        for message in messages_of(each.batch, each.partition):
            number = int(message.body.split()[0])
            if number not in cancelled:
                expected.add((each.partition, number, message.due_at_ms, message.key))
    for index in indexes:
        for number in cancelled:
            index.mark(index.find(number.to_bytes(16, "big")), RowState.CANCELLED)
    delivered: dict[tuple[int, str], list[tuple[str, int, int, str | None]]] = defaultdict(list)
    now_ms = START
    for step in [*steps, 4 * TICK_MS]:
        now_ms += step
        for index in indexes:
            index.approach(now_ms + 5000)
            while (found := index.take(now_ms)) is not None:
                partition, rows = found
                places = index.where(rows)
                tables = [
                    MessageTable.of([kept[index.tick][at].batch]).taken(within)
                    for (at, _), within in zip(places.entries, places.within, strict=True)
                ]
                taken = MessageTable.joined(tables).taken(places.order)
                batch = taken.packed(0, len(rows), seed=seed_of(partition), has_due=False)
                for message in messages_of(batch, partition):
                    number, due_ms = map(int, message.body.split())
                    assert due_ms <= now_ms, "it is early"
                    delivered[index.tick, partition].append(
                        (partition, number, due_ms, message.key)
                    )
                assert index.rows_of(index.runs_of(rows)).tolist() == rows.tolist()
    all_of_them = [each for some in delivered.values() for each in some]

    assert sorted(all_of_them) == sorted(expected)
    for some in delivered.values():
        dues = [due_ms for _, _, due_ms, _ in some]
        assert dues == sorted(dues), "not in the order of due times within a tick"


@given(
    messages=sends,
    ends=st.dictionaries(st.integers(0, 3), st.integers(0, 9)),
    is_even=st.booleans(),
)
def test_what_a_tick_has_already_is_not_placed_again(
    messages: list[tuple[str, list[int]]],
    ends: dict[int, int],
    is_even: bool,  # noqa: FBT001
) -> None:
    batches = replayed(messages, is_even=is_even)
    first = START - START % TICK_MS
    covered = {first + tick * TICK_MS: end * 100 for tick, end in ends.items()}
    found = sorted(
        (tick, message.body)
        for tick, placed in place(batches, TICK_MS, covered).items()
        for each in placed
        for message in messages_of(b"".join(each.batch), each.partition)
    )
    expected = sorted(
        (message.due_at_ms - message.due_at_ms % TICK_MS, message.body)
        for each in batches
        for message in messages_of(each.batch, each.partition)
        if each.offset >= covered.get(message.due_at_ms - message.due_at_ms % TICK_MS, 0)
    )

    assert found == expected


@given(
    messages=st.lists(
        st.lists(st.integers(0, 3 * TICK_MS), min_size=1, max_size=40), min_size=1, max_size=4
    )
)
def test_an_entry_of_many_messages_has_those_of_an_eighth_of_a_tick(
    messages: list[list[int]],
) -> None:
    batches = replayed([("orders", delays) for delays in messages])
    with cut(is_fine=True):
        placed = place(batches, TICK_MS)
    window_ms = TICK_MS // 8

    for tick, entries in placed.items():
        for each in entries:
            first, last = each.first_due_ms - tick, each.last_due_ms - tick
            assert first // window_ms == last // window_ms
            assert each.end - each.start <= 5


def test_what_is_due_at_once_stays_in_its_order_whatever_its_size() -> None:
    batches = replayed([("orders", [5]), ("orders", [5] * 5), ("orders", [5])])
    with cut(is_fine=True):
        assert len(batches[0].batch) < placing._WORTH_KEEPING <= len(batches[1].batch)  # noqa: SLF001
        (entries,) = place(batches, TICK_MS).values()
    bodies = [
        m.body for each in entries for m in messages_of(b"".join(each.batch), each.partition)
    ]

    assert [int(body.split()[0]) for body in bodies] == list(range(1, 8))

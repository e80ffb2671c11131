"""The due index: never early, fair between partitions, compact."""

import sys

import pytest

from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.schedule import TICK_MS, Due, Schedule

P, Q = PartitionId(4), PartitionId(9)
FIRST = ConsumeSequence(0)


def test_nothing_is_early_and_all_of_a_tick_is_due_together() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [1001, 1100, 1101])

    assert schedule.next_due_ms() == 1100
    assert schedule.due(1099, 10) is None
    assert schedule.due(1100, 10) == Due(P, 1100, [ConsumeSequence(0), ConsumeSequence(1)])


def test_what_is_due_comes_until_it_is_removed() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [500, 500, 500])

    assert schedule.due(500, 2) == schedule.due(500, 2)
    schedule.remove(P, 500, [ConsumeSequence(0), ConsumeSequence(1)])
    assert schedule.due(500, 2) == Due(P, 500, [ConsumeSequence(2)])
    schedule.remove(P, 500, [ConsumeSequence(2)])
    assert schedule.due(10**12, 2) is None
    assert schedule.next_due_ms() is None
    assert len(schedule) == 0


@pytest.mark.accepts("000-03")
def test_partitions_take_turns_so_that_one_with_very_many_delays_no_other() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [1000] * 10_000)
    schedule.add(Q, FIRST, [1000])

    found = [schedule.due(1000, 100), schedule.due(1000, 100)]

    assert {due.partition for due in found if due is not None} == {P, Q}


def test_what_is_postponed_lets_the_others_of_its_partition_go_first() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [100, 200])
    due = schedule.due(1000, 10)
    assert due == Due(P, 100, [FIRST])

    schedule.postpone(due, 5000)

    assert schedule.due(1000, 10) == Due(P, 200, [ConsumeSequence(1)])
    schedule.remove(P, 200, [ConsumeSequence(1)])
    assert (schedule.due(4999, 10), schedule.next_due_ms()) == (None, 5000)
    assert schedule.due(5000, 10) == Due(P, 100, [FIRST])


def test_what_is_postponed_lets_those_behind_it_go_that_are_due_at_the_same_time() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [100] * 5)
    first, last = [ConsumeSequence(n) for n in (0, 1)], [ConsumeSequence(4)]
    for sequences in (first, [ConsumeSequence(n) for n in (2, 3)]):
        due = schedule.due(1000, 2)
        assert due == Due(P, 100, sequences)
        schedule.postpone(due, 5000)
    assert schedule.due(1000, 2) == Due(P, 100, last)

    schedule.remove(P, 100, last)

    assert schedule.due(1000, 2) == Due(P, 100, first)
    schedule.postpone(Due(P, 100, first), 5000)
    due = schedule.due(1000, 2)
    assert due is not None
    schedule.postpone(due, 5000)
    assert (schedule.due(4999, 2), schedule.next_due_ms()) == (None, 5000)
    assert schedule.due(5000, 2) == Due(P, 100, first)


def test_what_comes_late_to_a_tick_that_is_past_is_due_at_once() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [100])
    schedule.remove(P, 100, [FIRST])
    schedule.due(5000, 1)

    schedule.add(P, ConsumeSequence(1), [100])

    assert schedule.due(5000, 1) == Due(P, 100, [ConsumeSequence(1)])


def test_a_due_time_before_1970_is_past() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [-5000])

    assert schedule.due(0, 1) == Due(P, 0, [FIRST])


@pytest.mark.accepts("000-03")
def test_a_waiting_message_costs_a_few_bytes_and_no_object() -> None:
    schedule = Schedule()
    before = sys.getallocatedblocks()
    for second in range(100):
        schedule.add(P, ConsumeSequence(10_000 * second), [second * 1000 + 1] * 10_000)
    objects = sys.getallocatedblocks() - before

    sizes = [value for value in schedule.encode_changes().values() if value is not None]
    assert len(schedule) == 1_000_000
    assert objects < 5000
    assert sum(map(len, sizes)) == 8_000_000


def test_only_what_changed_is_written_again() -> None:
    schedule = Schedule()
    schedule.add(P, FIRST, [TICK_MS, 2 * TICK_MS])
    assert len(schedule.encode_changes()) == 2

    schedule.remove(P, TICK_MS, [FIRST])

    assert list(schedule.encode_changes().values()) == [None]
    assert schedule.encode_changes() == {}

"""The pull log of one consumer: ranges in, one number for progress."""

import pytest

from pulque.errors import InvalidRequestError, StaleSettleError
from pulque.model.actions import NackedDelivery, SubscriptionId
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.rules.subscription import HeldRange, Subscription

NOW = Tenure(Epoch(0), StartCount(2))
BEFORE = Tenure(Epoch(0), StartCount(1))


def subscription(*pulled: tuple[Tenure, int, int]) -> Subscription:
    """Return a subscription that was handed ranges of (tenure, first sequence, length)."""
    made = Subscription(SubscriptionId(1), PartitionId(1), Group("g"), ConsumerId("c"), 1)
    for tenure, first, length in pulled:
        made.pulled(tenure, ConsumeSequence(first), length, length)
    return made


def ranges(found: Subscription) -> list[tuple[int, int, int]]:
    return [(held.first_pull, held.first_sequence, held.length) for held in found.held]


def test_a_new_subscription_holds_nothing() -> None:
    found = subscription()

    assert (found.settled, found.next_pull, found.held_count) == (0, 0, 0)
    assert list(found.held_from(0)) == []


@pytest.mark.accepts("000-54")
def test_ranges_that_follow_each_other_become_one() -> None:
    found = subscription((NOW, 10, 3), (NOW, 13, 2), (NOW, 20, 4))

    assert ranges(found) == [(0, 10, 5), (5, 20, 4)]
    assert (found.next_pull, found.held_count) == (9, 9)


def test_ranges_of_two_tenures_stay_apart() -> None:
    found = subscription((BEFORE, 10, 3), (NOW, 13, 2))

    assert ranges(found) == [(0, 10, 3), (3, 13, 2)]


@pytest.mark.accepts("000-10")
def test_settling_moves_one_number_and_keeps_the_rest() -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))

    found.settle(PullSequence(3))

    assert found.settled == 4
    assert ranges(found) == [(4, 21, 3)]
    assert found.held_count == 3


def test_settling_everything_leaves_nothing() -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))

    found.settle(PullSequence(6))

    assert (found.settled, found.next_pull, list(found.held)) == (7, 7, [])


@pytest.mark.parametrize(
    ("expected", "wanted"),
    [
        (0, [(0, 10, 3), (3, 20, 4)]),
        (2, [(2, 12, 1), (3, 20, 4)]),
        (3, [(3, 20, 4)]),
        (5, [(5, 22, 2)]),
        (7, []),
        (99, []),
    ],
)
def test_what_is_held_from_a_delivery_on(
    expected: int, wanted: list[tuple[int, int, int]]
) -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))

    assert [
        (held.first_pull, held.first_sequence, held.length) for held in found.held_from(expected)
    ] == wanted


def test_part_of_a_range_is_clipped_on_both_sides() -> None:
    held = HeldRange(NOW, PullSequence(5), ConsumeSequence(50), 10, 4)

    assert held.part(0, 99) == held
    assert held.part(7, 9) == HeldRange(NOW, PullSequence(7), ConsumeSequence(52), 2, 1)
    assert held.part(20, 30).length == 0
    assert held.part(0, 5).length == 0


# -- which settles count ------------------------------------------------------------------------


@pytest.mark.accepts("000-28", "000-30")
@pytest.mark.parametrize(("first", "last"), [(2, 2), (2, 4), (2, 6), (0, 4), (1, 2)])
def test_a_settle_counts_if_it_follows_what_is_settled_or_overlaps_it(
    first: int, last: int
) -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))
    found.settle(PullSequence(1))

    assert found.check_settle(NOW, first, last, ()) == 2


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (1, 1)])
def test_a_settle_of_what_is_settled_is_a_repetition(first: int, last: int) -> None:
    found = subscription((NOW, 10, 3))
    found.settle(PullSequence(1))

    assert found.check_settle(BEFORE, first, last, ()) is None


@pytest.mark.accepts("000-30", "003-50")
@pytest.mark.parametrize(("first", "last"), [(3, 3), (3, 6), (7, 9), (2, 7), (0, 7)])
def test_a_settle_with_a_gap_or_beyond_the_end_is_refused(first: int, last: int) -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))
    found.settle(PullSequence(1))

    with pytest.raises(StaleSettleError):
        found.check_settle(NOW, first, last, ())


@pytest.mark.parametrize(
    ("first", "last", "nacked"),
    [(1, 0, ()), (0, 1, (2,)), (1, 2, (0,)), (0, 2, (1, 1)), (0, 2, (2, 1))],
)
def test_a_settle_that_cannot_be_is_refused(
    first: int, last: int, nacked: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequestError):
        subscription((NOW, 10, 3)).check_settle(NOW, first, last, nacked)


def test_a_settle_under_another_tenure_is_refused() -> None:
    found = subscription((BEFORE, 10, 3), (NOW, 13, 2))

    assert found.check_settle(BEFORE, 0, 2, ()) == 0
    with pytest.raises(StaleSettleError):
        found.check_settle(NOW, 0, 2, ())
    with pytest.raises(StaleSettleError):
        found.check_settle(BEFORE, 0, 3, ())
    with pytest.raises(StaleSettleError):
        found.check_settle(Tenure(Epoch(1), StartCount(1)), 0, 2, ())


def test_what_was_taken_away_cannot_be_settled_any_more() -> None:
    found = subscription((NOW, 10, 5))
    found.settle(PullSequence(1))
    found.lose()

    assert (found.settled, found.next_pull, list(found.held)) == (5, 5, [])
    assert found.check_settle(NOW, 0, 1, ()) is None
    for first, last in ((2, 2), (0, 2), (4, 4), (4, 9)):
        with pytest.raises(StaleSettleError):
            found.check_settle(NOW, first, last, ())


def test_a_lost_consumer_goes_on_with_what_it_is_handed_next() -> None:
    found = subscription((NOW, 10, 5))
    found.lose()
    found.pulled(NOW, ConsumeSequence(30), 2, 2)

    assert ranges(found) == [(5, 30, 2)]
    assert found.check_settle(NOW, 5, 6, ()) == 5


# -- which messages -----------------------------------------------------------------------------


@pytest.mark.accepts("000-29", "001-30")
def test_nacked_deliveries_are_found_in_the_pull_log() -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4), (NOW, 40, 1))
    nacked = tuple(NackedDelivery(PullSequence(pull), -1, "") for pull in (0, 2, 3, 6, 7))

    assert [sequence for sequence, _ in found.sequences_of(nacked)] == [10, 12, 20, 23, 40]


# -- what recovery does -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "next_pull", "left"),
    [
        (99, 7, [(0, 10, 3), (3, 20, 4)]),
        (24, 7, [(0, 10, 3), (3, 20, 4)]),
        (22, 5, [(0, 10, 3), (3, 20, 2)]),
        (20, 3, [(0, 10, 3)]),
        (13, 3, [(0, 10, 3)]),
        (11, 1, [(0, 10, 1)]),
        (0, 0, []),
    ],
)
def test_deliveries_of_messages_that_are_gone_are_forgotten(
    end: int, next_pull: int, left: list[tuple[int, int, int]]
) -> None:
    found = subscription((NOW, 10, 3), (NOW, 20, 4))

    found.clip(ConsumeSequence(end))

    assert (found.next_pull, ranges(found)) == (next_pull, left)


def test_settled_deliveries_stay_settled_when_messages_are_gone() -> None:
    found = subscription((NOW, 10, 5))
    found.settle(PullSequence(2))

    found.clip(ConsumeSequence(0))

    assert (found.settled, found.next_pull, list(found.held)) == (3, 3, [])


def test_a_fact_that_is_behind_sets_the_consumer_back() -> None:
    found = subscription((NOW, 10, 5))

    found.align(PullSequence(3))

    assert (found.next_pull, ranges(found)) == (3, [(0, 10, 3)])


def test_deliveries_that_no_fact_tells_of_count_as_settled_in_their_turn() -> None:
    found = subscription((NOW, 10, 2))
    found.align(PullSequence(5))
    found.pulled(NOW, ConsumeSequence(20), 2, 2)

    assert (found.settled, found.next_pull, ranges(found)) == (0, 7, [(0, 10, 2), (5, 20, 2)])
    found.settle(PullSequence(1))
    assert found.settled == 5
    assert found.check_settle(NOW, 5, 6, ()) == 5


def test_a_settle_of_deliveries_that_no_fact_tells_of_moves_on() -> None:
    found = subscription((NOW, 10, 2))

    found.settle(PullSequence(8))

    assert (found.settled, found.next_pull, found.held_count) == (9, 9, 0)


# -- what a filter passed over, and broadcasts --------------------------------------------------


def test_only_what_is_wanted_counts_as_held() -> None:
    found = subscription()
    found.pulled(NOW, ConsumeSequence(10), 100, 5)
    found.pulled(NOW, ConsumeSequence(110), 100, 1)
    assert found.held_count == 6

    found.settle(PullSequence(99))
    assert 1 <= found.held_count <= 3
    found.settle(PullSequence(198))
    assert found.held_count == 1, "something is held, so it never counts as nothing"
    found.settle(PullSequence(199))
    assert found.held_count == 0


def broadcast() -> Subscription:
    return Subscription(SubscriptionId(1), PartitionId(1), Group("#c"), ConsumerId("c"), 1)


def pull_directly(found: Subscription, first: int, length: int) -> None:
    sequence = ConsumeSequence(first)
    found.align(found.pull_of(sequence))
    found.pulled(NOW, sequence, length, length)


@pytest.mark.accepts("003-59")
def test_a_broadcast_counts_by_consume_sequences_over_gaps() -> None:
    found = broadcast()
    pull_directly(found, 40, 10)
    assert (found.settled, found.next_pull) == (40, 50)
    pull_directly(found, 70, 5)

    assert ranges(found) == [(40, 40, 10), (70, 70, 5)]
    assert found.check_settle(NOW, 40, 74, ()) == 40
    found.settle(PullSequence(49))
    assert found.settled == 70
    found.settle(PullSequence(74))
    assert (found.settled, found.held_count, ranges(found)) == (75, 0, [])


def test_a_broadcast_keeps_one_range_however_often_it_pulls() -> None:
    found = broadcast()
    for at in range(50):
        pull_directly(found, at * 10, 10)

    assert ranges(found) == [(0, 0, 500)]


def test_a_broadcast_that_was_set_back_may_settle_again() -> None:
    found = broadcast()
    pull_directly(found, 0, 60)
    found.settle(PullSequence(29))
    found.lose()
    pull_directly(found, 10, 60)

    assert (found.settled, ranges(found)) == (10, [(10, 10, 60)])
    assert found.check_settle(NOW, 10, 69, ()) == 10

"""Consumption by example: who is handed what, and what follows from each fact."""

from collections.abc import Iterable

import pytest

from pulque.errors import FencedError
from pulque.model.actions import (
    ALL_OF_THEM,
    Action,
    ConsumerLost,
    GroupOpened,
    NackedDelivery,
    Pulled,
    Settled,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.rules.consumption import Consumption, Effect
from pulque.rules.consumption_state import encode_changes, load_state

NOW = Tenure(Epoch(0), StartCount(1))
P = PartitionId(1)
G = Group("g")


def opened(number: int, consumer: str, incarnation: int = 1, partition: int = P) -> Action:
    return SubscriptionOpened(
        SubscriptionId(number), PartitionId(partition), G, ConsumerId(consumer), incarnation
    )


def pulled(
    number: int,
    first_pull: int,
    first: int,
    count: int,
    start: int = 1,
    matched: int = ALL_OF_THEM,
) -> Action:
    return Pulled(
        SubscriptionId(number),
        Tenure(Epoch(0), StartCount(start)),
        PullSequence(first_pull),
        ConsumeSequence(first),
        count,
        0,
        matched,
    )


def settled(number: int, first: int, last: int, *nacked: int) -> Action:
    return Settled(
        SubscriptionId(number),
        PullSequence(first),
        PullSequence(last),
        tuple(NackedDelivery(PullSequence(pull), -1, f"no {pull}") for pull in nacked),
        0,
    )


def lost(number: int) -> Action:
    return ConsumerLost(SubscriptionId(number), "silent", 0)


def consumption(*facts: Action) -> Consumption:
    made = Consumption()
    for fact in (GroupOpened(P, G, ConsumeSequence(0)), *facts):
        made.handle(fact)
    return made


def sequences(effects: Iterable[Effect]) -> list[int]:
    return [each.sequence for effect in effects for each in effect.redeliveries]


def held(found: Consumption, number: int) -> list[int]:
    return [
        each.first_sequence + i
        for each in found.subscriptions[SubscriptionId(number)].held
        for i in range(each.length)
    ]


def checkpointed(found: Consumption) -> Consumption:
    return load_state({k: v for k, v in encode_changes(found).items() if v is not None})


# -- who is handed what -------------------------------------------------------------------------


@pytest.mark.accepts("001-25", "001-29", "001-30", "000-54", "003-02")
def test_consumers_are_mapped_onto_a_partition_by_pull_logs_of_their_own() -> None:
    """The worked example: consume sequences 0..3, handed to two consumers in turns."""
    found = consumption(
        opened(1, "c1"),
        opened(2, "c2"),
        pulled(1, 0, 0, 1),
        pulled(2, 0, 1, 2),
        pulled(1, 1, 3, 1),
    )

    first, second = (found.subscriptions[SubscriptionId(n)] for n in (1, 2))
    assert [(h.first_pull, h.first_sequence, h.length) for h in first.held] == [
        (0, 0, 1),
        (1, 3, 1),
    ]
    assert [(h.first_pull, h.first_sequence, h.length) for h in second.held] == [(0, 1, 2)]
    assert (first.next_pull, second.next_pull) == (2, 2)


@pytest.mark.accepts("003-03", "003-48", "003-49")
def test_a_group_has_its_next_sequence_and_consumers_have_pull_and_settled_positions() -> None:
    found = consumption(opened(1, "c1"), opened(2, "c2"), pulled(1, 0, 0, 3), pulled(2, 0, 3, 3))
    found.handle(settled(2, 0, 2))

    state = found.groups[P, G]
    assert state.next_sequence == 6
    assert [name for name in state.__slots__ if "settled" in name or "ack" in name] == []
    assert [(s.consumer, s.settled, s.next_pull) for s in found.subscriptions.values()] == [
        ("c1", 0, 3),
        ("c2", 3, 3),
    ]


@pytest.mark.accepts("003-51")
def test_settles_of_two_consumers_need_no_order_between_them() -> None:
    found = consumption(opened(1, "c1"), opened(2, "c2"), pulled(1, 0, 0, 3), pulled(2, 0, 3, 3))

    found.handle(settled(2, 0, 2))
    assert (held(found, 1), held(found, 2)) == ([0, 1, 2], [])
    found.handle(settled(1, 0, 2))

    assert held(found, 1) == []


# -- effects ------------------------------------------------------------------------------------


def test_acked_messages_call_for_nothing() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3))

    assert found.handle(settled(1, 0, 2)) == []
    assert found.pending() == []


def test_nacked_messages_are_to_be_redelivered_with_their_reasons() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 10, 2), pulled(1, 2, 20, 2))

    effects = found.handle(settled(1, 0, 3, 1, 2))

    assert [(r.sequence, r.reason) for r in effects[0].redeliveries] == [
        (11, "no 1"),
        (20, "no 2"),
    ]
    assert found.pending() == effects


@pytest.mark.accepts("003-46", "003-52")
def test_what_a_lost_consumer_holds_is_to_be_redelivered_and_the_group_is_not_rewound() -> None:
    found = consumption(opened(1, "c1"), opened(2, "c2"), pulled(1, 0, 0, 3), pulled(2, 0, 3, 3))
    found.handle(settled(1, 0, 0))

    effects = found.handle(lost(1))

    assert sequences(effects) == [1, 2]
    assert found.groups[P, G].next_sequence == 6
    assert (held(found, 1), held(found, 2)) == ([], [3, 4, 5])
    assert found.subscriptions[SubscriptionId(1)].settled == 3


def test_a_consumer_without_anything_is_lost_without_effect() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 1), settled(1, 0, 0))

    assert found.handle(lost(1)) == []


def test_a_performed_redelivery_is_pending_no_more() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3), settled(1, 0, 2, 0, 2))

    found.redelivered(P, G, [ConsumeSequence(0)])

    assert sequences(found.pending()) == [2]
    assert found.pending_of(P, G) == {2}


def test_a_redelivery_of_a_group_that_is_not_known_is_passed_over() -> None:
    found = Consumption()

    found.redelivered(P, G, [ConsumeSequence(0)])

    assert found.pending_of(P, G) == set()
    assert encode_changes(found) == {}


def test_a_settle_fact_that_is_repeated_changes_nothing() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3))
    found.handle(settled(1, 0, 2, 1))

    assert found.handle(settled(1, 0, 2, 1)) == []
    assert sequences(found.pending()) == [1]


# -- numbers and incarnations -------------------------------------------------------------------


def test_subscriptions_opened_at_the_same_time_get_numbers_of_their_own() -> None:
    found = consumption(opened(1, "c1"))

    facts = [
        found.opened(PartitionId(2 + ahead), G, ConsumerId("c1"), 1, ahead=ahead)
        for ahead in range(3)
    ]

    assert [fact.subscription for fact in facts if fact is not None] == [2, 3, 4]


def test_a_known_incarnation_needs_no_fact_a_newer_one_does_and_an_older_one_is_refused() -> None:
    found = consumption(opened(1, "c1", incarnation=5))
    me = ConsumerId("c1")

    assert found.opened(P, G, me, 5) is None
    assert found.opened(P, G, me, 6) == opened(1, "c1", incarnation=6)
    with pytest.raises(FencedError):
        found.opened(P, G, me, 4)


def test_a_new_incarnation_keeps_what_it_held() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3))

    found.handle(opened(1, "c1", incarnation=2))

    assert held(found, 1) == [0, 1, 2]
    assert found.subscriptions[SubscriptionId(1)].incarnation == 2


def test_the_facts_of_a_new_segment_open_every_subscription() -> None:
    facts = [opened(1, "c1"), opened(2, "c2", incarnation=7)]

    assert list(consumption(*facts).open_facts()) == facts


def test_a_subscription_that_is_opened_once_more_stays_as_it_is() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3))

    for fact in list(found.open_facts()):
        found.handle(fact)

    assert held(found, 1) == [0, 1, 2]
    assert len(found.subscriptions_of(G, ConsumerId("c1"))) == 1


def test_a_group_that_is_opened_once_more_stays_where_it_is() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 3))

    found.handle(GroupOpened(P, G, ConsumeSequence(0)))

    assert found.groups[P, G].next_sequence == 3


# -- what a filter wants of a range -------------------------------------------------------------


def ranges(effects: Iterable[Effect]) -> list[tuple[int, int]]:
    return [(each.sequence, each.end) for effect in effects for each in effect.redeliveries]


def filtered(length: int, matched: int) -> Consumption:
    """Return a group whose filter may want some of what its only consumer was handed."""
    return consumption(opened(1, "c1"), pulled(1, 0, 100, length, matched=matched))


def test_a_lost_consumer_with_a_filter_leaves_a_range_and_not_each_message_of_it() -> None:
    found = filtered(1_000_000, 3)

    effects = found.handle(lost(1))

    assert ranges(effects) == [(100, 1_000_100)]
    assert found.groups[P, G].pending_count == 3
    assert ranges(checkpointed(found).pending()) == [(100, 1_000_100)]


def test_a_range_is_narrowed_to_what_the_filter_wants() -> None:
    found = filtered(50, 5)
    ((ranged,),) = [effect.redeliveries for effect in found.handle(lost(1))]
    wanted = [ConsumeSequence(103), ConsumeSequence(110)]

    some = found.narrowed(P, G, ranged, ConsumeSequence(120), wanted)

    assert [(each.sequence, each.end) for each in some] == [(103, 104), (110, 111), (120, 150)]
    assert ranges(found.pending()) == [(103, 104), (110, 111), (120, 150)]
    assert {each.reason for each in some} == {"silent"}
    rest = found.narrowed(P, G, some[-1], ConsumeSequence(150), [])
    found.redelivered(P, G, wanted)
    assert (rest, found.pending()) == ([], [])
    assert checkpointed(found).pending() == []


def test_the_last_message_of_a_range_is_redelivered_as_any() -> None:
    found = filtered(50, 5)
    ((ranged,),) = [effect.redeliveries for effect in found.handle(lost(1))]

    found.narrowed(P, G, ranged, ConsumeSequence(149), [])
    found.redelivered(P, G, [ConsumeSequence(149)])

    assert found.pending() == []


def test_what_the_log_has_of_a_range_is_left_out_of_it() -> None:
    facts = [opened(1, "c1"), pulled(1, 0, 100, 50, matched=5), lost(1)]
    after, before = checkpointed(consumption(*facts)), checkpointed(consumption())
    for each in (after, before):
        each.remember_redelivered(P, G, [ConsumeSequence(110)])
        each.remember_redelivered(P, G, [ConsumeSequence(149)])

    for fact in facts:
        before.handle(fact)

    left = [(100, 110), (111, 149)]
    assert ranges(after.pending()) == ranges(before.pending()) == left
    assert ranges(checkpointed(after).pending()) == left


@pytest.mark.parametrize(
    ("end", "left"),
    [(90, []), (100, []), (101, [(100, 101)]), (120, [(100, 120)]), (150, [(100, 150)])],
)
def test_a_range_ends_where_its_partition_does(end: int, left: list[tuple[int, int]]) -> None:
    found = filtered(50, 5)
    found.handle(lost(1))
    encode_changes(found)

    is_changed = found.clip({P: ConsumeSequence(end)})

    assert (ranges(found.pending()), is_changed) == (left, end < 150)


# -- recovery -----------------------------------------------------------------------------------


def test_redeliveries_that_the_log_has_are_not_called_for_again() -> None:
    before = checkpointed(consumption(opened(1, "c1"), pulled(1, 0, 0, 4), settled(1, 0, 1, 0, 1)))

    before.remember_redelivered(P, G, [ConsumeSequence(1)])
    before.remember_redelivered(P, G, [ConsumeSequence(2)])
    effects = before.handle(settled(1, 2, 3, 2, 3))

    assert sequences(effects) == [3]
    assert sequences(before.pending()) == [0, 3]


def test_a_redelivery_whose_fact_a_power_cut_took_stands_for_no_later_failure() -> None:
    found = checkpointed(consumption(opened(1, "c1"), pulled(1, 0, 0, 4)))

    found.remember_redelivered(P, G, [ConsumeSequence(0)])

    assert found.end_replay()
    assert sequences(found.handle(lost(1))) == [0, 1, 2, 3]


def test_a_redelivery_whose_fact_was_replayed_is_done_with() -> None:
    found = checkpointed(consumption(opened(1, "c1"), pulled(1, 0, 0, 4)))

    found.remember_redelivered(P, G, [ConsumeSequence(0)])
    found.handle(settled(1, 0, 0, 0))

    assert not found.end_replay()
    assert sequences(found.pending()) == []


def test_positions_beyond_the_recovered_end_are_set_back_to_it() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 6), settled(1, 0, 3, 1, 3))

    assert found.clip({P: ConsumeSequence(5)}) is True

    assert found.groups[P, G].next_sequence == 5
    assert held(found, 1) == [4]
    assert sequences(found.pending()) == [1, 3]
    assert found.clip({P: ConsumeSequence(3)}) is True
    assert sequences(found.pending()) == [1]
    assert (held(found, 1), found.subscriptions[SubscriptionId(1)].settled) == ([], 4)


def test_a_clip_that_changes_nothing_says_so() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 6), settled(1, 0, 1, 1))
    encode_changes(found)

    assert found.clip({P: ConsumeSequence(6)}) is False
    assert encode_changes(found) == {}


@pytest.mark.parametrize("end", [0, 2, 5])
def test_what_a_clip_changes_is_in_the_next_checkpoint(end: int) -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 6), settled(1, 0, 3, 1, 3))
    state = dict(encode_changes(found))

    found.clip({P: ConsumeSequence(end)})
    state |= encode_changes(found)

    again = load_state({k: v for k, v in state.items() if v is not None})
    assert again.groups[P, G].next_sequence == end
    assert sequences(again.pending()) == sequences(found.pending())
    assert held(again, 1) == held(found, 1)


def test_what_belongs_to_a_partition_that_is_gone_is_forgotten() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 6), settled(1, 0, 3, 1))
    state = dict(encode_changes(found))

    assert found.clip({}) is True
    state |= encode_changes(found)

    assert (found.groups, found.subscriptions, found.pending()) == ({}, {}, [])
    assert found.subscriptions_of(G, ConsumerId("c1")) == []
    assert found.subscription(P, G, ConsumerId("c1")) is None
    assert set(state.values()) == {None}


def test_a_number_that_was_given_to_another_means_the_other() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 2))

    found.handle(opened(1, "c9", partition=2))

    assert found.subscription(P, G, ConsumerId("c1")) is None
    assert found.subscriptions[SubscriptionId(1)].consumer == "c9"
    assert held(found, 1) == []


def test_a_group_goes_on_where_its_last_pull_says_though_a_recovery_left_no_fact() -> None:
    """The power took messages 7 to 9, and the checkpoint that knew it is damaged."""
    facts = [opened(1, "c1"), pulled(1, 0, 0, 10), pulled(1, 7, 7, 1, start=2)]

    found = consumption(*facts)

    assert found.groups[P, G].next_sequence == 8
    assert held(found, 1) == list(range(8))


def test_facts_about_numbers_that_nobody_opened_are_passed_over() -> None:
    found = consumption()

    for fact in (pulled(9, 0, 0, 3), settled(9, 0, 2, 1), lost(9)):
        assert found.handle(fact) == []

    assert found.subscriptions == {}


def test_a_loss_is_redelivered_though_the_opening_of_its_group_is_damaged() -> None:
    found = load_state(
        {k: v for k, v in encode_changes(consumption(opened(1, "c1"))).items() if v is not None}
    )
    found.groups.clear()
    found.handle(pulled(1, 0, 4, 2))
    found.groups.clear()

    assert sequences(found.handle(lost(1))) == [4, 5]


# -- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_holds_only_what_changed_since_the_last_one() -> None:
    found = consumption(opened(1, "c1"), opened(2, "c2"), pulled(1, 0, 0, 3))
    assert len(encode_changes(found)) == 3

    assert encode_changes(found) == {}
    found.handle(settled(1, 0, 1))
    assert len(encode_changes(found)) == 1


def test_a_long_reason_is_cut_and_stays_text() -> None:
    found = consumption(opened(1, "c1"), pulled(1, 0, 0, 1))
    found.handle(
        Settled(
            SubscriptionId(1),
            PullSequence(0),
            PullSequence(0),
            (NackedDelivery(PullSequence(0), 250, "ü" * 700),),
            0,
        )
    )

    (redelivery,) = checkpointed(found).pending()[0].redeliveries

    assert redelivery.delay_ms == 250
    assert redelivery.reason.startswith("ü" * 499)
    assert len(redelivery.reason.encode()) <= 1003

"""Facts that are missing from the log, wherever they were, stop nothing.

A damaged range of the action log is reported and passed over. Whatever the rules make of the
rest, they neither fail nor end in a state that cannot be: positions are in order, consumers can
go on pulling and settling, and a checkpoint of it can be loaded.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.actions import (
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
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import encode_changes, load_state

P, G = PartitionId(1), Group("g")
NOW = Tenure(Epoch(0), StartCount(1))
steps = st.lists(
    st.tuples(
        st.sampled_from(["pull", "pull", "settle", "nack", "lose"]),
        st.integers(1, 2),
        st.integers(1, 4),
    ),
    max_size=25,
)


def facts_of(steps: list[tuple[str, int, int]]) -> list[Action]:
    """Return the facts of a life in which all went well."""
    life, facts = Consumption(), list[Action]()

    def record(fact: Action) -> None:
        life.handle(fact)
        facts.append(fact)

    record(GroupOpened(P, G, ConsumeSequence(0)))
    for number in (1, 2):
        record(SubscriptionOpened(SubscriptionId(number), P, G, ConsumerId(f"c{number}"), 1))
    for step, number, count in steps:
        found = life.subscriptions[SubscriptionId(number)]
        last = PullSequence(min(found.settled + count, found.next_pull) - 1)
        nacked = (NackedDelivery(last, -1, ""),) if step == "nack" else ()
        if step == "pull":
            first = life.groups[P, G].next_sequence
            record(Pulled(found.id, NOW, found.next_pull, first, count, 0))
        elif step == "lose":
            record(ConsumerLost(found.id, "", 0))
        elif last >= found.settled:
            record(Settled(found.id, found.settled, last, nacked, 0))
    return facts


@given(steps=steps, kept=st.lists(st.booleans(), min_size=28, max_size=28))
def test_the_rules_go_on_without_the_facts_that_are_missing(
    steps: list[tuple[str, int, int]], kept: list[bool]
) -> None:
    facts = facts_of(steps)
    found = Consumption()

    for fact, is_kept in zip(facts, kept, strict=False):
        if is_kept:
            found.handle(fact)

    for each in found.subscriptions.values():
        assert each.settled <= each.next_pull
        assert all(a.end_pull <= b.first_pull for a, b in pairwise(each.held))
        go_on(found, each.id)
    again = load_state({k: v for k, v in encode_changes(found).items() if v is not None})
    assert {n: list(s.held) for n, s in again.subscriptions.items()} == {
        n: list(s.held) for n, s in found.subscriptions.items()
    }


def go_on(found: Consumption, number: SubscriptionId) -> None:
    """Pull one more message, then settle everything, as a consumer would."""
    each = found.subscriptions[number]
    first = found.groups[P, G].next_sequence if (P, G) in found.groups else ConsumeSequence(0)
    found.handle(Pulled(number, NOW, each.next_pull, first, 1, 0))
    start = each.check_settle(NOW, each.settled, each.next_pull - 1, ())
    assert start == each.settled
    found.handle(Settled(number, start, PullSequence(each.next_pull - 1), (), 0))
    assert not each.held
    assert each.settled == each.next_pull

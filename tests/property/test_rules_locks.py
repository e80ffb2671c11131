"""Ordered groups, whoever has the lock: every message in order, and a replay gives the same."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.actions import (
    Action,
    GroupOpened,
    LockGranted,
    LockReleased,
    Pulled,
    Settled,
    Skipped,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import ConsumeSequence, Epoch, PartitionId, StartCount, Tenure
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import encode_changes, load_state

PLACE, GROUP, TENURE = PartitionId(3), Group("g"), Tenure(Epoch(0), StartCount(1))
KEY = (PLACE, GROUP)
CONSUMERS = [ConsumerId("c1"), ConsumerId("c2"), ConsumerId("c3")]
steps = st.lists(
    st.tuples(
        st.sampled_from(["lock", "unlock", "pull", "settle", "skip"]),
        st.integers(0, 2),
        st.integers(1, 5),
    ),
    max_size=40,
)


@dataclass
class History:
    """The rules, driven by facts alone, and beside them what ought to be."""

    rules: Consumption = field(default_factory=Consumption)
    facts: list[Action] = field(default_factory=list)
    done: int = 0
    """Messages before it are settled or skipped."""
    handed: int = 0
    """Messages before it are with the holder."""
    holder: ConsumerId | None = None
    token: int = 0

    def tell(self, fact: Action) -> None:
        self.facts.append(fact)
        self.rules.handle(fact)

    def step(self, kind: str, who: ConsumerId, count: int) -> None:
        now = len(self.facts)
        if kind == "lock":
            self.token += 1
            self.holder, self.handed = who, self.done
            self.tell(LockGranted(*KEY, who, 1, self.token, True, now))
        elif kind == "skip":
            self.tell(Skipped(*KEY, ConsumeSequence(self.done), now, "no"))
            self.holder, self.done = None, self.done + 1
            self.handed = self.done
        elif self.holder is None:
            return
        elif kind == "unlock":
            self.tell(LockReleased(*KEY, self.token, now))
            self.holder, self.handed = None, self.done
        elif kind == "pull":
            self.pull(self.holder, count, now)
        elif self.handed > self.done:
            found = self.rules.subscription(*KEY, self.holder)
            assert found is not None
            last = min(self.done + count, self.handed) - 1
            first = found.check_settle(TENURE, self.done, last, ())
            assert first == self.done
            self.tell(Settled(found.id, first, type(first)(last), (), now))
            self.done = last + 1

    def pull(self, who: ConsumerId, count: int, now: int) -> None:
        opened = self.rules.opened(*KEY, who, 1)
        if opened is not None:
            self.tell(opened)
        found = self.rules.subscription(*KEY, who)
        assert found is not None
        first = self.rules.groups[KEY].next_sequence
        assert first == self.handed, "what comes next is what nobody has"
        self.tell(Pulled(found.id, TENURE, found.pull_of(first), first, count, now))
        self.handed += count


def state_of(rules: Consumption) -> dict[str, object]:
    return {
        "next": rules.groups[KEY].next_sequence,
        "lock": rules.locks.by_key.get(KEY),
        "pending": dict(rules.groups[KEY].pending),
        "held": {
            each.consumer: (each.settled, each.next_pull, list(each.held), each.is_direct)
            for each in rules.subscriptions.values()
        },
    }


@given(steps, st.integers(0, 40))
def test_messages_come_in_order_whoever_has_the_lock(
    chosen: list[tuple[str, int, int]], cut: int
) -> None:
    history = History()
    history.tell(GroupOpened(PLACE, GROUP, ConsumeSequence(0)))
    saved: dict[bytes, bytes] = {}
    behind = 0
    for number, (kind, who, count) in enumerate(chosen):
        history.step(kind, CONSUMERS[who], count)
        held = [each for each in history.rules.subscriptions.values() if each.held]
        assert {each.consumer for each in held} <= {history.holder}
        if history.handed > history.done:
            assert held[0].held[0].first_sequence == history.done == held[0].settled
        assert history.rules.groups[KEY].next_sequence == history.handed
        assert history.rules.locks.next_token(KEY) == history.token + 1
        if number == cut:
            changes = encode_changes(history.rules)
            saved = {key: value for key, value in changes.items() if value is not None}
            behind = len(history.facts)

    again = load_state(saved)
    for fact in history.facts[behind:]:
        again.handle(fact)

    assert state_of(again) == state_of(history.rules)


@given(steps)
def test_deliveries_of_a_lock_that_is_gone_are_nobodys(
    chosen: list[tuple[str, int, int]],
) -> None:
    history = History()
    history.tell(GroupOpened(PLACE, GROUP, ConsumeSequence(0)))
    for kind, who, count in chosen:
        history.step(kind, CONSUMERS[who], count)

    history.step("lock", CONSUMERS[0], 1)
    for each in history.rules.subscriptions.values():
        assert not each.held
    assert not any(isinstance(fact, SubscriptionOpened) for fact in history.facts[-1:])

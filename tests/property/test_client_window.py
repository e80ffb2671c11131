"""The window of an ordered consumer against the plain statement of what may be handed out."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.client.received import ReceivedBatch
from pulque.client.window import BlocksName, OrderedMessage, Window
from pulque.model.batch import seed_of
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence, Epoch, StartCount, Tenure

ORDERS = PartitionName("orders")
TENURE = Tenure(Epoch(0), StartCount(1))
KEYS = st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=12)
STEPS = st.lists(
    st.one_of(
        st.just(("take", 0)),
        st.tuples(st.just("ack"), st.integers(0, 5)),
        st.tuples(st.just("reject"), st.integers(0, 5)),
        st.tuples(st.just("nack"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 3)),
    ),
    max_size=60,
)


def batch_of(keys: list[str], first: int) -> ReceivedBatch:
    packer = BatchPacker()
    for key in keys:
        packer.add(b"x", order_key=key or None)
    data = packer.encode(seed=seed_of(ORDERS), ids=bytes(16 * len(keys)), created_at_ms=0)
    return ReceivedBatch(
        data,
        partition=ORDERS,
        first_sequence=ConsumeSequence(first),
        stored_at_ms=0,
        pull_base=first,
        start=0,
        end=len(keys),
        tenure=TENURE,
    )


@dataclass
class Plain:
    """One message of the model: fresh, running, failed or done."""

    key: str
    state: str = "fresh"
    due: float | None = None
    """Counted from when the window hears of it."""
    attempts: int = 0


class Model:
    """States the rule in the simplest way: look at all messages each time."""

    def __init__(self, blocks: str) -> None:
        self.all: list[Plain] = []
        self.blocks = blocks

    def may_go(self, now: float) -> set[int]:
        blocked = self.blocks == "partition" and any(
            each.state == "failed" or (each.state == "running" and each.attempts > 1)
            for each in self.all
        )
        found = set()
        for at, each in enumerate(self.all):
            if each.state == "failed" and each.due is None:
                each.due = now + 2
            elif each.state == "failed" and each.due is not None and each.due <= now:
                found.add(at)
            elif each.state == "fresh" and not blocked:
                before = self.all[:at]
                if not each.key or all(b.state == "done" for b in before if b.key == each.key):
                    found.add(at)
        return found


@pytest.mark.accepts("002-38")
@given(st.lists(KEYS, max_size=4), STEPS, st.sampled_from(["key", "partition"]))
def test_it_hands_out_what_may_go_and_nothing_else(  # noqa: PLR0915  # one step of each kind
    batches: list[list[str]], steps: list[tuple[str, int]], blocks: BlocksName
) -> None:
    window, model = Window(in_place=True, blocks=blocks), Model(blocks)
    running: list[OrderedMessage] = []
    now = 0.0
    waiting = [keys for keys in batches if keys]
    for step, number in steps:
        if step == "take":
            if waiting:
                keys = waiting.pop(0)
                window.add(batch_of(keys, len(model.all)))
                model.all += [Plain(key) for key in keys]
            allowed = model.may_go(now)
            found = window.take(now)
            assert (found is None) == (not allowed)
            if found is not None:
                assert found.sequence in allowed
                plain = model.all[found.sequence]
                plain.state, plain.attempts = "running", plain.attempts + 1
                assert found.attempt == plain.attempts
                running.append(found)
        elif step == "wait":
            now += number
        elif running:
            message = running.pop(number % len(running))
            plain = model.all[message.sequence]
            if step == "nack":
                message.nack("no", delay=2)
                plain.state, plain.due = "failed", None
            else:
                message.ack() if step == "ack" else message.reject("never")
                plain.state = "done"
            assert message.is_finished
        assert window.is_idle == (not running)


@given(st.lists(KEYS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_all_are_handled_in_the_end_and_each_key_in_order(
    batches: list[list[str]], dice: object
) -> None:
    window = Window(in_place=True)
    first = 0
    for keys in batches:
        if keys:
            window.add(batch_of(keys, first))
        first += len(keys)
    begun: dict[str | None, list[int]] = {}
    running: list[OrderedMessage] = []
    now, left = 0.0, first
    while left:
        found = window.take(now)
        if found is not None:
            if found.attempt == 1:
                begun.setdefault(found.order_key, []).append(found.sequence)
            running.append(found)
        elif running:
            message = running.pop(dice.randrange(len(running)))  # type: ignore[attr-defined]
            if message.attempt < 3 and dice.random() < 0.3:  # type: ignore[attr-defined]
                message.nack("no", delay=1)
            else:
                message.ack()
                left -= 1
        else:
            now += 1
    assert all(order == sorted(order) for key, order in begun.items() if key)
    assert sorted(at for order in begun.values() for at in order) == list(range(first))


@given(KEYS, st.integers(0, 12))
def test_what_others_got_is_not_handed_out(keys: list[str], lost: int) -> None:
    if not keys:
        return
    window, batch = Window(), batch_of(keys, 0)
    window.add(batch)
    batch.settled = min(lost, len(keys))  # as a skip by the broker, or a loss, has it
    found = []
    while (message := window.take(0.0)) is not None:
        found.append(message.sequence)
        message.ack()
    assert found == list(range(batch.settled, len(keys)))
    window.close()
    assert window.take(0.0) is None

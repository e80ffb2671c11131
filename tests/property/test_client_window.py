"""The window of an ordered consumer against the plain statement of what may be handed out."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.client.ordered.window import BlocksName, OrderedMessage, Window
from pulque.client.receiving.received_message import ReceivedBatch
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
        st.just(("follow", 0)),
        st.just(("forbid", 0)),
        st.just(("ack", -1)),
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


class Beside:
    """A window beside the model; each step is done to both."""

    def __init__(self, batches: list[list[str]], blocks: BlocksName) -> None:
        self.window, self.model = Window(in_place=True, blocks=blocks), Model(blocks)
        self.running: list[OrderedMessage] = []
        self.following: Iterator[OrderedMessage] = iter(())
        self.now, self.is_allowed = 1.0, True
        self.waiting = [keys for keys in batches if keys]

    def take(self, _: int) -> None:
        if self.waiting:
            keys = self.waiting.pop(0)
            self.window.add(batch_of(keys, len(self.model.all)))
            self.model.all += [Plain(key) for key in keys]
        allowed = self.model.may_go(self.now)
        found = self.window.take(self.now)
        assert (found is None) == (not allowed)
        if found is not None:
            self._handed(found, allowed)
            self.following = self.window.follow(
                found, 4, lambda: self.now if self.is_allowed else 0.0
            )

    def follow(self, _: int) -> None:
        """Go the short way: it may end at any time; what it yields may go, and goes alone."""
        found = next(self.following, None)
        if found is not None:
            assert self.is_allowed
            assert not self.running
            left = [at for at, each in enumerate(self.model.all) if each.state != "done"]
            assert self.model.all[left[0]].state == "fresh"
            self._handed(found, {left[0]})

    def forbid(self, _: int) -> None:
        self.is_allowed = not self.is_allowed

    def wait(self, number: int) -> None:
        self.now += number

    def _handed(self, found: OrderedMessage, allowed: set[int]) -> None:
        assert found.sequence in allowed
        plain = self.model.all[found.sequence]
        plain.state, plain.attempts = "running", plain.attempts + 1
        assert found.attempt == plain.attempts
        self.running.append(found)

    def ack(self, number: int) -> None:
        if self.running:
            message = self.running.pop(number % len(self.running))
            message.ack()
            self._ended(message, "done")

    def reject(self, number: int) -> None:
        if self.running:
            message = self.running.pop(number % len(self.running))
            message.reject("never")
            self._ended(message, "done")

    def nack(self, number: int) -> None:
        if self.running:
            message = self.running.pop(number % len(self.running))
            message.nack("no", delay=2)
            self._ended(message, "failed")

    def _ended(self, message: OrderedMessage, state: str) -> None:
        plain = self.model.all[message.sequence]
        plain.state, plain.due = state, None
        assert message.is_finished


@pytest.mark.accepts("002-38")
@given(st.lists(KEYS, max_size=4), STEPS, st.sampled_from(["key", "partition"]))
def test_it_hands_out_what_may_go_and_nothing_else(
    batches: list[list[str]], steps: list[tuple[str, int]], blocks: BlocksName
) -> None:
    both = Beside(batches, blocks)
    for step, number in steps:
        getattr(both, step)(number)
        assert both.window.is_idle == (not both.running)


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


def test_a_batch_is_handed_out_the_short_way_by_who_handles_one_after_the_other() -> None:
    window = Window(token=7)
    window.add(batch_of(["a", "b"] * 20, 0))
    window.add(batch_of(["a"] * 3, 40))
    found, takes = [], 0
    while (message := window.take(1.0)) is not None:
        takes += 1
        found.append(message.sequence)
        message.ack()
        for following in window.follow(message, 1000, lambda: 2.0):
            found.append(following.sequence)
            assert (following.handed_at, following.token, following.attempt) == (2.0, 7, 1)
            following.ack()
            assert window.is_idle
    assert found == list(range(43))
    assert takes == 4  # the first and the last of each batch


def test_the_short_way_ends_where_the_window_is_closed() -> None:
    window = Window()
    window.add(batch_of(["a"] * 9, 0))
    message = window.take(1.0)
    assert message is not None
    following = window.follow(message, 9, lambda: 1.0)
    message.ack()
    second = next(following)
    window.close()
    second.ack()
    assert next(following, None) is None
    assert window.is_idle


def test_the_short_way_ends_before_a_message_that_runs_out_of_time_or_is_not_acked() -> None:
    window = Window(in_place=True)
    window.add(batch_of(["a", "b", "a", "b", "c"], 0))
    message = window.take(1.0)
    assert message is not None
    assert next(window.follow(message, 9, lambda: 1.0), None) is None  # it has not ended
    message.ack()
    assert next(window.follow(message, 9, lambda: 0.0), None) is None
    assert window.is_idle
    second = next(window.follow(message, 9, lambda: 1.0))
    second.nack("no", delay=1)
    assert next(window.follow(second, 9, lambda: 1.0), None) is None
    third = window.take(1.0)
    assert third is not None
    assert third.sequence == 2


def test_who_forbids_it_and_finds_the_window_idle_knows_that_nothing_goes_out() -> None:
    window = Window()
    window.add(batch_of(["a"] * 9, 0))
    message = window.take(1.0)
    assert message is not None
    message.ack()
    seen = []

    def instant() -> float:
        seen.append(window.is_idle)  # what another thread sees that forbids it at this moment
        return 1.0

    assert next(window.follow(message, 9, instant)) is not None
    assert seen == [False]


def test_a_window_that_is_closed_at_that_moment_hands_out_nothing() -> None:
    window = Window()
    window.add(batch_of(["a"] * 9, 0))
    message = window.take(1.0)
    assert message is not None
    message.ack()

    def instant() -> float:
        window.close()  # the lock was lost, and is granted anew: it says yes again
        window._alone = message  # noqa: SLF001  # and the thread that hands out comes late
        return 1.0

    assert next(window.follow(message, 9, instant), None) is None
    assert window.is_idle

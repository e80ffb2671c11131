"""A partition has one owner at a time, however late requests, answers and consumers are.

Two consumers want one partition of a broker that gives it to one of them at a time. Requests and
answers travel for any time, consumers stand still for any time, locks and permits run out. At the
moment in which a message is handed out, nobody else was ever given the partition since.
"""

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pulque.client.ordered.allotment import AllottedPartitions, Leaf, difference
from pulque.client.ordered.partition_core import OrderedCore, OrderedOptions, Permit
from pulque.client.ordered.window import OrderedMessage
from pulque.client.receiving.pull_options import PullOptions
from pulque.errors import ErrorCode, LockLostError, PulqueError, UsageError
from pulque.model.batch import seed_of
from pulque.model.groups import Mode
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.model.record import ENVELOPE_SIZE, pack_batch_envelope
from pulque.wire.ordered import Attended, Lock, Locked, Unlock, Unlocked
from pulque.wire.requests import FROM_SETTLED, Pull, Request, Settle
from pulque.wire.responses import Delivered, Pulled, Response, Settled, State

ORDERS = PartitionName("orders")
TENURE = Tenure(Epoch(0), StartCount(1))
LOCK = 3.0
STORED = 400


class LockingBroker:
    """One partition of one ordered group: who has it, since when, and how far it is settled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.token = 0
        self.holder = ""
        self.until = 0.0
        self.settled = 0

    def handle(self, request: Request) -> Response | PulqueError:
        match request:
            case Lock():
                return self._lock(request)
            case Unlock():
                if request.token == self.token:
                    self.holder = ""
                return Unlocked(was_held=True)
            case Pull():
                return self._pull(request)
            case Settle():
                if not self._is_newest(request.token, request.consumer):
                    return LockLostError("no")
                assert request.first <= self.settled, "a gap"
                self.settled = max(self.settled, request.last + 1)
                self.until = self.now + LOCK
                return Settled(PullSequence(self.settled))
            case _:
                raise AssertionError(request)

    def _is_newest(self, token: int, consumer: str) -> bool:
        return (token, consumer) == (self.token, self.holder)

    def _lock(self, request: Lock) -> Locked:
        if self._is_newest(request.token, request.consumer):
            self.until = self.now + LOCK
            return Locked(self.token, int(LOCK * 1000))
        if self.holder not in {"", request.consumer} and self.now < self.until:
            return Locked(0, int((self.until - self.now) * 1000), self.holder)
        self.token += 1
        self.holder, self.until = request.consumer, self.now + LOCK
        return Locked(self.token, int(LOCK * 1000))

    def _pull(self, request: Pull) -> Pulled:
        wanted = request.wanted[0]
        settled = PullSequence(self.settled)
        if not self._is_newest(wanted.token, request.consumer):
            return Pulled((State(ErrorCode.LOCK_LOST, settled, settled),), ())
        self.until = self.now + LOCK
        first = self.settled if wanted.expected == FROM_SETTLED else wanted.expected
        count = min(request.max_messages, STORED - first)
        state = State(ErrorCode.NONE, settled, PullSequence(first + count))
        if count <= 0:
            return Pulled((state,), ())
        delivered = Delivered(
            0, TENURE, PullSequence(first), ConsumeSequence(first), count, records(first, count)
        )
        return Pulled((state,), (delivered,))


def records(first: int, count: int) -> bytes:
    packer = BatchPacker()
    for number in range(first, first + count):
        packer.add(str(number).encode(), order_key=f"key {number % 3}")
    data = packer.encode(seed=seed_of(ORDERS), ids=bytes(16 * count), created_at_ms=0)
    size = ENVELOPE_SIZE + len(data)
    return pack_batch_envelope(size, 0, 0, 0, 1, first, 0, count) + data


class Consumer:
    """One core, what it was handed out, and what it has on the wire."""

    def __init__(self, name: str, broker: LockingBroker) -> None:
        self.permit = Permit()
        self.core = OrderedCore(
            PullOptions("orders", Group("g"), ConsumerId(name), 1, 5, 1 << 20, 12, Mode.ORDERED),
            ORDERS,
            order=OrderStrategy.STRICT,
            permit=self.permit,
            wishes=OrderedOptions(),
            monotonic=lambda: broker.now,
        )
        self.name = name
        self.asked: list[Request] = []
        self.answers: list[tuple[Request, Response | PulqueError]] = []
        self.running: list[OrderedMessage] = []
        self.following: Iterator[OrderedMessage] = iter(())


class OneOwner(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.broker = LockingBroker()
        self.consumers = [Consumer("one", self.broker), Consumer("two", self.broker)]
        self.first: dict[str, list[int]] = {}
        self.handled: set[int] = set()

    @rule(which=st.integers(0, 1))
    def ask(self, which: int) -> None:
        consumer = self.consumers[which]
        core = consumer.core
        consumer.asked += core.next_settles()
        if not core.is_pulling:
            request = core.next_route()
            if request is None and core.room > 0:
                request = core.next_pull(min(5, core.room), 1.0)
            if request is not None:
                consumer.asked.append(request)

    @rule(which=st.integers(0, 1))
    def keep(self, which: int) -> None:
        consumer = self.consumers[which]
        request = consumer.core.next_upkeep()
        if request is not None:
            answer = self.broker.handle(request)
            consumer.core.upkept(answer)

    @rule(which=st.integers(0, 1))
    def arrive(self, which: int) -> None:
        consumer = self.consumers[which]
        if consumer.asked:
            request = consumer.asked.pop(0)
            consumer.answers.append((request, self.broker.handle(request)))

    @rule(which=st.integers(0, 1))
    def answer(self, which: int) -> None:
        consumer = self.consumers[which]
        if consumer.answers:
            self._take_in(consumer, *consumer.answers.pop(0))

    def _take_in(
        self, consumer: Consumer, request: Request, answer: Response | PulqueError
    ) -> None:
        core = consumer.core
        if isinstance(request, Settle):
            core.settle_answered(request, answer)
        elif isinstance(request, Lock):
            core.routed(answer)
        elif isinstance(answer, Pulled) and core.is_pulling:
            core.pulled(answer)

    @rule(which=st.integers(0, 1), rounds=st.integers(1, 3))
    def exchange(self, which: int, rounds: int) -> None:
        """Ask and hear without delay, and go on: what happens most of the time."""
        self.permit(which, 10.0)
        for _ in range(rounds):
            self.ask(which)
            while self.consumers[which].asked:
                self.arrive(which)
            while self.consumers[which].answers:
                self.answer(which)
            self.hand_out(which)

    @rule(which=st.integers(0, 1))
    def lose_the_connection(self, which: int) -> None:
        consumer = self.consumers[which]
        consumer.asked.clear()
        consumer.answers.clear()
        consumer.core.pull_failed()
        consumer.core.connected()
        consumer.asked += consumer.core.repeat_settles()

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([0.0, 0.5, 2.0, 10.0]))
    def permit(self, which: int, seconds: float) -> None:
        self.consumers[which].permit.until = self.broker.now + seconds

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, LOCK, 2 * LOCK]))
    def wait(self, seconds: float) -> None:
        self.broker.now += seconds

    @rule(which=st.integers(0, 1))
    def hand_out(self, which: int) -> None:
        consumer = self.consumers[which]
        message = consumer.core.take(self.broker.now)
        if message is not None:
            self._handed(consumer, message)
            consumer.following = consumer.core.follow(message, 4)

    @rule(which=st.integers(0, 1), times=st.integers(1, 4))
    def end_and_go_on(self, which: int, times: int) -> None:
        """Handle one after the other, as who iterates does."""
        for _ in range(times):
            self.end(which, -1, fails=False)
            self.go_on(which)

    @rule(which=st.integers(0, 1))
    def go_on(self, which: int) -> None:
        consumer = self.consumers[which]
        message = next(consumer.following, None)
        if message is not None:
            self._handed(consumer, message)

    def _handed(self, consumer: Consumer, message: OrderedMessage) -> None:
        now = self.broker.now
        assert message.token == self.broker.token, "another has it by now"
        assert consumer.name == self.broker.holder
        assert now < consumer.permit.until
        assert not any(each.order_key == message.order_key for each in consumer.running)
        number = int(message.body)
        order = self.first.setdefault(message.order_key or "", [])
        if number not in order:
            order.append(number)
        consumer.running.append(message)

    @rule(which=st.integers(0, 1), place=st.integers(0, 5), fails=st.booleans())
    def end(self, which: int, place: int, *, fails: bool) -> None:
        consumer = self.consumers[which]
        if consumer.running:
            message = consumer.running.pop(place % len(consumer.running))
            if fails:
                message.nack("no", delay=0.5)
            else:
                self.handled.add(int(message.body))
                message.ack()

    @rule(which=st.integers(0, 1))
    def leave(self, which: int) -> None:
        consumer = self.consumers[which]
        if not consumer.running:
            consumer.asked.clear()
            consumer.answers.clear()
            consumer.core.pull_failed()
            request = consumer.core.farewell()
            if request is not None:
                self.broker.handle(request)

    @invariant()
    def first_deliveries_are_in_order(self) -> None:
        for order in getattr(self, "first", {}).values():
            assert order == sorted(order)

    @invariant()
    def only_what_was_handled_is_settled(self) -> None:
        if hasattr(self, "broker"):
            assert set(range(self.broker.settled)) <= self.handled


OneOwner.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestOneOwner = pytest.mark.accepts("002-49", "002-51", "002-53", "002-54")(OneOwner.TestCase)


def owner(broker: LockingBroker) -> Consumer:
    """Return a consumer that has the lock, messages, and a permit for ten seconds."""
    consumer = Consumer("one", broker)
    broker.now = 1.0
    consumer.permit.until = 11.0
    core = consumer.core
    lock = core.next_route()
    assert lock is not None
    answer = broker.handle(lock)
    assert not isinstance(answer, PulqueError)
    core.routed(answer)
    answer = broker.handle(core.next_pull(9, 1.0))
    assert isinstance(answer, Pulled)
    core.pulled(answer)
    return consumer


@pytest.mark.accepts("002-49")
@pytest.mark.parametrize("why", ["permit", "lock", "leaving"])
def test_who_iterates_is_stopped_before_the_next_message(why: str) -> None:
    broker = LockingBroker()
    consumer = owner(broker)
    core = consumer.core
    message = core.take(broker.now)
    assert message is not None
    following = core.follow(message, 9)
    message.ack()
    second = next(following)
    second.ack()
    if why == "permit":
        consumer.permit.until = 2.0
        broker.now = 2.0
    elif why == "lock":
        broker.now = 1.0 + LOCK
    else:
        core.is_leaving = True
    assert next(following, None) is None
    assert core.take(broker.now) is None
    assert core.window.is_idle


def test_an_answer_of_a_lock_that_is_gone_comes_while_another_is_asked_for() -> None:
    broker = LockingBroker()
    core = owner(broker).core
    message = core.take(broker.now)
    assert message is not None
    late = broker.handle(core.next_pull(9, 1.0))
    message.ack()
    (settle,) = core.next_settles()
    core.settle_answered(settle, LockLostError("another has it"))
    broker.now += 1.0
    lock = core.next_route()
    assert lock is not None
    assert core.is_pulling
    assert isinstance(late, Pulled)
    core.pulled(late)
    assert core.take(broker.now) is None
    answer = broker.handle(lock)
    assert not isinstance(answer, PulqueError)
    core.routed(answer)
    assert core.token == 2


def test_a_partition_that_comes_back_waits_for_the_handler_that_still_works_on_it() -> None:
    broker = LockingBroker()
    consumer = owner(broker)
    core = consumer.core
    running = core.take(broker.now)
    assert running is not None
    core.upkept(LockLostError("another has it"))
    broker.now += 1.0
    broker.holder = ""  # and has released it
    lock = core.next_route()
    assert lock is not None
    answer = broker.handle(lock)
    assert not isinstance(answer, PulqueError)
    core.routed(answer)
    pulled = broker.handle(core.next_pull(9, 1.0))
    assert isinstance(pulled, Pulled)
    core.pulled(pulled)
    assert core.window.has_ready(broker.now)

    assert core.take(broker.now) is None, "two handlers would work on one key"
    running.ack()
    again = core.take(broker.now)
    assert again is not None
    assert again.body == running.body


def test_a_partition_is_not_given_back_before_the_broker_knows_what_ended_here() -> None:
    broker = LockingBroker()
    consumer = owner(broker)
    core = consumer.core
    core.is_leaving = True
    while (running := core.window.take(broker.now)) is not None:
        running.ack()
    settles = core.next_settles()
    assert settles
    assert core.window.is_idle

    assert not core.is_drained, "the next owner would handle it again"
    for settle in settles:
        core.settle_answered(settle, broker.handle(settle))
    assert core.is_drained


# ── what the meta server says ──────────────────────────────────────────────────────────────


def attended(*names: str, strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE) -> Attended:
    partitions = tuple(Allotted("g1", PartitionName(name), "host", 1) for name in names)
    return Attended(strategy, OrderStrategy.STRICT, len(names), 10_000, 3_000, partitions)


def attendance(clock: list[float]) -> tuple[AllottedPartitions, Permit]:
    permit = Permit()
    options = PullOptions("orders", Group("g"), ConsumerId("c"), 1, 5, 1 << 20, 12, Mode.ORDERED)
    return AllottedPartitions(options, permit, lambda: clock[0]), permit


@pytest.mark.accepts("002-49", "002-50")
def test_the_time_to_go_on_counts_from_the_question_not_from_the_answer() -> None:
    clock = [100.0]
    found, permit = attendance(clock)
    found.next_request()
    clock[0] = 107.0
    assert found.attended(attended("orders"))
    assert permit.until == 110.0


@pytest.mark.accepts("002-36", "002-42")
def test_a_group_that_is_not_exclusive_is_refused_with_the_way_out() -> None:
    found, permit = attendance([100.0])
    found.next_request()
    with pytest.raises(UsageError, match="group of their own"):
        found.attended(attended(strategy=ConsumeStrategy.SHARED))
    assert permit.until == 0.0


leaves = st.sets(
    st.builds(Leaf, st.sampled_from(["g1", "g2"]), st.sampled_from("abc").map(PartitionName))
)


@pytest.mark.accepts("002-34", "004-80")
@given(leaves, leaves, leaves)
def test_what_changes_is_started_and_stopped_and_the_rest_stays(
    current: set[Leaf], wanted: set[Leaf], leaving: set[Leaf]
) -> None:
    started, stopped = difference(current, wanted, leaving)
    assert set(stopped) == current - wanted
    assert set(started) == wanted - current - leaving
    after = (current - set(stopped)) | set(started)
    assert after >= current & wanted
    assert after <= wanted

"""Whatever the network does, the messages of a key are stored in the order they were sent in.

A machine adds messages of a few order keys to a strict subject, sends, answers, refuses, cuts
connections, handles requests late, lets time pass, and splits partitions. The oracle is a broker
of its own; a key's messages lie in its first partition, then in those that this was split into.
"""

from collections import defaultdict
from dataclasses import replace

import google_crc32c
import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from pulque.client.blocking.pending_sends import PendingSend
from pulque.client.routing.targets import Targets
from pulque.client.sending.outgoing_message import Outgoing, Receipt
from pulque.client.sending.producer_core import OutgoingCore
from pulque.errors import ErrorCode, PulqueError, UnavailableError
from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import PartitionRoute, Route, Slots
from pulque.wire.requests import Send
from pulque.wire.responses import Outcome, Sent
from tests.unit.client.test_dispatch import (
    TIMEOUT,
    ManualTime,
    ModelBroker,
    make_core,
    messages_in,
)

KEYS = ["anna", "bert", "carl", "dora"]


class SplittingBroker(ModelBroker):
    """Takes nothing for a partition that was split, but knows what it has of it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = {"a": Slots(0, 1024)}
        self.parents: dict[str, str] = {}

    def split(self, partition: str) -> None:
        start, end = self.slots[partition]
        middle = (start + end) // 2
        for slots in (Slots(start, middle), Slots(middle, end)):
            child = f"a#{len(self.slots)}"
            self.slots[child] = slots
            self.parents[child] = partition
        self.slots[partition] = Slots(0, 0)

    def _store(self, partition: str, data: bytes, code: ErrorCode) -> Outcome:
        if self.slots[partition] == Slots(0, 0):
            code = ErrorCode.STALE_ROUTE
        return super()._store(partition, data, code)

    def route(self, order: OrderStrategy = OrderStrategy.STRICT) -> Route:
        partitions = tuple(
            PartitionRoute(
                PartitionName(name), "group", "host", 1, slots != Slots(0, 0), slots=slots
            )
            for name, slots in self.slots.items()
        )
        return Route(Pattern("a"), len(self.slots), partitions, order)

    def lineage(self) -> list[str]:
        """Return all partitions, each after the one that it was split from."""
        return list(self.slots)


class StrictSending(RuleBasedStateMachine):
    wire = Bundle("wire")
    answers = Bundle("answers")

    order = OrderStrategy.STRICT
    heard = 0
    """How many partitions there were when the core was told of them."""

    @initialize(linger=st.sampled_from([0.0, 0.005]), is_split=st.booleans())
    def start(self, linger: float, *, is_split: bool) -> None:
        self.clock = ManualTime()
        self.core: OutgoingCore[PendingSend] = make_core(self.clock, linger=linger, max_batch=3)
        self.dispatch = self.core.dispatch
        self.broker = SplittingBroker()
        if is_split:
            self.broker.split("a")
        self.hear_of_it()
        self.sent: dict[str, list[bytes]] = defaultdict(list)
        self.pending: dict[bytes, PendingSend] = {}
        self.connection = 0
        self.requests = 0

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def add(self, key: str, count: int) -> None:
        for _ in range(count):
            body = f"{len(self.pending)}".encode()
            self.pending[body] = self.core.add_keyed("a", body, key)
            self.sent[key].append(body)

    @rule(target=wire)
    def take(self) -> tuple[int, int, Send] | None:
        batches = self.dispatch.take(self.clock.now)
        if not batches:
            assert not self.dispatch.has_work, "whoever sends would try again for ever"
            return None
        self.requests += 1
        request = self.dispatch.request(batches, self.clock.now)
        self.dispatch.sent(self.requests, batches)
        return self.connection, self.requests, request

    @rule(
        target=answers,
        sent=consumes(wire),
        code=st.sampled_from([ErrorCode.NONE, ErrorCode.NONE, ErrorCode.STORAGE_FULL]),
    )
    def handle(
        self, sent: tuple[int, int, Send] | None, code: ErrorCode
    ) -> tuple[int, int, Sent] | None:
        if sent is None:
            return None
        connection, request_id, request = sent
        return connection, request_id, self.broker.handle(request, code)

    @rule(answer=consumes(answers))
    def answer(self, answer: tuple[int, int, Sent] | None) -> None:
        if answer is not None and answer[0] == self.connection:
            self.dispatch.answered(answer[1], answer[2], self.clock.now)

    @rule()
    def cut(self) -> None:
        self.connection += 1
        self.dispatch.disconnected()

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0, TIMEOUT / 2]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.dispatch.expire(self.clock.now):
            self.cut()

    @precondition(lambda self: len(self.broker.slots) < 9)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        open_ones = [name for name, slots in self.broker.slots.items() if slots != Slots(0, 0)]
        self.broker.split(data.draw(st.sampled_from(open_ones)))

    @rule()
    def hear_of_it(self) -> None:
        if self.heard != len(self.broker.slots):
            self.heard = len(self.broker.slots)
            self.core.add_way("a", Targets(self.broker.route(self.order)))

    def stored_of(self, key: str) -> list[bytes]:
        """Return the bodies of a key in the order in which they would be consumed."""
        found = []
        for partition in self.broker.lineage():
            for number in sorted(self.broker.places[partition]):
                data = self.broker.contents[partition, number]
                found += [
                    message.body
                    for message in messages_in(partition, data)
                    if message.order_key == key
                ]
        return found

    @invariant()
    def each_key_is_stored_in_order(self) -> None:
        is_strict = self.order is OrderStrategy.STRICT
        for key in KEYS if hasattr(self, "broker") and is_strict else []:
            stored = [int(body) for body in self.stored_of(key)]
            assert stored == sorted(stored), f"{key} is stored as {stored}"

    @invariant()
    def what_is_confirmed_is_stored(self) -> None:
        for body, promise in (self.pending if hasattr(self, "pending") else {}).items():
            receipt = outcome_of(promise)
            if receipt is not None:
                assert self.broker.bodies[receipt.partition][receipt.sequence] == body

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # With a network that works, all that is left finds its way.
        self.cut()
        for _ in range(500):
            self.hear_of_it()
            self.core.flush()
            found = self.take()
            if found is not None:
                self.answer(self.handle(found, ErrorCode.NONE))
            elif all(each.done() for each in self.pending.values()):
                break
            else:
                self.clock.now += 0.5
        # No time was over meanwhile: it is sent, not given up.
        assert all(each.done() for each in self.pending.values())
        self.each_key_is_stored_in_order()
        self.what_is_confirmed_is_stored()


def outcome_of(promise: PendingSend) -> Receipt | None:
    if not promise.done():
        return None
    try:
        return promise.result()
    except PulqueError:
        return None


StrictSending.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestStrictSending = pytest.mark.accepts("002-25", "002-22")(StrictSending.TestCase)


class BestEffortSending(StrictSending):
    """The same where failures may change the order: all that is sent finds its way."""

    order = OrderStrategy.BEST_EFFORT


BestEffortSending.TestCase.settings = StrictSending.TestCase.settings
TestBestEffortSending = BestEffortSending.TestCase


@pytest.mark.accepts("002-25")
def test_a_failed_batch_stays_at_the_head_and_goes_to_the_same_partition() -> None:
    clock = ManualTime()
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(SplittingBroker().route()))
    for body in (b"0", b"1", b"2"):
        core.add_message("a", Outgoing(body, order_key="anna"))
    tried = []
    for number in range(3):
        (batch,) = core.dispatch.take(clock.now)
        request = core.dispatch.request([batch], clock.now)
        tried += [(p, messages_in(p, bytes(d))[0].body) for p, d in request.batches]
        core.dispatch.sent(number, [batch])
        assert not core.dispatch.take(clock.now), "none overtakes it"
        core.dispatch.answered(number, full(), clock.now)
        clock.now += 60
    assert tried == [("a", b"0")] * 3


def test_what_ran_out_of_time_on_its_way_is_asked_about_before_the_next_goes() -> None:
    clock = ManualTime()
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(SplittingBroker().route()))
    first = core.add_message("a", Outgoing(b"0", order_key="anna"))
    core.dispatch.sent(1, core.dispatch.take(clock.now))
    clock.now += TIMEOUT + 1
    core.dispatch.expire(clock.now)
    assert isinstance(first.exception(), PulqueError)
    core.dispatch.disconnected()
    core.add_message("a", Outgoing(b"1", order_key="anna"))
    assert bodies_sent(core, clock) == [b"0"], "nobody knows whether it is stored, perhaps late"


def test_nothing_goes_to_the_child_of_a_split_before_the_parent_has_answered() -> None:
    clock, broker = ManualTime(), SplittingBroker()
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(broker.route()))
    core.add_message("a", Outgoing(b"0", order_key="anna"))
    (batch,) = core.dispatch.take(clock.now)
    request = core.dispatch.request([batch], clock.now)
    core.dispatch.sent(1, [batch])
    broker.split("a")
    core.add_way("a", Targets(broker.route()))
    core.add_message("a", Outgoing(b"1", order_key="anna"))
    assert bodies_sent(core, clock) == []
    # It comes too late to be stored there: it goes to the child, before the other one.
    core.dispatch.answered(1, broker.handle(request, ErrorCode.NONE), clock.now)
    clock.now += 60
    assert bodies_sent(core, clock) == [b"0"]


def test_a_split_waits_for_all_that_one_answer_tells() -> None:
    clock, broker = ManualTime(), SplittingBroker()
    broker.split("a")
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(broker.route()))
    # Both keys travel together, to a partition each.
    keys = {_slot(key) >= 512: key for key in KEYS}
    for key in keys.values():
        core.add_message("a", Outgoing(b"0", order_key=key))
    batches = core.dispatch.take(clock.now)
    assert len({batch.stream for batch in batches}) == 2
    request = core.dispatch.request(batches, clock.now)
    core.dispatch.sent(1, batches)
    stored = broker.handle(replace(request, batches=request.batches[:1]), ErrorCode.NONE)
    for partition in list(broker.slots)[1:]:
        broker.split(partition)
    late = broker.handle(replace(request, batches=request.batches[1:]), ErrorCode.NONE)
    core.add_way("a", Targets(broker.route()))
    for key in keys.values():
        core.add_message("a", Outgoing(b"1", order_key=key))
    core.dispatch.answered(1, Sent(stored.outcomes + late.outcomes), clock.now)
    clock.now += 60
    assert sorted(bodies_sent(core, clock)) == [b"0", b"1"], "the late one goes before its next"


@pytest.mark.parametrize("order", OrderStrategy)
def test_what_waits_for_an_answer_is_no_work(order: OrderStrategy) -> None:
    clock, broker = ManualTime(), SplittingBroker()
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(broker.route(order)))
    core.add_message("a", Outgoing(b"0", order_key="anna"))
    assert bodies_sent(core, clock) == [b"0"]
    broker.split("a")
    core.add_way("a", Targets(broker.route(order)))
    core.add_message("a", Outgoing(b"1", order_key="anna"))
    assert bodies_sent(core, clock) == []
    assert not core.dispatch.has_work, "its sender has to read the answer now"


def test_a_split_no_longer_waits_for_what_ran_out_of_time() -> None:
    clock, broker = ManualTime(), SplittingBroker()
    core = make_core(clock, linger=0.0, max_batch=1)
    core.add_way("a", Targets(broker.route(OrderStrategy.BEST_EFFORT)))
    core.add_message("a", Outgoing(b"0", order_key="anna"))
    assert bodies_sent(core, clock) == [b"0"]
    core.dispatch.disconnected()
    broker.split("a")
    core.add_way("a", Targets(broker.route(OrderStrategy.BEST_EFFORT)))
    clock.now += TIMEOUT / 2
    core.add_message("a", Outgoing(b"1", order_key="anna"))
    clock.now += TIMEOUT / 2
    core.dispatch.expire(clock.now)
    assert bodies_sent(core, clock) == [b"1"]


def _slot(key: str) -> int:
    return google_crc32c.value(key.encode()) % 1024  # type: ignore[no-any-return]


def bodies_sent(core: OutgoingCore[PendingSend], clock: ManualTime) -> list[bytes]:
    """Return what goes out now, and has no answer from then on."""
    batches = core.dispatch.take(clock.now)
    if not batches:
        return []
    request = core.dispatch.request(batches, clock.now)
    core.dispatch.sent(99, batches)
    return [m.body for p, d in request.batches for m in messages_in(p, bytes(d))]


@pytest.mark.accepts("002-27")
def test_best_effort_gives_a_message_up_after_its_time_and_goes_on_with_the_next() -> None:
    clock = ManualTime()
    core = make_core(clock, linger=0.0, max_batch=1, max_in_flight=1)
    core.add_way("a", Targets(SplittingBroker().route(OrderStrategy.BEST_EFFORT)))
    first = core.add_message("a", Outgoing(b"0", order_key="anna"))
    tries = 0
    while not first.done():
        for batch in core.dispatch.take(clock.now):
            tries += 1
            core.dispatch.sent(tries, [batch])
            core.dispatch.answered(tries, full(), clock.now)
        clock.now += 1.0
        core.dispatch.expire(clock.now)
    assert tries > 1
    assert isinstance(first.exception(), PulqueError)
    second = core.add_message("a", Outgoing(b"1", order_key="anna"))
    (batch,) = core.dispatch.take(clock.now + 60)
    core.dispatch.sent(0, [batch])
    stored = Outcome(ErrorCode.NONE, False, 0, 0)  # type: ignore[arg-type]
    core.dispatch.answered(0, Sent((stored,)), clock.now)
    assert second.result().partition == "a"


def full() -> Sent:
    return Sent((Outcome(ErrorCode.STORAGE_FULL, False, 0, 0, "full"),))  # type: ignore[arg-type]


def test_a_key_whose_broker_was_never_heard_of_waits() -> None:
    route = Route(
        Pattern("a"),
        1,
        (PartitionRoute(PartitionName("a"), "group", "host", 1, slots=Slots(0, 1)),),
        OrderStrategy.STRICT,
    )
    with pytest.raises(UnavailableError, match="away"):
        Targets(route).pick("anna")


@pytest.mark.accepts("002-25")
def test_a_partition_whose_broker_is_away_keeps_its_keys() -> None:
    both = (
        PartitionRoute(PartitionName("a"), "one", "host", 1, slots=Slots(0, 512)),
        PartitionRoute(PartitionName("a"), "two", "host", 2, slots=Slots(512, 1024)),
    )
    before = Targets(Route(Pattern("a"), 1, both, OrderStrategy.STRICT))
    after = Targets(Route(Pattern("a"), 2, both[:1], OrderStrategy.STRICT))
    after.go_on_from(before)
    read_only = (both[0], both[1]._replace(sends=0))
    refusing = Targets(Route(Pattern("a"), 3, read_only, OrderStrategy.STRICT))
    keys = [f"key-{number}" for number in range(50)]
    owners = [before.pick(key).key for key in keys]
    assert len(set(owners)) == 2
    assert [after.pick(key).key for key in keys] == owners
    assert [refusing.pick(key).key for key in keys] == owners, "it takes no messages for now"

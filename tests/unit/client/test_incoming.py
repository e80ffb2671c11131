"""A consumer settles what its caller said, all of it, and nothing else.

A machine pulls, hands out, acks, nacks and settles in any order, while answers get lost, leases
run out, and the broker forgets deliveries and settles with its power. The oracle is what the
caller said about each delivery. When the trouble is over, everything gets done.
"""

from collections import defaultdict
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import ReceivedBatch, ReceivedMessage
from pulque.errors import (
    CorruptionError,
    ErrorCode,
    FencedError,
    OverloadedError,
    PulqueError,
    RemoteProtocolError,
    StaleSettleError,
    UnknownSubjectError,
)
from pulque.model.batch import Codec, seed_of
from pulque.model.ids import IdSource
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.positions import Epoch, PullSequence, StartCount, Tenure
from pulque.wire.frame import FrameReader
from pulque.wire.requests import FROM_SETTLED, Pull, Settle
from pulque.wire.responses import (
    Beaten,
    Pulled,
    Response,
    Settled,
    State,
    decode_response,
    encode_response,
)
from tests.unit.client.fake_broker import BrokerModel

NAMES = [PartitionName("s"), PartitionName("%retry%s%g")]


def make_core(
    *, max_messages: int = 100, max_bytes: int = 1 << 20, max_held: int = 1000
) -> IncomingCore:
    limits = (max_messages, max_bytes, max_held)
    core = IncomingCore(PullOptions("s", Group("g"), ConsumerId("c"), 1, *limits))
    core.subscribe(NAMES)
    return core


def over_the_wire(response: Response) -> Response:
    """Return a response as a client sees it: its records are a view."""
    reader = FrameReader()
    data = b"".join(encode_response(response, 1, 0))
    at = 0
    while True:
        buffer = reader.buffer()
        count = min(len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        at += count
        reader.received(count)
        frame = reader.next_frame()
        if frame is not None:
            decoded = decode_response(frame)
            assert not isinstance(decoded, PulqueError)
            return decoded


class Sender:
    """Stores batches in the model."""

    def __init__(self, model: BrokerModel) -> None:
        self._model = model
        self._number = 0
        self._ids = IdSource(3)

    def store(self, partition: str, count: int, codec: Codec = Codec.NONE) -> None:
        packer = BatchPacker()
        for _ in range(count):
            packer.bodies.append(b"%d" % self._number)
        data = packer.encode(
            seed=seed_of(partition),
            ids=self._ids.many(1, count),
            created_at_ms=1,
            produced_by=ProducedBy(1, 0, self._number),
            codec=codec,
        )
        self._number += 1
        self._model.store(partition, data)


Key = tuple[str, int, int, Tenure]


def key_of(message: ReceivedMessage) -> Key:
    batch = message._batch  # noqa: SLF001  # a test may look
    return message.partition, message.pull_sequence, message.sequence, batch.tenure


def open_in(core: IncomingCore) -> int:
    """Return how many messages a consumer holds that are neither acked nor nacked."""
    return sum(
        batch.states.count(0, batch.settled, batch.end)
        for subscription in core._subscriptions  # noqa: SLF001  # a test may look
        for batch in subscription.held
        if isinstance(batch, ReceivedBatch)
    )


class Consuming(RuleBasedStateMachine):
    @initialize(max_held=st.integers(1, 30))
    def start(self, max_held: int) -> None:
        self.model = BrokerModel()
        self.core = make_core(max_held=max_held)
        self.sender = Sender(self.model)
        self.pull: Pull | None = None
        self.wire: list[Settle] = []
        self.answers: list[tuple[Settle, Response | PulqueError]] = []
        self.handed: list[ReceivedMessage] = []
        self.said: dict[Key, set[str]] = defaultdict(set)
        self.had_trouble = False

    # ── messages ───────────────────────────────────────────────────────────────────────────

    @rule(partition=st.sampled_from(NAMES), count=st.integers(1, 6))
    def store(self, partition: PartitionName, count: int) -> None:
        self.sender.store(partition, count)

    @precondition(lambda self: self.handed)
    @rule(data=st.data(), how=st.sampled_from(["ack", "ack", "nack"]))
    def settle_one(self, data: st.DataObject, how: str) -> None:
        message = data.draw(st.sampled_from(self.handed))
        self._say(message, how)

    @rule()
    def forget_the_oldest(self) -> None:
        for message in self.handed[:5]:
            self._say(message, "ack")
        del self.handed[:5]

    def _say(self, message: ReceivedMessage, how: str) -> None:
        if not message.is_abandoned:
            self.said[key_of(message)].add(how)
        if how == "ack":
            message.ack()
        else:
            message.nack("because", delay=1.5)

    # ── pulling ────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.pull is None and self.core.room > 0)
    @rule(count=st.integers(1, 10))
    def ask(self, count: int) -> None:
        self.pull = self.core.next_pull(min(count, self.core.room), 0)

    @precondition(lambda self: self.pull is not None)
    @rule()
    def answer(self) -> None:
        assert self.pull is not None
        pulled = over_the_wire(self.model.try_pull(self.pull))
        assert isinstance(pulled, Pulled)
        self.core.pulled(pulled)
        self.pull = None

    @rule()
    def hand_out(self) -> None:
        batch = self.core.next_batch()
        if batch is not None:
            for index in range(batch.start, batch.end):
                message = ReceivedMessage(batch, index)
                key = key_of(message)
                assert self.had_trouble or key not in self.said, "handed out twice"
                # What was said of a delivery that was given up does not count for this one.
                self.said[key] = set()
                self.handed.append(message)

    # ── settling ───────────────────────────────────────────────────────────────────────────

    @rule()
    def settle(self) -> None:
        self.wire += self.core.next_settles()
        partitions = [settle.partition for settle in self.wire]
        # After a loss an old one may still be on its way; the broker refuses it.
        assert self.had_trouble or len(partitions) == len(set(partitions)), "two on their way"

    @precondition(lambda self: self.wire)
    @rule()
    def handle_settle(self) -> None:
        settle = self.wire.pop(0)
        answer: Response | PulqueError
        try:
            answer = self.model.settle(settle)
        except StaleSettleError as error:
            assert self.had_trouble, "a settle came out of order"
            answer = error
        self.answers.append((settle, answer))
        self._only_what_was_said_is_settled()

    @precondition(lambda self: self.answers)
    @rule()
    def answer_settle(self) -> None:
        self.core.settle_answered(*self.answers.pop(0))

    @precondition(lambda self: self.wire)
    @rule()
    def refuse_settle(self) -> None:
        self.core.settle_answered(self.wire.pop(0), OverloadedError("busy"))

    # ── steps that often follow each other, so that long stories are found ──────────────────

    @precondition(lambda self: self.pull is None and self.core.room > 0)
    @rule(partition=st.sampled_from(NAMES), sizes=st.lists(st.integers(1, 4), max_size=3))
    def receive(self, partition: PartitionName, sizes: list[int]) -> None:
        for size in sizes:
            self.sender.store(partition, size)
        self.ask(10)
        self.answer()
        while self.core.has_waiting:
            self.hand_out()

    @rule(which=st.sampled_from(["first", "last", "all"]))
    def ack_some(self, which: str) -> None:
        half = len(self.handed) // 2
        parts = {"first": self.handed[:half], "last": self.handed[half:], "all": self.handed}
        for message in parts[which]:
            self._say(message, "ack")

    @rule()
    def settle_and_hear(self) -> None:
        self.settle()
        while self.wire:
            self.handle_settle()
        while self.answers:
            self.answer_settle()

    # ── trouble ────────────────────────────────────────────────────────────────────────────

    @rule(pull_handled=st.booleans(), settles_handled=st.booleans())
    def disconnect(self, *, pull_handled: bool, settles_handled: bool) -> None:
        if self.pull is not None:
            if pull_handled:
                self.model.try_pull(self.pull)
            self.core.pull_failed()
            self.pull = None
        if settles_handled:
            while self.wire:
                self.handle_settle()
        self.answers.clear()
        self.wire = self.core.repeat_settles()

    @rule()
    def lose_lease(self) -> None:
        self.had_trouble = True
        self.model.lose_consumers()

    @rule(deliveries=st.integers(0, 8), settles=st.integers(0, 8))
    def lose_power(self, deliveries: int, settles: int) -> None:
        self.had_trouble = True
        self.disconnect(pull_handled=True, settles_handled=False)
        self.model.forget_deliveries(deliveries)
        self.model.forget_settles(settles)

    # ── what always holds ──────────────────────────────────────────────────────────────────

    def _only_what_was_said_is_settled(self) -> None:
        for partition, pull, delivery, how in self.model.settled:
            key = (partition, pull, delivery.sequence, delivery.tenure)
            assert how in self.said[key], f"{key} is settled by {how}: {self.said[key]}"
        self.model.settled.clear()

    @invariant()
    def nothing_is_abandoned_without_trouble(self) -> None:
        if hasattr(self, "core") and not self.had_trouble:
            assert self.core.abandoned == 0
            assert not any(message.is_abandoned for message in self.handed)

    @invariant()
    def it_holds_no_more_than_allowed(self) -> None:
        if hasattr(self, "core"):
            max_held = self.core.options.max_held
            assert 0 <= open_in(self.core) <= max_held
            # What is finished may be on its way to the broker still.
            assert 0 <= self.core.held <= 2 * max_held

    @invariant()
    def it_asks_for_no_more_than_it_got(self) -> None:
        if hasattr(self, "core"):
            for each in self.core._subscriptions:  # noqa: SLF001  # a test may look
                assert each.asked <= max(each.expected, 0)

    def teardown(self) -> None:
        """Without more trouble, every message is pulled and settled."""
        if not hasattr(self, "core"):
            return
        self.disconnect(pull_handled=True, settles_handled=True)
        stored = sum(self.model.partition(name).end for name in NAMES)
        for _ in range(200 + stored):  # with room for one, each round brings one message
            self._settle_everything()
            if self._is_all_done():
                break
            if self.core.room > 0:
                self.ask(10)
                self.answer()
            while self.core.has_waiting:
                self.hand_out()
        assert self._is_all_done()

    def _settle_everything(self) -> None:
        for message in self.handed:
            self._say(message, "ack")
        self.handed.clear()
        self.settle()
        while self.wire:
            self.handle_settle()
        while self.answers:
            self.answer_settle()

    def _is_all_done(self) -> bool:
        if self.core.held:
            return False
        for name in NAMES:
            log = self.model.pull_logs.get((name, "g", "c"))
            partition = self.model.partition(name)
            if partition.nexts.get("g", 0) < partition.end or (log and log.held):
                return False
        return True


TestConsuming = Consuming.TestCase
TestConsuming.settings = settings(stateful_step_count=60)


def test_a_story_of_two_power_cuts_and_a_lost_lease() -> None:
    """Found by the machine above: the consumer expected a delivery that was never to come."""
    story = Consuming()
    story.start(max_held=1)
    story.store(PartitionName("s"), 2)
    story.ask(1)
    story.answer()
    story.hand_out()
    story.forget_the_oldest()
    story.settle()
    story.lose_power(deliveries=1, settles=0)
    story.ask(1)
    story.answer()
    story.refuse_settle()
    story.ask(1)
    story.lose_power(deliveries=0, settles=0)
    story.lose_lease()
    story.receive(PartitionName("s"), [])
    story.teardown()


@pytest.fixture
def model() -> BrokerModel:
    return BrokerModel()


def pull(core: IncomingCore, model: BrokerModel, count: int = 100) -> list[ReceivedMessage]:
    answer = over_the_wire(model.try_pull(core.next_pull(count, 0)))
    assert isinstance(answer, Pulled)
    core.pulled(answer)
    return core.take_messages(core.next_batch(), count)


def test_a_prefix_is_settled_and_no_more(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 5)
    messages = pull(core, model)
    for index in (0, 1, 3):
        messages[index].ack()

    (settle,) = core.next_settles()

    assert (settle.partition, settle.first, settle.last) == ("s", 0, 1)
    assert list(core.next_settles()) == []


def test_a_settle_waits_for_the_one_before(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 5)
    messages = pull(core, model)
    messages[0].ack()
    (first,) = core.next_settles()
    messages[1].ack()
    assert list(core.next_settles()) == []

    core.settle_answered(first, model.settle(first))
    (second,) = core.next_settles()

    assert (second.first, second.last) == (1, 1)


def test_what_is_on_its_way_to_the_broker_makes_room(model: BrokerModel) -> None:
    core = make_core(max_held=10)
    Sender(model).store("s", 8)
    for message in pull(core, model)[:6]:
        message.ack()
    assert core.room == 2

    (settle,) = core.next_settles()
    assert core.room == 8
    core.settle_answered(settle, OverloadedError("busy"))
    assert core.room == 2
    (again,) = core.next_settles()
    core.settle_answered(again, model.settle(again))

    assert (core.held, core.room) == (2, 8)


def test_nobody_asks_early_for_a_splinter(model: BrokerModel) -> None:
    core = make_core(max_held=10)
    Sender(model).store("s", 7)
    messages = pull(core, model)

    assert core.room_for(8, is_early=True) == 0
    assert core.room_for(8, is_early=False) == 3
    assert core.room_for(6, is_early=True) == 3
    messages[0].ack()
    list(core.next_settles())
    assert core.room_for(8, is_early=True) == 4


def test_nacks_travel_with_reason_and_delay(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    messages = pull(core, model)
    messages[0].ack()
    messages[1].nack("no milk" * 1000, delay=1.5)
    messages[2].nack()

    (settle,) = core.next_settles()

    first, second = settle.nacked
    assert (first.sequence, first.delay_ms) == (1, 1500)
    assert first.reason.startswith("no milk")
    assert len(first.reason) == 1000
    assert (second.sequence, second.delay_ms, second.reason) == (2, -1, "")


def test_many_nacks_take_several_settles(model: BrokerModel) -> None:
    core = make_core(max_held=5000)
    Sender(model).store("s", 2500)
    for message in pull(core, model, 2500):
        message.nack()

    sizes = []
    while settles := list(core.next_settles()):
        for settle in settles:
            sizes.append(len(settle.nacked))
            core.settle_answered(settle, model.settle(settle))

    assert sizes == [1000, 1000, 500]


def test_the_last_word_counts_until_it_is_settled(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 2)
    messages = pull(core, model)
    messages[0].nack("no")
    messages[0].ack()
    messages[1].ack()
    messages[1].nack("yet no")

    (settle,) = core.next_settles()

    assert [nacked.sequence for nacked in settle.nacked] == [1]


def test_a_settle_ends_where_the_tenure_changes(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 2)
    messages = pull(core, model)
    model.start += 1
    sender.store("s", 3)
    messages += pull(core, model)
    for message in messages:
        message.ack()

    found: list[tuple[int, int, Tenure]] = []
    while settles := list(core.next_settles()):
        for settle in settles:
            found.append((settle.first, settle.last, settle.tenure))
            core.settle_answered(settle, model.settle(settle))

    assert found == [
        (0, 1, Tenure(Epoch(0), StartCount(1))),
        (2, 4, Tenure(Epoch(0), StartCount(2))),
    ]
    assert core.held == 0


def test_the_first_pull_asks_for_what_is_held_and_the_next_goes_on(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    first = core.next_pull(2, 0)
    core.pulled(model_answer(model, first))
    second = core.next_pull(2, 0)

    assert {wanted.expected for wanted in first.wanted} == {FROM_SETTLED}
    assert {wanted.partition: wanted.expected for wanted in second.wanted} == {
        "s": 2,
        "%retry%s%g": 0,
    }


def model_answer(model: BrokerModel, pull: Pull) -> Pulled:
    answer = over_the_wire(model.try_pull(pull))
    assert isinstance(answer, Pulled)
    return answer


def test_a_restarted_consumer_gets_what_it_held(model: BrokerModel) -> None:
    Sender(model).store("s", 4)
    before = make_core()
    held = pull(before, model)
    held[0].ack()
    (settle,) = before.next_settles()
    model.settle(settle)

    after = make_core()
    again = pull(after, model)

    assert [message.sequence for message in again] == [1, 2, 3]


def test_what_the_broker_gave_to_others_is_abandoned(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 3)
    messages = pull(core, model)
    messages[0].ack()
    model.lose_consumers()
    sender.store("s", 1)

    more = pull(core, model)

    assert all(message.is_abandoned for message in messages)
    assert core.abandoned == 3
    assert [message.is_abandoned for message in more] == [False]
    messages[1].ack()
    assert list(core.next_settles()) == []
    more[0].ack()
    (settle,) = core.next_settles()
    assert (settle.first, settle.last) == (3, 3)


def test_what_the_broker_does_not_know_is_abandoned(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 5)
    messages = pull(core, model)
    model.forget_deliveries(2)

    core.pulled(model_answer(model, core.next_pull(10, 0)))
    assert core.next_batch() is None
    again = pull(core, model)

    assert [message.is_abandoned for message in messages] == [False, False, False, True, True]
    assert [message.sequence for message in again] == [3, 4]
    for message in messages:
        message.ack()
    (settle,) = core.next_settles()
    assert (settle.first, settle.last) == (0, 2)


def test_a_settle_for_deliveries_that_the_broker_lost_does_not_hide_a_lost_lease(
    model: BrokerModel,
) -> None:
    core = make_core(max_held=1)
    Sender(model).store("s", 2)
    (first,) = pull(core, model, 1)
    first.ack()
    (settle,) = core.next_settles()
    model.forget_deliveries(1)
    assert pull(core, model, 1) == []
    core.settle_answered(settle, OverloadedError("busy"))
    model.try_pull(core.next_pull(1, 0))
    core.pull_failed()  # the connection broke before the answer came
    model.lose_consumers()

    (second,) = pull(core, model, 1)

    assert (second.sequence, second.pull_sequence) == (1, 1)
    second.ack()
    (settle,) = core.next_settles()
    assert (settle.first, settle.last) == (1, 1)
    core.settle_answered(settle, model.settle(settle))
    assert core.held == 0


def test_what_is_delivered_again_is_not_given_up_for_an_older_settle(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    messages = pull(core, model)
    for message in messages:
        message.ack()
    (older,) = core.next_settles()
    model.forget_deliveries(1)
    assert pull(core, model) == []
    (again,) = pull(core, model)
    with pytest.raises(StaleSettleError) as refused:
        model.settle(older)

    core.settle_answered(older, refused.value)

    assert not again.is_abandoned
    again.ack()
    settled = []
    while settles := list(core.next_settles()):
        for settle in settles:
            settled.append((settle.first, settle.last))
            core.settle_answered(settle, model.settle(settle))
    assert settled == [(0, 1), (2, 2)]
    assert core.held == 0


def test_settles_that_the_broker_forgot_are_made_again(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    for message in pull(core, model):
        message.ack()
    (settle,) = core.next_settles()
    core.settle_answered(settle, model.settle(settle))
    model.forget_settles(2)

    assert pull(core, model) == []
    again = pull(core, model)

    assert [message.sequence for message in again] == [1, 2]
    for message in again:
        message.ack()
    (settle,) = core.next_settles()
    assert (settle.first, settle.last) == (1, 2)


def test_an_old_settled_position_in_an_answer_is_only_late_news(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 2)
    for message in pull(core, model):
        message.ack()
    sender.store("s", 1)
    late = model_answer(model, core.next_pull(10, 0))
    (settle,) = core.next_settles()
    core.settle_answered(settle, model.settle(settle))

    core.pulled(late)

    assert core.abandoned == 0
    assert [message.sequence for message in core.take_messages(core.next_batch(), 9)] == [2]


def test_an_answer_from_before_everything_was_given_up_is_ignored(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 2)
    pull(core, model)[0].ack()
    (settle,) = core.next_settles()
    sender.store("s", 1)
    late = model_answer(model, core.next_pull(10, 0))
    core.settle_answered(settle, StaleSettleError("given to others"))

    core.pulled(late)
    assert core.next_batch() is None

    assert [message.sequence for message in pull(core, model)] == [0, 1, 2]


def test_a_gap_in_one_batch_holds_back_the_next(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 2)
    sender.store("s", 2)
    messages = pull(core, model)
    for index in (0, 2, 3):
        messages[index].ack()

    (settle,) = core.next_settles()

    assert (settle.first, settle.last) == (0, 0)


def test_messages_that_wait_are_not_handed_out_once_they_are_lost(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    core.pulled(model_answer(model, core.next_pull(10, 0)))
    model.lose_consumers()
    core.pulled(model_answer(model, core.next_pull(10, 0)))

    assert core.next_batch() is None


def test_part_of_a_batch_is_clipped(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 6, Codec.LZ4)

    parts = [[message.sequence for message in pull(core, model, 2)] for _ in range(3)]

    assert parts == [[0, 1], [2, 3], [4, 5]]


def test_a_batch_can_be_left_and_taken_up_again(model: BrokerModel) -> None:
    core = make_core()
    sender = Sender(model)
    sender.store("s", 3)
    sender.store("s", 3)
    core.pulled(model_answer(model, core.next_pull(10, 0)))

    first = core.take_messages(core.next_batch(), 4)
    second = core.take_messages(core.next_batch(), 4)

    assert [message.sequence for message in first] == [0, 1, 2, 3]
    assert [message.sequence for message in second] == [4, 5]


def test_damage_is_never_handed_out(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    model.corrupt = lambda data: data[:-1] + bytes([data[-1] ^ 1])

    with pytest.raises(CorruptionError):
        pull(core, model)
    assert core.next_batch() is None

    model.corrupt = lambda data: data
    assert [message.sequence for message in pull(core, model)] == [0, 1, 2]


def test_a_delivery_that_does_not_follow_is_refused(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 3)
    answer = model.try_pull(core.next_pull(10, 0))
    (delivered,) = answer.deliveries
    skipped = Pulled(answer.states, (replace(delivered, first_pull=PullSequence(1)),))

    with pytest.raises(RemoteProtocolError, match="0 was expected"):
        core.pulled(over_the_wire(skipped))  # type: ignore[arg-type]


def test_a_partition_that_cannot_be_pulled_is_an_error(model: BrokerModel) -> None:
    core = make_core()
    core.next_pull(1, 0)
    state = State(ErrorCode.UNKNOWN_SUBJECT, PullSequence(0), PullSequence(0))

    with pytest.raises(UnknownSubjectError, match="cannot be pulled"):
        core.pulled(Pulled((state, state), ()))


def test_another_consumer_with_this_id_ends_this_one(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 1)
    for message in pull(core, model):
        message.ack()
    (settle,) = core.next_settles()

    with pytest.raises(FencedError):
        core.settle_answered(settle, FencedError("a newer one"))


def test_an_answer_to_a_settle_must_be_one(model: BrokerModel) -> None:
    core = make_core()
    Sender(model).store("s", 1)
    for message in pull(core, model):
        message.ack()
    (settle,) = core.next_settles()

    with pytest.raises(RemoteProtocolError):
        core.settle_answered(settle, Beaten(1))
    core.settle_answered(settle, Settled(PullSequence(1)))


@pytest.mark.parametrize("kept", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_what_is_not_stored_any_more_is_settled_with_the_rest(
    model: BrokerModel, kept: tuple[int, ...]
) -> None:
    core = make_core()
    sender = Sender(model)
    for _ in range(3):
        sender.store("s", 2)
    answer = model.try_pull(core.next_pull(10, 0))
    (delivered,) = answer.deliveries
    records = delivered.records
    assert isinstance(records, tuple)
    whole = b"".join(records)
    size = len(whole) // 3
    holey = b"".join(whole[size * i : size * (i + 1)] for i in kept)

    core.pulled(over_the_wire(Pulled(answer.states, (replace(delivered, records=holey),))))  # type: ignore[arg-type]
    messages = core.take_messages(core.next_batch(), 10)
    for message in messages:
        message.ack()
    (settle,) = core.next_settles()

    assert [m.sequence for m in messages] == [2 * i + j for i in kept for j in (0, 1)]
    assert [int(m.pull_sequence) for m in messages] == [int(m.sequence) for m in messages]
    assert (settle.first, settle.last, settle.nacked) == (0, 5, ())
    core.settle_answered(settle, Settled(PullSequence(6)))
    assert core.held == 0

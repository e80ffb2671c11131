"""Whatever the network does, every message has exactly one outcome, and it is true.

A machine adds messages, sends, answers, refuses, cuts connections and lets time pass, in any
order. The oracle is a broker of its own: it remembers which of the last 64 numbers it stored.
"""

import gc
import re
import time
from collections import defaultdict
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from pulque.client.blocking.pending_sends import PendingSend, PendingSends, wait_for
from pulque.client.options.client_options import send_options
from pulque.client.routing.targets import NoRouteError, Targets
from pulque.client.sending.outgoing_batch import WINDOW, OutgoingBatch
from pulque.client.sending.outgoing_message import Outgoing, Receipt
from pulque.client.sending.producer_core import OutgoingCore
from pulque.errors import (
    DisconnectedError,
    ErrorCode,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UsageError,
)
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, Pattern
from pulque.model.positions import ConsumeSequence
from pulque.model.routes import PartitionRoute, Route, Slots
from pulque.wire.requests import Send
from pulque.wire.responses import Outcome, Response, Sent, Settled

REMEMBERED = 64
TIMEOUT = 30.0


class ManualTime:
    """A clock that only a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_core(
    clock: ManualTime, *, partitions: int = 1, **changes: object
) -> OutgoingCore[PendingSend]:
    choices: dict[str, object] = {
        "acks": "disk",
        "linger": 0.005,
        "max_batch": 4,
        "max_batch_bytes": 1000,
        "max_in_flight": 8,
        "max_buffered_bytes": 10_000,
        "timeout": TIMEOUT,
        "compression": None,
    }
    core = OutgoingCore(
        send_options(**{**choices, **changes}),  # type: ignore[arg-type]
        producer_id=7,
        ids=IdSource(1),
        promise=PendingSend,
        monotonic=clock,
        now_ms=lambda: int(clock.now * 1000),
        draw=lambda: 0.5,
    )
    for name in ("a", "b"):
        names = [name] if partitions == 1 else [f"{name}#{i}" for i in range(partitions)]
        core.add_way(name, targets(name, names))
    return core


def targets(subject: str, names: list[str]) -> Targets:
    share = 1024 // len(names)
    routes = tuple(
        PartitionRoute(
            PartitionName(name), "group", "host", 1, slots=Slots(at * share, (at + 1) * share)
        )
        for at, name in enumerate(names)
    )
    return Targets(Route(Pattern(subject), 1, routes))


def messages_in(partition: str, data: bytes) -> list[Message]:
    batch = StoredBatch(
        data,
        partition=PartitionName(partition),
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )
    return [Message(batch, index) for index in range(len(batch))]


class ModelBroker:
    """Stores a batch once, as long as its number is among the last that it remembers."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        self.places: dict[str, dict[int, int]] = defaultdict(dict)
        self.contents: dict[tuple[str, int], bytes] = {}

    def handle(self, request: Send, code: ErrorCode) -> Sent:
        return Sent(tuple(self._store(p, bytes(d), code) for p, d in request.batches))

    def _store(self, partition: str, data: bytes, code: ErrorCode) -> Outcome:
        number = read_header(data).producer_sequence
        known = self.contents.setdefault((partition, number), data)
        assert known == data, "a number was used for two batches"
        places = self.places[partition]
        assert number > max(places, default=0) - REMEMBERED, "the broker cannot know it any more"
        if number in places:
            return Outcome(ErrorCode.NONE, True, ConsumeSequence(places[number]), 1)
        if code is not ErrorCode.NONE:
            return Outcome(code, False, ConsumeSequence(0), 0, "no")
        places[number] = len(self.bodies[partition])
        self.bodies[partition] += [message.body for message in messages_in(partition, data)]
        return Outcome(ErrorCode.NONE, False, ConsumeSequence(places[number]), 1)


class Sending(RuleBasedStateMachine):
    wire = Bundle("wire")
    answers = Bundle("answers")

    @initialize(
        partitions=st.integers(1, 3),
        linger=st.sampled_from([0.0, 0.005]),
        max_in_flight=st.sampled_from([1, 8]),
    )
    def start(self, partitions: int, linger: float, max_in_flight: int) -> None:
        self.clock = ManualTime()
        self.core = make_core(
            self.clock, partitions=partitions, linger=linger, max_in_flight=max_in_flight
        )
        self.dispatch = self.core.dispatch
        self.broker = ModelBroker()
        self.sent: dict[bytes, PendingSend] = {}
        self.told: dict[bytes, int] = defaultdict(int)
        self.connection = 0
        self.requests = 0

    def _take_note(self, body: bytes, pending: PendingSend) -> None:
        self.sent[body] = pending
        pending.add_done_callback(lambda _: self._told(body))

    def _told(self, body: bytes) -> None:
        self.told[body] += 1

    def _tell(self) -> None:
        for batch in self.dispatch.take_finished():
            batch.tell()

    @rule(subject=st.sampled_from("ab"), order_key=st.sampled_from([None, "x", "y"]))
    def add(self, subject: str, order_key: str | None) -> None:
        body = f"{len(self.sent)}".encode()
        if order_key:
            pending = self.core.add_message(subject, Outgoing(body, order_key=order_key))
        else:
            pending = self.core.add(subject, body)
        self._take_note(body, pending)

    @rule(subject=st.sampled_from("ab"), count=st.integers(1, 9), size=st.integers(0, 300))
    def add_many(self, subject: str, count: int, size: int) -> None:
        first = len(self.sent)
        bodies = [f"{first + i}".encode().ljust(size, b".") for i in range(count)]
        spans = self.core.add_many(subject, bodies)
        promises = PendingSends(spans)
        for body, pending in zip(bodies, promises, strict=True):
            self._take_note(body, pending)

    @rule(target=wire)
    def take(self) -> tuple[int, int, Send] | None:
        batches = self.dispatch.take(self.clock.now)
        if not batches:
            return None
        self.requests += 1
        request = self.dispatch.request(batches, self.clock.now)
        self.dispatch.sent(self.requests, batches)
        return self.connection, self.requests, request

    @rule(
        target=answers,
        sent=consumes(wire),
        code=st.sampled_from(
            [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.STORAGE_FULL, ErrorCode.NOT_ALLOWED]
        ),
    )
    def handle(
        self, sent: tuple[int, int, Send] | None, code: ErrorCode
    ) -> tuple[int, int, Sent] | None:
        # A request of a connection that was cut may still be handled: it was on its way.
        if sent is None:
            return None
        connection, request_id, request = sent
        return connection, request_id, self.broker.handle(request, code)

    @rule(answer=consumes(answers))
    def answer(self, answer: tuple[int, int, Sent] | None) -> None:
        if answer is not None and answer[0] == self.connection:
            self.dispatch.answered(answer[1], answer[2], self.clock.now)
            self._tell()

    @rule(sent=consumes(wire))
    def answer_with_an_error(self, sent: tuple[int, int, Send] | None) -> None:
        if sent is not None and sent[0] == self.connection:
            self.dispatch.answered(sent[1], OverloadedError("busy"), self.clock.now)
            self._tell()

    @rule()
    def disconnect(self) -> None:
        self.connection += 1
        self.dispatch.disconnected()

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0, TIMEOUT]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.dispatch.expire(self.clock.now)
        self._tell()

    @rule()
    def hurry(self) -> None:
        self.core.let_loose()

    @rule()
    def flush(self) -> None:
        self.dispatch.flush()

    @invariant()
    def outcomes_come_once_and_are_true(self) -> None:
        for body, pending in getattr(self, "sent", {}).items():
            assert self.told[body] == pending.done()
            if pending.done() and pending.exception() is None:
                receipt = pending.result()
                assert self.broker.bodies[receipt.partition][receipt.sequence] == body

    @invariant()
    def nothing_is_stored_twice(self) -> None:
        if hasattr(self, "broker"):
            stored = [body for bodies in self.broker.bodies.values() for body in bodies]
            assert len(stored) == len(set(stored))

    @precondition(lambda self: hasattr(self, "core"))
    @invariant()
    def memory_is_counted(self) -> None:
        if all(pending.done() for pending in self.sent.values()):
            assert self.core.buffered == 0
        else:
            assert self.core.buffered > 0

    def teardown(self) -> None:
        """With a broker that does its work, everything that is left is confirmed."""
        if not hasattr(self, "core"):
            return
        left = [pending for pending in self.sent.values() if not pending.done()]
        self.disconnect()
        with self.core.lock:
            self.core.close()
        for _ in range(1000):
            if all(pending.done() for pending in left):
                break
            self.clock.now += 0.0001
            batches = self.dispatch.take(self.clock.now)
            if batches:
                self.dispatch.sent(0, batches)
                request = self.dispatch.request(batches, self.clock.now)
                self.dispatch.answered(
                    0, self.broker.handle(request, ErrorCode.NONE), self.clock.now
                )
                self._tell()
            else:
                wake = self.dispatch.next_wake()
                assert wake is not None, "nothing is ready, and nothing ever will be"
                self.clock.now = max(self.clock.now, wake)
        assert all(pending.exception() is None for pending in left)
        self.outcomes_come_once_and_are_true()


TestSending = Sending.TestCase
TestSending.settings = settings(stateful_step_count=60)


@pytest.fixture
def clock() -> ManualTime:
    return ManualTime()


def send_all(
    core: OutgoingCore[PendingSend], clock: ManualTime, number: int = 1000
) -> Iterator[Send]:
    """Yield requests as long as there are any; they stay without an answer."""
    while batches := core.dispatch.take(clock.now):
        number += 1
        core.dispatch.sent(number, batches)
        yield core.dispatch.request(batches, clock.now)


def numbers(requests: list[Send]) -> list[int]:
    return [
        read_header(bytes(data)).producer_sequence
        for request in requests
        for _, data in request.batches
    ]


def test_a_full_batch_goes_at_once_and_a_young_one_lingers(clock: ManualTime) -> None:
    core = make_core(clock)
    for number in range(5):
        core.add("a", b"%d" % number)

    first = list(send_all(core, clock))
    clock.now += 0.004
    early = list(send_all(core, clock))
    clock.now += 0.002
    late = list(send_all(core, clock))

    assert [m.body for m in messages_in("a", bytes(first[0].batches[0][1]))] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert early == []
    assert len(late) == 1


def test_batches_of_many_partitions_share_a_request(clock: ManualTime) -> None:
    core = make_core(clock, linger=0)
    core.add("a", b"1")
    core.add("b", b"2")

    (request,) = send_all(core, clock)

    assert [partition for partition, _ in request.batches] == ["a", "b"]


def test_no_more_than_allowed_are_in_flight(clock: ManualTime) -> None:
    core = make_core(clock, max_in_flight=3, max_batch=1)
    for _ in range(5):
        core.add("a", b"x")

    sent = list(send_all(core, clock))
    core.dispatch.answered(1001, Sent((stored(0), stored(1), stored(2))), clock.now)
    more = list(send_all(core, clock))

    assert numbers(sent) == [0, 1, 2]
    assert numbers(more) == [3, 4]


def test_small_batches_of_a_partition_share_a_request_and_large_ones_do_not(
    clock: ManualTime,
) -> None:
    core = make_core(clock, max_batch=1, max_batch_bytes=100_000, max_buffered_bytes=10**6)
    for body in (b"1", b"2", bytes(9000), bytes(9000), b"5"):
        core.add("a", body)

    sent = list(send_all(core, clock))

    assert [len(request.batches) for request in sent] == [3, 1, 1]
    assert numbers(sent) == [0, 1, 2, 3, 4]


def hold_the_next(core: OutgoingCore[PendingSend], clock: ManualTime) -> list[PendingSend]:
    """Have three messages confirmed that somebody waits for, with one more at hand."""
    promises = [core.add("a", b"%d" % number) for number in range(3)]
    (request,) = send_all(core, clock)
    assert len(request.batches) == 1
    promises[0].add_done_callback(lambda _: None)
    promises.append(core.add("a", b"3"))
    clock.now += 0.001
    core.dispatch.answered(1001, Sent((stored(0),)), clock.now)
    assert [each.done() for each in promises] == [True, True, True, False]
    return promises


def test_whoever_is_told_of_a_batch_may_add_to_the_next_one(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1, max_batch=100)
    hold_the_next(core, clock)

    held = list(send_all(core, clock))
    core.add("a", b"4")
    core.let_loose()
    (request,) = send_all(core, clock)

    assert held == []
    assert [m.body for m in messages_in("a", bytes(request.batches[0][1]))] == [b"3", b"4"]


def test_a_batch_is_held_until_somebody_waits_for_it(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1, max_batch=100)
    last = hold_the_next(core, clock)[-1]
    hurried: list[bool] = []
    core.signal.on_hurry = lambda: hurried.append(True)

    with pytest.raises(RequestTimeoutError):
        last.result(0)

    assert hurried == [True]


def test_a_batch_is_held_for_a_moment_only(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1, max_batch=100)
    hold_the_next(core, clock)
    assert list(send_all(core, clock)) == []

    wake = core.dispatch.next_wake()
    assert wake is not None
    assert clock.now < wake <= clock.now + 0.0005
    clock.now = wake

    assert len(list(send_all(core, clock))) == 1


def test_a_full_batch_is_not_held(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1, max_batch=3)
    hold_the_next(core, clock)
    core.add("a", b"4")
    core.add("a", b"5")

    assert len(list(send_all(core, clock))) == 1


def test_where_nobody_waits_nothing_is_held(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1, max_batch=100)
    for number in range(3):
        core.add("a", b"%d" % number)
    list(send_all(core, clock))
    core.add("a", b"3")
    clock.now += 0.001
    core.dispatch.answered(1001, Sent((stored(0),)), clock.now)

    assert len(list(send_all(core, clock))) == 1


def stored(first: int) -> Outcome:
    return Outcome(ErrorCode.NONE, False, ConsumeSequence(first), 1)


def test_batches_without_an_outcome_stay_within_the_window(clock: ManualTime) -> None:
    core = make_core(clock, max_in_flight=WINDOW, max_batch=1)
    for _ in range(3 * WINDOW):
        core.add("a", b"x")
    (request,) = send_all(core, clock)
    refused = Outcome(ErrorCode.STORAGE_FULL, False, ConsumeSequence(0), 0, "full")
    outcomes = (refused, *[stored(number) for number in range(1, len(request.batches))])
    core.dispatch.answered(1001, Sent(outcomes), clock.now)

    clock.now += 10
    (first, *others) = numbers(list(send_all(core, clock)))

    assert first == 0
    assert others == []


def test_a_lost_connection_sends_again_in_order_with_the_same_numbers(clock: ManualTime) -> None:
    core = make_core(clock, max_batch=1)
    before: list[Send] = []
    for number in range(5):
        core.add("a", b"%d" % number)
        before += send_all(core, clock, 1000 + number)
    core.dispatch.answered(1003, Sent((stored(2),)), clock.now)

    core.dispatch.disconnected()
    after = list(send_all(core, clock))

    assert numbers(before) == [0, 1, 2, 3, 4]
    assert numbers(after) == [0, 1, 3, 4]
    assert after[0].batches[0] == before[0].batches[0]


def test_a_refusal_pauses_longer_each_time(clock: ManualTime) -> None:
    core = make_core(clock, max_batch=1)
    core.add("a", b"x")
    waits = []
    for _ in range(4):
        (_,) = send_all(core, clock)
        core.dispatch.answered(1001, OverloadedError("busy"), clock.now)
        assert list(send_all(core, clock)) == []
        wake = core.dispatch.next_wake()
        assert wake is not None
        waits.append(wake - clock.now)
        clock.now = wake

    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]


def test_no_refused_batch_is_repeated_when_its_answer_would_come_too_late(
    clock: ManualTime,
) -> None:
    core = make_core(clock, linger=0, timeout=0.25)  # the fifth try would begin after 0.225 s
    pending = core.add("a", b"1")
    began = clock.now

    tries = []
    while not pending.done():
        for _ in send_all(core, clock):
            tries.append(clock.now - began)
            core.dispatch.answered(1001, OverloadedError("busy"), clock.now)
        core.dispatch.expire(clock.now)
        for each in core.dispatch.take_finished():
            each.tell()
        wake = core.dispatch.next_wake()
        clock.now = (wake or clock.now) + 0.001  # nobody wakes up in time

    error = pending.exception()
    assert tries == pytest.approx([0, 0.016, 0.047, 0.108], abs=0.001)
    assert isinstance(error, OverloadedError)
    assert error.outcome_known


def test_an_expired_batch_says_whether_it_was_sent(clock: ManualTime) -> None:
    core = make_core(clock, linger=0, max_in_flight=1)
    sent = core.add("a", b"1")
    list(send_all(core, clock))
    unsent = core.add("a", b"2")
    core.dispatch.problem = DisconnectedError("nobody there")

    clock.now += TIMEOUT
    is_overdue = core.dispatch.expire(clock.now)

    assert is_overdue
    lost, never = sent.exception(), unsent.exception()
    assert isinstance(lost, DisconnectedError)
    assert not lost.outcome_known
    assert "unknown" in str(lost)
    assert isinstance(never, DisconnectedError)
    assert never.outcome_known
    assert re.search(r"nobody there .* it was never sent", str(never))


def test_what_has_an_outcome_is_forgotten_long_before_its_deadline(clock: ManualTime) -> None:
    """Of sends with a long timeout among shorter ones, of which some are always on their way."""
    core = make_core(clock, linger=0)
    for each in range(2000):
        core.add_message("a", Outgoing(b"1"), timeout=600.0)
        core.add("b", b"2")
        (request,) = send_all(core, clock, each)
        if each:
            answer = Sent(tuple(stored(each) for _ in request.batches))
            core.dispatch.answered(each, answer, clock.now)
            core.dispatch.take_finished()
        core.dispatch.expire(clock.now)

    assert sum(isinstance(each, OutgoingBatch) for each in gc.get_objects()) < 1000


def test_an_answer_that_makes_no_sense_fails_its_messages(clock: ManualTime) -> None:
    core = make_core(clock, linger=0)
    for response in (Sent(()), Settled(ConsumeSequence(0))):  # type: ignore[arg-type]
        pending = core.add("a", b"1")
        list(send_all(core, clock))
        answer: Response = response
        core.dispatch.answered(1001, answer, clock.now)

        assert isinstance(pending.exception(), RemoteProtocolError)


def test_a_late_answer_does_not_change_an_outcome(clock: ManualTime) -> None:
    core = make_core(clock, linger=0)
    pending = core.add("a", b"1")
    list(send_all(core, clock))
    clock.now += TIMEOUT
    core.dispatch.expire(clock.now)

    core.dispatch.answered(1001, Sent((stored(0),)), clock.now)

    with pytest.raises(RequestTimeoutError):
        pending.result()


def test_a_message_that_is_none_leaves_nothing_behind(clock: ManualTime) -> None:
    core = make_core(clock, linger=0)
    with pytest.raises(UsageError):
        core.add_message("a", Outgoing(b"x", headers={"": "no name"}))

    assert core.dispatch.flush() == []
    assert core.buffered == 0
    core.add("a", b"fine")
    assert len(list(send_all(core, clock))) == 1


def test_a_message_over_the_limit_is_refused_alone(clock: ManualTime) -> None:
    core = make_core(clock)
    core.limit_messages(100)
    core.add("a", b"fine")

    for add in (core.add, lambda s, b: core.add_many(s, [b])):
        with pytest.raises(MessageTooLargeError):
            add("a", bytes(101))
    with pytest.raises(MessageTooLargeError):
        list(core.add_in_steps("a", [b"fine", bytes(101)]))

    (batch,) = core.dispatch.flush()
    assert batch.bodies == [b"fine"]


def test_a_message_that_is_none_among_many_is_told_with_its_place(clock: ManualTime) -> None:
    core = make_core(clock)

    with pytest.raises(UsageError) as caught:
        list(core.add_in_steps("a", [b"0", Outgoing(b"1"), object()]))

    assert caught.value.__notes__ == ["2 of 3 messages were taken in"]


def test_large_messages_fill_a_batch_by_bytes(clock: ManualTime) -> None:
    core = make_core(clock, max_batch=100, max_batch_bytes=1000)
    for size in (400, 400, 400, 5, 2000, 5):
        core.add("a", bytes(size))
    core.dispatch.flush()

    sizes = [
        [len(message.body) for message in messages_in("a", bytes(data))]
        for request in send_all(core, clock)
        for _, data in request.batches
    ]

    assert sizes == [[400, 400], [400, 5], [2000], [5]]


def test_an_unknown_subject_needs_its_route(clock: ManualTime) -> None:
    core = make_core(clock)

    with pytest.raises(NoRouteError):
        core.add("c", b"x")
    assert core.knows("a")
    assert not core.knows("c")


def test_messages_with_one_order_key_go_to_one_partition(clock: ManualTime) -> None:
    core = make_core(clock, partitions=4, max_batch=1)
    promises = [core.add_message("a", Outgoing(b"x", order_key=f"key {i % 5}")) for i in range(50)]
    answer_all(core, clock)

    found = defaultdict(set)
    for number, pending in enumerate(promises):
        found[number % 5].add(pending.result().partition)
    assert all(len(partitions) == 1 for partitions in found.values())
    assert len(set.union(*found.values())) > 1


def test_batches_without_an_order_key_take_turns(clock: ManualTime) -> None:
    core = make_core(clock, partitions=3, max_batch=2)
    promises = [core.add("a", b"x") for _ in range(12)]
    answer_all(core, clock)

    counts: dict[str, int] = defaultdict(int)
    for pending in promises:
        counts[pending.result().partition] += 1
    assert dict(counts) == {"a#0": 4, "a#1": 4, "a#2": 4}


def answer_all(core: OutgoingCore[PendingSend], clock: ManualTime) -> None:
    core.dispatch.flush()
    while batches := core.dispatch.take(clock.now):
        core.dispatch.sent(1, batches)
        core.dispatch.answered(1, Sent((stored(0),) * len(batches)), clock.now)


def test_a_closed_core_takes_nothing_more(clock: ManualTime) -> None:
    core = make_core(clock)
    pending = core.add("a", b"x")
    with core.lock:
        (batch,) = core.close()

    with pytest.raises(UsageError, match="closed"):
        core.add("a", b"y")
    core.dispatch.fail_all(DisconnectedError("gone"))

    assert batch.is_done
    assert isinstance(pending.exception(), DisconnectedError)


def test_waiting_for_an_outcome_ends_in_time(clock: ManualTime) -> None:
    core = make_core(clock)
    pending = core.add("a", b"x")
    started = time.monotonic()

    with pytest.raises(RequestTimeoutError, match="still on their way"):
        pending.result(0.01)

    assert time.monotonic() - started < 5
    assert not pending.done()
    wait_for([], 0)


def test_promises_of_many_behave_like_a_list(clock: ManualTime) -> None:
    core = make_core(clock)
    many = PendingSends(core.add_many("a", [b"x"] * 10))
    assert len(many) == 10
    assert not many.done()
    answer_all(core, clock)

    assert many.done()
    assert [receipt.sequence for receipt in many.result(0)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert many[9].result(0) == many[-1].result(0)
    assert [p.result(0) for p in many[2:4]] == many.result(0)[2:4]
    with pytest.raises(IndexError):
        many[10]
    assert isinstance(many[0].result(0), Receipt)
    assert "done" in repr(many[0])


def test_the_first_error_of_many_says_how_many_are_confirmed(clock: ManualTime) -> None:
    core = make_core(clock)
    many = PendingSends(core.add_many("a", [b"x"] * 6))
    core.dispatch.flush()
    batches: list[OutgoingBatch] = core.dispatch.take(clock.now)
    core.dispatch.sent(1, batches)
    codes = (ErrorCode.NONE, ErrorCode.NOT_ALLOWED)
    outcomes = tuple(Outcome(code, False, ConsumeSequence(0), 1, "no") for code in codes)
    core.dispatch.answered(1, Sent(outcomes), clock.now)

    with pytest.raises(NotAllowedError) as caught:
        many.result(0)

    assert caught.value.__notes__ == ["4 of 6 messages are confirmed"]


def test_a_callback_that_fails_does_not_stop_the_others(
    clock: ManualTime, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(clock)
    pending = core.add("a", b"x")
    called: list[PulqueError | None] = []
    pending.add_done_callback(lambda _: 1 / 0)
    pending.add_done_callback(lambda done: called.append(done.exception()))
    answer_all(core, clock)
    for batch in core.dispatch.take_finished():
        batch.tell()

    assert called == [None]
    assert "a done callback failed" in caplog.text


@given(
    messages=st.lists(
        st.tuples(
            st.binary(max_size=400),
            st.sampled_from(["", "", "a key", "another", "ein Schlüssel" * 9]),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    partitions=st.integers(1, 2),
)
def test_messages_keep_their_order_keys_whichever_way_they_come_in(
    messages: list[tuple[bytes, str, bool]], partitions: int
) -> None:
    core = make_core(ManualTime(), partitions=partitions, max_in_flight=32)
    for body, order_key, has_tag in messages:
        if has_tag:
            core.add_message("a", Outgoing(body, order_key=order_key or None, tags=["t"]))
        elif order_key:
            core.add_keyed("a", body, order_key)
        else:
            core.add("a", body)
    core.flush()

    found = []
    while batches := core.dispatch.take(0.0):
        for batch in batches:
            assert len(batch.data) < 2 * 1000 + 400
            found += messages_in(batch.stream.target.partition, batch.data)
        core.dispatch.sent(1, batches)
        stored = Outcome(ErrorCode.NONE, False, ConsumeSequence(0), 1)
        core.dispatch.answered(1, Sent((stored,) * len(batches)), 0.0)

    assert sorted((each.body, each.order_key or "", bool(each.tags)) for each in found) == sorted(
        messages
    )
    for key in {order_key for _, order_key, _ in messages if order_key}:
        sent = [body for body, order_key, _ in messages if order_key == key]
        assert [each.body for each in found if each.order_key == key] == sent
    assert core.buffered == 0

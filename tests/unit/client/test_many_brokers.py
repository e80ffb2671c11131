"""A producer of many brokers: every message has one outcome, and it says if it may be doubled.

A machine sends to three brokers that answer, refuse, hang up and stay away in any order. Each
broker is a model of its own, which knows a batch again by its number; no two know of each other.
"""

from collections import Counter, defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from pulque.client.blocking.pending_sends import PendingSend
from pulque.client.routing.broker_health import Breaker
from pulque.client.routing.route_table import RouteKey, RouteTable
from pulque.client.routing.targets import Targets
from pulque.client.sending.dispatch import Dispatch
from pulque.client.sending.outgoing_message import Outgoing
from pulque.client.sending.producer_core import OutgoingCore
from pulque.errors import ErrorCode, NotAllowedError, OverloadedError
from pulque.model.names import PartitionName, Pattern
from pulque.model.routes import PartitionRoute, Route, Slots
from pulque.wire.requests import Send
from pulque.wire.responses import Sent
from tests.unit.client.test_dispatch import (
    TIMEOUT,
    ManualTime,
    ModelBroker,
    make_core,
    messages_in,
)

GROUPS = ("g0", "g1", "g2")
Asked = tuple[str, int, int, Send]
Answered = tuple[str, int, int, Send, Sent]


def targets_of(
    writable: set[str] = frozenset(GROUPS),  # type: ignore[assignment]
    *,
    names: tuple[str, ...] = GROUPS,
    table: RouteTable | None = None,
) -> Targets:
    share = 1024 // len(names)
    partitions = tuple(
        PartitionRoute(
            PartitionName("s" if name != "g2" else "s#far"),
            name,
            "127.0.0.1",
            7000 + at,
            name in writable,
            Slots(at * share, 1024 if at == len(names) - 1 else (at + 1) * share),
        )
        for at, name in enumerate(names)
    )
    table = table or RouteTable()
    table.take_in(RouteKey("s"), Route(Pattern("s"), 1, partitions))
    return table.targets["s"]


def core_of(clock: ManualTime, targets: Targets, **changes: object) -> OutgoingCore[PendingSend]:
    core = make_core(clock, **changes)  # type: ignore[arg-type]
    core.add_way("s", targets)
    return core


class Spreading(RuleBasedStateMachine):
    wire = Bundle("wire")
    answers = Bundle("answers")

    @initialize(linger=st.sampled_from([0.0, 0.005]))
    def start(self, linger: float) -> None:
        self.clock = ManualTime()
        self.table = RouteTable()
        self.core = core_of(self.clock, targets_of(table=self.table), linger=linger)
        self.brokers = {name: ModelBroker() for name in GROUPS}
        self.connections: Counter[str] = Counter()
        self.sent: dict[bytes, PendingSend] = {}
        self.told: dict[bytes, int] = defaultdict(int)
        self.refused: set[bytes] = set()
        """For good. One whose batch was divided is told when all pieces have their outcome."""
        self.requests = 0

    def _dispatch(self, place: str) -> Dispatch | None:
        return self.core.dispatches.get(place)

    def _tell(self) -> None:
        for batch in self.core.take_finished():
            batch.tell()

    @rule(order_key=st.sampled_from([None, None, "x", "y", "z"]), count=st.integers(1, 5))
    def add(self, order_key: str | None, count: int) -> None:
        for _ in range(count):
            body = f"{len(self.sent)}".encode()
            pending = (
                self.core.add_message("s", Outgoing(body, order_key=order_key))
                if order_key
                else self.core.add("s", body)
            )
            self.sent[body] = pending
            pending.add_done_callback(lambda _, body=body: self._told(body))  # type: ignore[misc]

    def _told(self, body: bytes) -> None:
        self.told[body] += 1

    @rule(target=wire, place=st.sampled_from(GROUPS))
    def take(self, place: str) -> Asked | None:
        dispatch = self._dispatch(place)
        batches = dispatch.take(self.clock.now) if dispatch is not None else []
        if dispatch is None or not batches:
            return None
        self.requests += 1
        request = dispatch.request(batches, self.clock.now)
        dispatch.sent(self.requests, batches)
        return place, self.connections[place], self.requests, request

    @rule(
        target=answers,
        sent=consumes(wire),
        code=st.sampled_from(
            [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.READ_ONLY, ErrorCode.NOT_ALLOWED]
        ),
    )
    def handle(self, sent: Asked | None, code: ErrorCode) -> Answered | None:
        if sent is None:
            return None
        place, connection, request_id, request = sent
        return place, connection, request_id, request, self.brokers[place].handle(request, code)

    @rule(answer=consumes(answers))
    def answer(self, answer: Answered | None) -> None:
        if answer is not None and answer[1] == self.connections[answer[0]]:
            dispatch = self.core.dispatches[answer[0]]
            for (partition, data), outcome in zip(
                answer[3].batches, answer[4].outcomes, strict=True
            ):
                if outcome.code is ErrorCode.NOT_ALLOWED:
                    self.refused.update(each.body for each in messages_in(partition, bytes(data)))
            dispatch.answered(answer[2], answer[4], self.clock.now)
            self._tell()

    @rule(sent=consumes(wire))
    def answer_with_an_error(self, sent: Asked | None) -> None:
        if sent is not None and sent[1] == self.connections[sent[0]]:
            dispatch = self.core.dispatches[sent[0]]
            dispatch.answered(sent[2], OverloadedError("busy"), self.clock.now)
            self._tell()

    @rule(place=st.sampled_from(GROUPS), lasted=st.sampled_from([None, 0.0, Breaker.LONG]))
    def lose(self, place: str, lasted: float | None) -> None:
        """The connection is cut; and nobody answers there, if that lasts."""
        dispatch = self._dispatch(place)
        if dispatch is not None:
            self.connections[place] += 1
            dispatch.disconnected()
            if lasted is not None:
                self.core.unreachable(dispatch, self.clock.now, lasted)

    @rule(writable=st.sets(st.sampled_from(GROUPS)), cut=st.booleans())
    def change_route(self, writable: set[str], *, cut: bool) -> None:
        names = GROUPS[:2] if cut else GROUPS
        self.core.add_way("s", targets_of(writable, names=names, table=self.table))

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0, 5.0, TIMEOUT]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        for dispatch in list(self.core.dispatches.values()):
            dispatch.expire(self.clock.now)
        self._tell()

    def _stored(self) -> Counter[bytes]:
        return Counter(
            body
            for broker in self.brokers.values()
            for bodies in broker.bodies.values()
            for body in bodies
        )

    @invariant()
    def outcomes_come_once_and_are_true(self) -> None:
        stored = self._stored() if hasattr(self, "core") else Counter()
        for body, pending in getattr(self, "sent", {}).items():
            assert self.told[body] == pending.done()
            if pending.done() and pending.exception() is None:
                receipt = pending.result()
                bodies = self.brokers[receipt.broker_group].bodies[receipt.partition]
                assert bodies[receipt.sequence] == body
                assert stored[body] == 1 or receipt.may_be_doubled

    @invariant()
    def memory_is_counted(self) -> None:
        if hasattr(self, "core"):
            is_done = all(pending.done() for pending in self.sent.values())
            assert (self.core.buffered == 0) == is_done

    def teardown(self) -> None:
        """With brokers that do their work, all that is left and was not refused is confirmed."""
        if not hasattr(self, "core"):
            return
        left = {body: each for body, each in self.sent.items() if not each.done()}
        self.core.close()
        for place, dispatch in list(self.core.dispatches.items()):
            self.connections[place] += 1
            dispatch.disconnected()
        for _ in range(1000):
            if all(pending.done() for pending in left.values()):
                break
            for place, dispatch in list(self.core.dispatches.items()):
                self._work(place, dispatch)
            self.clock.now += 0.01
        for body, pending in left.items():
            assert pending.done()
            kind = NotAllowedError if body in self.refused else type(None)
            assert isinstance(pending.exception(), kind)
        self.outcomes_come_once_and_are_true()

    def _work(self, place: str, dispatch: Dispatch) -> None:
        while batches := dispatch.take(self.clock.now):
            dispatch.sent(0, batches)
            request = dispatch.request(batches, self.clock.now)
            answer = self.brokers[place].handle(request, ErrorCode.NONE)
            dispatch.answered(0, answer, self.clock.now)
        self._tell()


TestSpreading = Spreading.TestCase
TestSpreading.settings = settings(stateful_step_count=60)


# ── one thing at a time ────────────────────────────────────────────────────────────────────


@pytest.fixture
def clock() -> ManualTime:
    return ManualTime()


def take(core: OutgoingCore[PendingSend], clock: ManualTime) -> dict[str, list[bytes]]:
    """Return the bodies that go to each broker now; they stay without an answer."""
    found: dict[str, list[bytes]] = {}
    for number, (place, dispatch) in enumerate(core.dispatches.items()):
        while batches := dispatch.take(clock.now):
            dispatch.sent(1000 * number + len(found.get(place, ())), batches)
            broker = ModelBroker()
            broker.handle(dispatch.request(batches, clock.now), ErrorCode.NONE)
            bodies = [body for each in broker.bodies.values() for body in each]
            found.setdefault(place, []).extend(bodies)
    return found


@pytest.mark.accepts("002-20", "002-21", "004-34")
def test_a_batch_to_one_broker_the_next_batch_to_the_next(clock: ManualTime) -> None:
    core = core_of(clock, targets_of())
    for number in range(24):
        core.add("s", b"%d" % number)
    found = take(core, clock)
    assert {place: len(bodies) for place, bodies in found.items()} == dict.fromkeys(GROUPS, 8)
    assert [b"0", b"1", b"2", b"3"] in [bodies[:4] for bodies in found.values()]


@pytest.mark.accepts("002-19", "002-22", "002-23")
def test_order_keys_stay_with_their_broker_and_in_order(clock: ManualTime) -> None:
    core = core_of(clock, targets_of())
    for number in range(60):
        core.add_message(
            "s", Outgoing(b"%d %d" % (number % 6, number), order_key=f"k{number % 6}")
        )
    clock.now += 1
    where: dict[bytes, str] = {}
    last: dict[bytes, int] = {}
    for place, bodies in take(core, clock).items():
        for body in bodies:
            key, number_ = body.split()
            assert where.setdefault(key, place) == place
            assert last.get(key, -1) < int(number_)
            last[key] = int(number_)
    assert len(set(where.values())) > 1


def test_what_was_never_sent_goes_to_others_and_is_not_doubled(clock: ManualTime) -> None:
    core = core_of(clock, targets_of())
    pendings = [core.add("s", b"%d" % number) for number in range(12)]
    core.unreachable(core.dispatches["g0"], clock.now, Breaker.LONG)
    found = take(core, clock)
    assert set(found) == {"g1", "g2"}
    assert len(found["g1"]) + len(found["g2"]) == 12
    answer_all(core, clock)
    assert not any(pending.result().may_be_doubled for pending in pendings)


def answer_all(core: OutgoingCore[PendingSend], clock: ManualTime) -> None:
    """Have a broker that stores everything answer whatever is on its way."""
    for dispatch in core.dispatches.values():
        dispatch.disconnected()
    for _ in range(3):
        for dispatch in core.dispatches.values():
            while batches := dispatch.take(clock.now):
                dispatch.sent(0, batches)
                broker = ModelBroker()
                broker.handle(dispatch.request(batches, clock.now), ErrorCode.NONE)
                sent = broker.handle(dispatch.request(batches, clock.now), ErrorCode.NONE)
                dispatch.answered(0, sent, clock.now)
    core.take_finished()


@pytest.mark.parametrize("order_key", [None, "k"])
@pytest.mark.accepts("002-28")
def test_what_got_no_answer_goes_to_others_and_says_that_it_may_be_doubled(
    clock: ManualTime, order_key: str | None
) -> None:
    core = core_of(clock, targets_of(), max_batch=1)
    pending = core.add_message("s", Outgoing(b"x", order_key=order_key))
    (place,) = take(core, clock)
    dispatch = core.dispatches[place]
    # One lost connection proves nothing: it is tried there again first.
    core.add_message("s", Outgoing(b"other", order_key="other"))
    core.add_message("s", Outgoing(b"third", order_key="3"))
    dispatch.disconnected()
    core.unreachable(dispatch, clock.now, 0.0)
    assert pending.span[0].stream.dispatch is dispatch

    core.unreachable(dispatch, clock.now, Breaker.LONG)

    answer_all(core, clock)
    receipt = pending.result()
    assert receipt.broker_group != place
    assert receipt.may_be_doubled


def test_a_refused_batch_goes_elsewhere_at_once(clock: ManualTime) -> None:
    core = core_of(clock, targets_of(), max_batch=1)
    pendings = [core.add("s", b"%d" % number) for number in range(3)]
    for place in list(core.dispatches):
        dispatch = core.dispatches[place]
        batches = dispatch.take(clock.now)
        dispatch.sent(1, batches)
        code = ErrorCode.READ_ONLY if place == "g0" else ErrorCode.NONE
        answer = ModelBroker().handle(dispatch.request(batches, clock.now), code)
        dispatch.answered(1, answer, clock.now)
    assert core.dispatches["g0"].was_refused
    answer_all(core, clock)
    found = [pending.result() for pending in pendings]
    assert {each.broker_group for each in found} == {"g1", "g2"}
    assert not any(each.may_be_doubled for each in found)
    core.add("s", b"later")
    core.add("s", b"later still")
    assert "g0" not in take(core, clock)


def test_without_another_broker_a_batch_waits_for_its_own(clock: ManualTime) -> None:
    core = core_of(clock, targets_of(names=("g0",)), max_batch=1)
    pending = core.add("s", b"x")
    assert not core.unreachable(core.dispatches["g0"], clock.now, Breaker.LONG)
    answer_all(core, clock)
    assert pending.result().broker_group == "g0"


def test_messages_follow_a_route_that_changes(clock: ManualTime) -> None:
    table = RouteTable()
    core = core_of(clock, targets_of(names=("g0",), table=table), max_batch=1)
    core.add("s", b"0")
    assert set(take(core, clock)) == {"g0"}
    core.add_way("s", targets_of(table=table))
    for number in range(6):
        core.add("s", b"%d" % number)
    assert set(take(core, clock)) == set(GROUPS)
    core.add_way("s", targets_of({"g2"}, table=table))
    for number in range(6):
        core.add("s", b"%d" % number)
    assert set(take(core, clock)) == {"g2"}


def test_a_split_does_not_wait_for_what_went_to_another_broker(clock: ManualTime) -> None:
    table = RouteTable()
    core = core_of(clock, targets_of(names=("g0", "g1"), table=table), max_batch=1)
    for number in range(9):
        core.add_message("s", Outgoing(b"other", order_key=f"{number}"))
    assert set(take(core, clock)) == {"g0", "g1"}
    answer_all(core, clock)
    sent = core.add_message("s", Outgoing(b"0", order_key="x"))
    dispatch = sent.span[0].stream.dispatch
    take(core, clock)
    dispatch.disconnected()
    # The partitions have other order keys by now; "0" may be stored, or not.
    core.add_way("s", targets_of(names=GROUPS, table=table))
    core.add_message("s", Outgoing(b"1", order_key="x"))

    assert core.unreachable(dispatch, clock.now, Breaker.LONG)

    bodies = [body for some in take(core, clock).values() for body in some]
    assert sorted(bodies) == [b"0", b"1"]

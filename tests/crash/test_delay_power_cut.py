"""A delay server whose power fails, at every write: nothing promised is lost, nothing comes twice.

A scenario of sends, cancels, moves, deliveries, lost answers and checkpoints runs once over a
file system that remembers every operation. Then the power is cut after each of them; the brokers
have what they had stored by then. What is left is started again and runs until nothing waits:
what was confirmed and not cancelled must be at the brokers once, and what was cancelled never.
A second scenario fills segments of the message log, which are removed one after the other.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from pulque.errors import RequestTimeoutError
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.power import Linked
from pulque.wire.delay import Fate
from tests.crash.one_thread import run_in_one_thread
from tests.unit.delay.running import FakeBrokers, RunningDelay, eventually

CUTS = (Cut.LOST, Cut.KEPT, Cut.TORN, Cut.ZEROED, Cut.GARBAGE)
NOW_MS = 1_794_820_200_000
SECOND = 1000
HOUR = 3_600_000
SEGMENTS = 8
SECTIONS: dict[str, dict[str, Any]] = {
    "storage": {"segment_size": "64KiB"},
    "delivery": {"batch_messages": 4},
}


@dataclass
class History:
    """What was promised when, by the operations of the file system."""

    files: MemoryFileSystem = field(
        default_factory=lambda: MemoryFileSystem(random=Random("delay"))
    )
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    tried: dict[bytes, int] = field(default_factory=dict)
    """Bodies that were sent, by when that began."""
    confirmed: dict[bytes, int] = field(default_factory=dict)
    cancelling: dict[bytes, int] = field(default_factory=dict)
    """When a cancel began …"""
    cancelled: dict[bytes, int] = field(default_factory=dict)
    """… and when it was answered."""
    accepted: list[tuple[int, str, str, bytes]] = field(default_factory=list)
    """When a broker stored a batch, with its group, partition and bytes."""

    @property
    def now(self) -> int:
        return self.files.operations


class NotingBrokers(FakeBrokers):
    """Brokers that write down when they stored something."""

    def __init__(self, history: History) -> None:
        super().__init__(history.clock, ("group-a", "group-b"))
        self._history = history

    def store(self, group: str, partition: str, batch: bytes) -> None:
        self._history.accepted.append((self._history.now, group, partition, batch))
        super().store(group, partition, batch)


async def scenario() -> History:  # noqa: PLR0915  # one thing after the other
    history = History()
    brokers = NotingBrokers(history)
    running = RunningDelay(None, history.clock, brokers, history.files, SECTIONS)
    await running.start()
    ids: dict[bytes, tuple[bytes, int]] = {}

    async def send(*messages: tuple[bytes, int], partition: str = "orders") -> None:
        for body, _ in messages:
            history.tried[body] = history.now
        found = await running.send(messages, partition)
        for (body, due), message_id in zip(messages, found, strict=True):
            ids[body] = (message_id, due)
            history.confirmed[body] = history.now

    async def cancel(body: bytes) -> None:
        history.cancelling[body] = history.now
        assert await running.cancel(ids[body]) == [Fate.CANCELLED]
        history.cancelled[body] = history.now

    now = history.clock.now_ms()
    await send(*[(b"near %d" % i, now + SECOND + i) for i in range(6)])
    await send((b"far 0", now + 3 * HOUR), (b"far 1", now + 3 * HOUR + 1), (b"gone", now + 900))
    await send((b"other", now + SECOND), partition="refunds")
    await cancel(b"gone")
    await cancel(b"far 1")
    moved_id, moved_due = ids[b"far 0"]
    assert await running.move((moved_id, moved_due, now + 2 * SECOND)) == [Fate.MOVED]
    brokers.lost_answers = [RequestTimeoutError("no answer")]
    history.clock.advance(SECOND + 500)
    await eventually(lambda: len(brokers.accepted) == 7)
    await running.checkpointed()
    await send((b"late", history.clock.now_ms() + 100), (b"big" + b"x" * 70_000, now + 2 * SECOND))
    history.clock.advance(SECOND)
    await eventually(lambda: len(brokers.accepted) == 10)
    await running.checkpointed()
    history.clock.set_now_ms(now + 2 * HOUR)
    await running.checkpointed()
    await running.close()
    return history


async def removing() -> History:
    """Send three messages for each segment, and remove it.

    Checkpoints do not come at the ends of segments: what is removed was partly in the checkpoint
    before, and partly not.
    """
    history = History()
    running = RunningDelay(None, history.clock, NotingBrokers(history), history.files, SECTIONS)
    await running.start()
    for number in range(3 * SEGMENTS):
        body = b"%d " % number + b"x" * (18_000 + 500 * (number % 5))
        history.tried[body] = history.now
        await running.send([(body, NOW_MS + HOUR + number)])
        history.confirmed[body] = history.now
        if number % 4 == 3:
            await running.checkpointed()
    await running.close()
    changes = map(history.files.operation, range(history.now))
    links = [link for each in changes if isinstance(each, Linked) for link in each.links]
    assert sum(name.endswith(".log") and node is None for _, name, node in links) >= SEGMENTS - 3
    return history


async def cancelling() -> History:
    """Send two batches for one tick, and cancel a message of the second."""
    history = History()
    running = RunningDelay(None, history.clock, NotingBrokers(history), history.files, SECTIONS)
    await running.start()
    ids = []
    for body in (b"first", b"second"):
        history.tried[body] = history.now
        ids += await running.send([(body, NOW_MS + HOUR)])
        history.confirmed[body] = history.now
        await eventually(lambda: running.server.is_idle)
    history.cancelling[b"second"] = history.now
    assert await running.cancel((ids[1], NOW_MS + HOUR)) == [Fate.CANCELLED]
    history.cancelled[b"second"] = history.now
    await running.close()
    return history


async def tears_while_cancelling(seed: int, count: int) -> int:
    """Tear the last writes in so many ways, at each point between a cancel and its answer."""
    history = await cancelling()
    points = range(history.cancelling[b"second"], history.cancelled[b"second"])
    for at in points:
        for tear in range(count):
            await after_cut(history, at, Cut.TORN, f"{seed}/{at}/{tear}")
    return len(points)


async def after_cut(history: History, at: int, cut: Cut, seed: str) -> MemoryFileSystem:
    """Cut the power, let a server go on until nothing waits, and return its disk."""
    survivor = history.files.after_power_cut(at, cut, Random(seed))
    clock = ManualClock(NOW_MS + 9 * HOUR)
    brokers = FakeBrokers(clock, ("group-a", "group-b"))
    for when, group, partition, batch in history.accepted:
        if when <= at:
            brokers.store(group, partition, batch)
    running = RunningDelay(None, clock, brokers, survivor, SECTIONS)
    with capture_logs() as lines:
        await running.start()
    reports = [line["path"] for line in lines if line["event"] == "corruption_found"]
    assert not [path for path in reports if path.startswith("messages/")]
    confirmed = {body for body, when in history.confirmed.items() if when <= at}
    cancelled = {body for body, when in history.cancelled.items() if when <= at}
    doubtful = {body for body, when in history.cancelling.items() if when <= at} - cancelled
    wanted = confirmed - cancelled - doubtful
    await eventually(lambda: wanted <= set(brokers.bodies))
    await eventually(lambda: running.server.is_idle)
    await running.close()

    bodies = brokers.bodies
    assert sorted(bodies) == sorted(set(bodies)), "something came twice"
    assert wanted <= set(bodies), "something is lost"
    assert not cancelled & set(bodies), "something came that was cancelled"
    assert set(bodies) <= {body for body, when in history.tried.items() if when <= at}
    return survivor


async def cut_at(seed: int, share: int, run: Callable[[], Awaitable[History]] = scenario) -> int:
    """Cut the power after every so many operations; return how often that was."""
    history = await run()
    tried = 0
    for at in range(0, history.now + 1, share):
        cuts = CUTS if share == 1 else (CUTS[(at // share) % len(CUTS)],)
        for cut in cuts:
            try:
                await after_cut(history, at, cut, f"{seed}/{at}/{cut}")
            except BaseException as error:
                error.add_note(f"seed {seed}, {cut} after {at} of {history.now} operations:")
                error.add_note(str(history.files.operation(at - 1)) if at else "the beginning")
                raise
            tried += 1
    return tried


@pytest.mark.accepts("001-45", "001-47")
def test_a_power_cut_neither_loses_nor_doubles_at_some_points(seed: int) -> None:
    assert run_in_one_thread(cut_at(seed, 3)) > 30


@pytest.mark.slow
def test_a_power_cut_neither_loses_nor_doubles_at_every_point(seed: int) -> None:
    assert run_in_one_thread(cut_at(seed, 1)) > 400


def test_what_removed_segments_held_survives_at_some_points(seed: int) -> None:
    assert run_in_one_thread(cut_at(seed, 7, removing)) > 30


@pytest.mark.slow
def test_what_removed_segments_held_survives_at_every_point(seed: int) -> None:
    assert run_in_one_thread(cut_at(seed, 1, removing)) > 1000


def test_a_cancel_that_outlives_the_schedule_hides_no_other_message(seed: int) -> None:
    assert run_in_one_thread(tears_while_cancelling(seed, 150)) >= 4

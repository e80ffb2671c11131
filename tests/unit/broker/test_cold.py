"""Reads that wait for the disk never keep the others waiting."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulque import aio
from pulque.broker.pulling.cold_reads import ColdReads
from pulque.broker.requests import BrokerHandler
from pulque.errors import ErrorCode, OverloadedError, RequestTimeoutError
from pulque.model.names import Group
from pulque.net.server import AcceptedConnection
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.frame import Frame
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Pull,
    Route,
    Seal,
    Send,
    Wanted,
    encode_request,
)
from pulque.wire.responses import Pulled, Sealed, Sent
from tests.unit.broker.disks import ColdDirectory
from tests.unit.broker.running import Start, numbered

NO_CACHE = {"tail_cache": "0B"}


class Gated:
    """A read that lasts until it is let go."""

    def __init__(self, name: str, log: list[str], *, is_wanted: bool = True) -> None:
        self.name = name
        self.gate = threading.Event()
        self.done = asyncio.Event()
        self._log = log
        self._is_wanted = is_wanted

    def begin(self) -> bool:
        self._log.append(f"begin {self.name}" if self._is_wanted else f"skip {self.name}")
        return self._is_wanted

    def run(self) -> str:
        self.gate.wait(20)
        return self.name

    def finish(self, found: str) -> None:
        self._log.append(f"end {found}")
        self.done.set()


@pytest.mark.accepts("000-01")
async def test_a_group_has_one_read_at_a_time_and_groups_take_turns() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(4) as executor:
        cold = ColdReads[str](executor, most=2)
        reads = {name: Gated(name, log) for name in ("a1", "a2", "a3", "b1", "c1")}
        for name in ("a1", "a2", "a3", "b1", "c1"):
            cold.submit(Group(name[0]), reads[name])
        assert log == ["begin a1", "begin b1"]
        for name in ("a1", "c1", "b1", "a2", "a3"):
            reads[name].gate.set()
            await asyncio.wait_for(reads[name].done.wait(), 20)

    assert cold.waiting == 0
    assert [line for line in log if line.startswith("begin")] == [
        "begin a1",
        "begin b1",
        "begin c1",
        "begin a2",
        "begin a3",
    ]


async def test_a_read_that_nobody_wants_any_more_is_not_begun() -> None:
    log: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        cold = ColdReads[str](executor, most=1)
        first, dropped, last = Gated("1", log), Gated("2", log, is_wanted=False), Gated("3", log)
        for read in (first, dropped, last):
            cold.submit(Group("g"), read)
        first.gate.set()
        last.gate.set()
        await asyncio.wait_for(last.done.wait(), 20)

    assert log == ["begin 1", "end 1", "skip 2", "begin 3", "end 3"]


async def sealed_backlog(raw: RawConnection, segments: int) -> None:
    for at in range(segments):
        await raw.send("orders", numbered(4, 4 * at), acks=Acks.DISK)
        await raw.ask(Seal(), Sealed)


@pytest.mark.accepts("000-01")
async def test_cold_pulls_of_many_consumers_hand_out_everything_once(
    start: Start, tmp_path: Path
) -> None:
    running = await start(files=ColdDirectory(tmp_path / "data"), storage=NO_CACHE)
    raw = await running.connect()
    await sealed_backlog(raw, 6)
    wanted = (Wanted("orders", FROM_SETTLED),)
    pulls = {
        f"{group}{consumer}": Pull(group, f"c{consumer}", 1, 3, 100_000, 10_000, EARLIEST, wanted)
        for group in ("g", "h")
        for consumer in range(4)
    }
    asked = [(pull.group, await raw.put(pull)) for pull in pulls.values()]

    handed: dict[str, list[int]] = {"g": [], "h": []}
    for group, request_id in asked:
        answer = expect(await raw.answer_to(request_id), Pulled)
        for each in answer.deliveries:
            handed[group] += range(each.first_sequence, each.first_sequence + each.count)

    for sequences in handed.values():
        assert sequences
        assert sorted(sequences) == list(range(len(sequences)))


async def test_what_is_settled_meanwhile_does_not_have_it_read_again(
    start: Start, tmp_path: Path
) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw, other = await running.connect(), await running.connect()
    await sealed_backlog(raw, 3)
    (run,) = (await raw.pull("orders", max_messages=4)).runs
    files.gate.clear()
    wanted = (Wanted("orders", run.last_pull + 1),)
    before = files.log_reads
    pull = await raw.put(Pull("g", "c", 1, 4, 100_000, 20_000, EARLIEST, wanted))
    while not files.reads_waiting:  # noqa: ASYNC110  # a thread cannot set a loop's event
        await asyncio.sleep(0.001)

    await other.settle(run)
    files.gate.set()
    answer = expect(await raw.answer_to(pull), Pulled)

    (delivered,) = answer.deliveries
    assert (delivered.first_sequence, delivered.count) == (4, 4)
    assert files.log_reads - before == 1, "it was read twice"


@pytest.mark.accepts("000-01")
async def test_a_hot_pull_is_served_while_others_wait_for_the_disk(
    start: Start, tmp_path: Path
) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage={"tail_cache": "4KiB"})
    raw, other = await running.connect(), await running.connect()
    await sealed_backlog(raw, 3)
    await raw.send("filler", [b"x" * 8192])
    files.gate.clear()
    wanted = (Wanted("orders", FROM_SETTLED),)
    cold = [
        await raw.put(Pull(group, f"c{n}", 1, 3, 100_000, 20_000, EARLIEST, wanted))
        for group in ("g", "h", "i", "j", "k")
        for n in range(3)
    ]

    for number in range(10):
        await other.send("news", numbered(1, number))
        (run,) = (await other.pull("news", group="hot", expected=number)).runs
        assert run.bodies == numbered(1, number)
        await other.settle(run, group="hot")

    files.gate.set()
    for request_id in cold:
        expect(await raw.answer_to(request_id), Pulled)


# -- deadlines ----------------------------------------------------------------------------------


async def test_a_send_whose_time_is_up_is_not_worked_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    raw = await running.connect()
    batch = pack_batch("orders", numbered(1))
    monkeypatch.setattr(AcceptedConnection, "waited_ms", 1001)

    with pytest.raises(RequestTimeoutError, match="limit of 1000 ms waited 1001 ms"):
        await raw.ask(Send(Acks.DISK, 1000, (("orders", batch),)), Sent)
    assert (await raw.status())["partitions"] == []
    for limit_ms in (0, 1001):
        sent = await raw.ask(Send(Acks.DISK, limit_ms, (("orders", batch),)), Sent)
        assert sent.outcomes[0].code is ErrorCode.NONE


async def test_requests_that_wait_behind_unread_answers_know_how_long(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    raw = await running.connect()
    waits: list[int] = []
    handle = BrokerHandler.handle

    def watched(self: BrokerHandler, connection: AcceptedConnection, frame: Frame) -> None:
        waits.append(connection.waited_ms)
        clock.advance(1)
        handle(self, connection, frame)

    monkeypatch.setattr(BrokerHandler, "handle", watched)
    asked = [b"".join(encode_request(Route("orders"), 100 + n, 0)) for n in range(2000)]
    await raw.put_bytes(b"".join(asked))
    for number in range(2000):
        await raw.answer_to(100 + number)

    assert waits[0] == 0
    assert max(waits) > 0


async def test_a_pull_is_not_read_for_after_its_time(start: Start, tmp_path: Path) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw = await running.connect()
    await sealed_backlog(raw, 2)
    files.gate.clear()
    wanted = (Wanted("orders", FROM_SETTLED),)
    first = await raw.put(Pull("g", "c1", 1, 3, 100_000, 0, EARLIEST, wanted))
    late = await raw.put(Pull("g", "c2", 1, 3, 100_000, 0, EARLIEST, wanted))
    await asyncio.sleep(1.2)  # the patience with a pull that has no time at all
    files.gate.set()

    assert expect(await raw.answer_to(first), Pulled).deliveries
    assert expect(await raw.answer_to(late), Pulled).deliveries == ()


async def test_more_than_can_wait_for_the_disk_is_refused_for_now(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulque.broker.pulling.puller._MOST_COLD", 2)
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw = await running.connect()
    await sealed_backlog(raw, 1)
    files.gate.clear()
    wanted = (Wanted("orders", FROM_SETTLED),)
    asked = [
        await raw.put(Pull("g", f"c{n}", 1, 3, 100_000, 20_000, EARLIEST, wanted))
        for n in range(4)
    ]

    refused = await raw.answer_to(asked[3])
    assert isinstance(refused, OverloadedError)
    assert refused.retryable
    files.gate.set()
    assert isinstance(await raw.answer_to(asked[0]), Pulled)


@pytest.mark.accepts("003-33", "004-04", "004-82", "004-85")
async def test_messages_that_a_filter_leaves_out_are_not_read(
    start: Start, tmp_path: Path
) -> None:
    files = ColdDirectory(tmp_path / "data")
    running = await start(files=files, storage=NO_CACHE)
    raw = await running.connect()
    async with aio.connect(running.broker.url, state_dir=tmp_path / "state") as client:
        for number in range(200):
            tags = ["red"] if number in {120, 190} else ["grey"]
            await client.send("orders", b"%d" % number, tags=tags)
            if number % 50 == 49:
                await raw.ask(Seal(), Sealed)
        before = files.log_reads
        found: list[bytes] = []
        async with client.consumer("orders", "g", tags=["red"]) as consumer:
            while len(found) < 2:
                messages = await consumer.pull(timeout=10)
                found += [message.body for message in messages]
                consumer.ack_all(messages)

    assert found == [b"120", b"190"]
    # Which ones match is in the index: the log is asked for those alone.
    assert files.log_reads - before == 2

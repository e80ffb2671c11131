"""A producer with a spool: what it took in is stored once and in order, whoever dies meanwhile."""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import pulque
from pulque import aio
from pulque.errors import DataDirectoryError, SpoolFullError
from pulque.testing.process import BrokerProcess
from tests.integration.spool_worker import KEYS

pytestmark = pytest.mark.server

WITHIN = 60.0
STRICT = ["--set", "consumption.strict=strict.*"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess.start(tmp_path / "data", arguments=STRICT) as process:
        yield process


def stored(
    broker: BrokerProcess, subject: str, tmp_path: Path, *, wanted: set[int]
) -> list[tuple[str, int]]:
    """Return the key and number of all messages of a subject, in the order they are stored in."""
    found: list[tuple[str, int]] = []
    with (
        pulque.connect(broker.url, timeout=WITHIN, state_dir=tmp_path / "state") as client,
        client.consumer(subject, group="check", mode="broadcast") as consumer,
    ):
        deadline = time.monotonic() + WITHIN
        messages = list(consumer.pull(timeout=1.0))
        while messages or (wanted - {number for _, number in found}):
            assert time.monotonic() < deadline, f"{len(found)} of {len(wanted)} came"
            for message in messages:
                found.append((message.order_key or "", int(message.body)))
                message.ack()
            messages = list(consumer.pull(timeout=1.0))
    return found


class Worker:
    """A sender in a process of its own, and what it said."""

    def __init__(self, url: str, spool: Path, subject: str, first: int, *, kind: str) -> None:
        self.taken: set[int] = set()
        self.unsure: set[int] = set()
        self.has_ended = False
        command = [sys.executable, "-m", "tests.integration.spool_worker"]
        self._process = subprocess.Popen(
            [*command, url, str(spool), subject, str(first), "400", kind],
            stdout=subprocess.PIPE,
        )

    def read(self, lines: int) -> None:
        """Take in what it says, up to so many lines."""
        assert self._process.stdout is not None
        for _ in range(lines):
            line = self._process.stdout.readline().decode().strip()
            if line.startswith("-"):
                self.unsure.add(int(line[1:]))
            elif line.startswith("+"):
                self.unsure.discard(int(line[1:]))
                self.taken.add(int(line[1:]))
            elif line == "end":
                self.has_ended = True
            if not line:
                return

    def kill(self) -> None:
        self._process.kill()
        self.read(10_000)
        self._process.wait(WITHIN)
        self._close()

    def finish(self) -> None:
        self.read(10_000)
        assert self._process.wait(WITHIN) == 0
        self._close()
        assert self.has_ended

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.parametrize(
    ("kind", "is_broker_killed"), [("blocking", False), ("blocking", True), ("aio", True)]
)
def test_killed_producers_leave_order_behind(
    broker: BrokerProcess, tmp_path: Path, seed: int, kind: str, *, is_broker_killed: bool
) -> None:
    random = Random(seed)
    subject, spool = "strict.orders", tmp_path / "spool"
    taken: set[int] = set()
    unsure: set[int] = set()
    first = 0
    for round_ in range(4):
        worker = Worker(broker.url, spool, subject, first, kind=kind)
        if round_ == 3:
            worker.finish()
        else:
            worker.read(random.randrange(20, 600))
            if is_broker_killed and round_ % 2:
                broker.kill()
                worker.read(random.randrange(100))
                worker.kill()
                broker.restart()
            else:
                worker.kill()
        taken |= worker.taken
        unsure |= worker.unsure
        first = max(taken | unsure, default=-1) + 1

    found = stored(broker, subject, tmp_path, wanted=taken)
    numbers = [number for _, number in found]
    assert len(numbers) == len(set(numbers)), "stored twice"
    assert taken <= set(numbers) <= taken | unsure
    by_key = defaultdict(list)
    for key, number in found:
        by_key[key].append(number)
    assert len(by_key) == KEYS
    assert all(each == sorted(each) for each in by_key.values())


def test_what_is_left_is_sent_first(broker: BrokerProcess, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with pulque.connect(broker.url, timeout=WITHIN, state_dir=tmp_path / "state") as client:
        producer = client.producer(spool=spool)
        producer.send("strict.orders", b"0", order_key="a", tags=["new"]).result(WITHIN)
        broker.kill()
        waiting = [
            producer.send("strict.orders", str(number).encode(), order_key="a", key="k")
            for number in range(1, 4)
        ]
        producer.close(timeout=0.1)
        assert all(isinstance(each.exception(), pulque.PulqueError) for each in waiting)
    broker.restart()
    with (
        pulque.connect(broker.url, timeout=WITHIN, state_dir=tmp_path / "state") as client,
        client.producer(spool=spool) as producer,
    ):
        producer.send("strict.orders", b"4", order_key="a")
        receipts = producer.left_over.result(WITHIN)
        assert [each.may_be_doubled for each in receipts] == [False] * len(receipts)
    found = stored(broker, "strict.orders", tmp_path, wanted=set(range(5)))
    assert [number for _, number in found] == [0, 1, 2, 3, 4]


def test_one_producer_to_a_spool(broker: BrokerProcess, tmp_path: Path) -> None:
    with pulque.connect(broker.url, state_dir=tmp_path / "state") as client:
        with (
            client.producer(spool=tmp_path / "spool"),
            pytest.raises(DataDirectoryError, match="another producer"),
        ):
            client.producer(spool=tmp_path / "spool")
        client.producer(spool=tmp_path / "spool").close()


def test_full_spool(broker: BrokerProcess, tmp_path: Path) -> None:
    with pulque.connect(broker.url, timeout=0.3, state_dir=tmp_path / "state") as client:
        producer = client.producer(spool=tmp_path / "spool", spool_limit=10_000)
        producer.send("strict.orders", b"0", order_key="a").result(WITHIN)
        broker.kill()
        for _ in range(10):
            producer.send("strict.orders", b"x" * 1000, order_key="a")
        with pytest.raises(SpoolFullError, match="spool_limit is 10000"):
            producer.send("strict.orders", b"x" * 1000, order_key="a")
        producer.close(timeout=0.1)
    broker.restart()


async def test_aio_recovers_before_it_sends(broker: BrokerProcess, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    async with aio.connect(broker.url, timeout=WITHIN) as client:
        producer = client.producer(spool=spool)
        await (await producer.send("strict.orders", b"0", order_key="a")).result(WITHIN)
        broker.kill()
        waiting = await producer.send_many(
            "strict.orders",
            [pulque.Outgoing(str(each).encode(), order_key="a") for each in range(1, 6)],
        )
        await producer.close(timeout=0.1)
        assert waiting.done()
    broker.restart()
    async with (
        aio.connect(broker.url, timeout=WITHIN) as client,
        client.producer(spool=spool) as producer,
    ):
        _ = await producer.send("strict.orders", b"6", order_key="a")
        await producer.flush(WITHIN)
    found = stored(broker, "strict.orders", tmp_path, wanted=set(range(7)))
    assert [number for _, number in found] == list(range(7))

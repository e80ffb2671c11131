"""Consumers as processes of their own: busy, stopped, killed, doubled, and back again."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pulque
from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import flags, wait_until

pytestmark = pytest.mark.server

StartBroker = Callable[..., BrokerProcess]
StartConsumer = Callable[..., "ConsumerProcess"]

SHORT_LEASE = {"consumption.lease": "1s", "consumption.lease_check": "100ms"}
PATIENCE = 30.0

_CONSUME = """
import sys, pulque
client = pulque.connect(sys.argv[1], name="shop", timeout=60)
consumer = client.consumer(
    "orders", group="kitchen", consumer_id=sys.argv[2] or None, prefetch=False
)
try:
    for message in consumer:
        print(message.body.decode(), message.attempt, flush=True)
        word = sys.stdin.readline().strip()
        if word == "end":
            break
        if message.is_abandoned:
            print("abandoned", flush=True)
        message.ack() if word == "ack" else message.nack(word)
    consumer.close()
    print("ended", flush=True)
except pulque.PulqueError as error:
    print(type(error).__name__, flush=True)
"""


class ConsumerProcess:
    """A consumer that tells each message, and does with it what it is told."""

    def __init__(self, url: str, consumer_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CONSUME, url, consumer_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def hear(self) -> str:
        return self._lines.get(timeout=PATIENCE)

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            # What it was not told any more.
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def start_consumer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StartConsumer]:
    """Start consumers of one application on this host; all of them end with the test."""
    monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path / "state"))
    started: list[ConsumerProcess] = []

    def start(broker: BrokerProcess, consumer_id: str = "") -> ConsumerProcess:
        started.append(ConsumerProcess(broker.url, consumer_id))
        return started[-1]

    yield start
    for process in started:
        process.close()


def positions(state: Path) -> list[int]:
    """Return the positions in ``orders`` that consumers have written down."""
    found = []
    for path in state.glob("consumers/*.settled"):
        told = json.loads(path.read_bytes().splitlines()[1])
        found += [
            each["position"] for name, each in told["partitions"].items() if name == "orders"
        ]
    return found


@pytest.mark.accepts("000-36")
def test_a_consumer_that_is_only_busy_keeps_what_it_holds(
    start_broker: StartBroker, start_consumer: StartConsumer
) -> None:
    broker = start_broker(arguments=flags(SHORT_LEASE))
    with pulque.connect(broker.url) as client:
        client.send("orders", b"tea")
        busy = start_consumer(broker)
        assert busy.hear() == "tea 1"
        # Another one that holds something and is stopped shows that leases do run out.
        client.send("orders", b"coffee")
        stopped = start_consumer(broker)
        assert stopped.hear() == "coffee 1"
        stopped.signal(signal.SIGSTOP)
        wait_until(lambda: client.status()["deliveries_lost"] > 0, within=PATIENCE, what="a loss")

        assert client.status()["deliveries_lost"] == 1
        busy.tell("ack")
        assert busy.hear() == "coffee 2"
        busy.tell("ack")
        busy.tell("end")


@pytest.mark.accepts("000-37", "003-47")
def test_one_that_was_stopped_beyond_its_lease_finds_its_message_with_others(
    start_broker: StartBroker, start_consumer: StartConsumer
) -> None:
    broker = start_broker(arguments=flags(SHORT_LEASE))
    with pulque.connect(broker.url) as client:
        client.send("orders", b"tea")
        stopped = start_consumer(broker)
        assert stopped.hear() == "tea 1"
        stopped.signal(signal.SIGSTOP)
        other = start_consumer(broker)
        assert other.hear() == "tea 2"
        other.tell("ack")
        wait_until(
            lambda: client.status()["deliveries_settled"] == 1, within=PATIENCE, what="an ack"
        )

        # It has handled the message, too: whatever it says, only the ack that counted decides.
        stopped.signal(signal.SIGCONT)
        stopped.tell("ack")
        other.kill()
        client.send("orders", b"coffee")
        heard = stopped.hear()
        assert (stopped.hear() if heard == "abandoned" else heard) == "coffee 1"
        stopped.tell("ack")
        # Its acks go in order: one that counted for the tea would be there before this one.
        wait_until(
            lambda: client.status()["deliveries_settled"] >= 2, within=PATIENCE, what="an ack"
        )
        assert client.status()["deliveries_settled"] == 2


@pytest.mark.accepts("003-47")
def test_what_was_handled_and_not_acked_comes_again(
    start_broker: StartBroker, start_consumer: StartConsumer
) -> None:
    broker = start_broker(arguments=flags(SHORT_LEASE))
    with pulque.connect(broker.url) as client:
        client.send("orders", b"tea")
        first = start_consumer(broker)
        assert first.hear() == "tea 1"
        # Until another one that is stopped is missed, it tells the broker what there is to tell.
        client.send("orders", b"coffee")
        stopped = start_consumer(broker)
        assert stopped.hear() == "coffee 1"
        stopped.signal(signal.SIGSTOP)
        wait_until(lambda: client.status()["deliveries_lost"] == 1, within=PATIENCE, what="a loss")
        assert client.status()["deliveries_settled"] == 0
        first.kill()

        again = start_consumer(broker)
        heard = set()
        for _ in range(2):
            heard.add(again.hear().split()[0])
            again.tell("ack")
        assert heard == {"tea", "coffee"}


def test_one_that_comes_back_gets_what_it_held_at_once(
    start_broker: StartBroker, start_consumer: StartConsumer
) -> None:
    broker = start_broker()
    with pulque.connect(broker.url) as client:
        client.send("orders", b"tea")
    first = start_consumer(broker)
    assert first.hear() == "tea 1"
    first.kill()

    again = start_consumer(broker)

    # The same id, so it is the same attempt.
    assert again.hear() == "tea 1"


@pytest.mark.accepts("003-61")
def test_of_two_processes_with_one_id_the_later_one_goes_on(
    start_broker: StartBroker, start_consumer: StartConsumer
) -> None:
    broker = start_broker()
    with pulque.connect(broker.url) as client:
        client.send("orders", b"tea")
        early = start_consumer(broker, "the-one")
        assert early.hear() == "tea 1"
        late = start_consumer(broker, "the-one")
        assert late.hear() == "tea 1"

        early.tell("ack")
        assert early.hear() == "FencedError"
        late.tell("ack")
        wait_until(
            lambda: client.status()["deliveries_settled"] == 1, within=PATIENCE, what="an ack"
        )


@pytest.mark.accepts("000-21", "000-35", "003-60")
def test_acks_for_a_broker_that_is_away_survive_the_kill_of_the_consumer(
    start_broker: StartBroker, start_consumer: StartConsumer, tmp_path: Path
) -> None:
    broker = start_broker()
    with pulque.connect(broker.url) as client:
        client.send_many("orders", [b"1", b"2", b"3"])
        first = start_consumer(broker)
        assert first.hear() == "1 1"
        broker.kill()
        first.tell("ack")
        assert first.hear() == "2 1"
        first.tell("ack")
        assert first.hear() == "3 1"
        wait_until(
            lambda: positions(tmp_path / "state") == [2], within=PATIENCE, what="the position"
        )
        first.kill()
        broker.restart()

        again = start_consumer(broker)

        assert again.hear() == "3 1"
        wait_until(
            lambda: client.status()["deliveries_settled"] == 2, within=PATIENCE, what="the acks"
        )


@pytest.mark.accepts("000-33", "000-34")
def test_a_nack_for_a_broker_that_is_away_survives_the_kill_of_the_consumer(
    start_broker: StartBroker, start_consumer: StartConsumer, tmp_path: Path
) -> None:
    broker = start_broker()
    with pulque.connect(broker.url) as client:
        client.send_many("orders", [b"1", b"2", b"3"])
        first = start_consumer(broker)
        assert first.hear() == "1 1"
        broker.kill()
        first.tell("no milk")
        assert first.hear() == "2 1"
        first.tell("ack")
        assert first.hear() == "3 1"
        # The ack of 2 goes beyond the nack of 1 as soon as that is on the disk.
        wait_until(
            lambda: positions(tmp_path / "state") == [2], within=PATIENCE, what="the position"
        )
        (spool,) = (tmp_path / "state").glob("consumers/*.nacks")
        assert b"no milk" in spool.read_bytes()
        first.kill()
        broker.restart()

        again = start_consumer(broker)

        assert again.hear() == "3 1"
        wait_until(
            lambda: client.status()["deliveries_nacked"] == 1, within=PATIENCE, what="the nack"
        )
        wait_until(lambda: not spool.stat().st_size, within=PATIENCE, what="the spool is empty")

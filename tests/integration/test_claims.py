"""What the design says about who does what, seen from outside, on real processes."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import pulque
from pulque.errors import ErrorCode
from pulque.model.actions import ConsumerLost, Pulled, Settled
from pulque.model.batch import HEADER, Codec, read_header, seal, seed_of
from pulque.model.positions import ActionOffset
from pulque.storage.events import SilentListener
from pulque.storage.files import OsFileSystem
from pulque.storage.logs.action_log import ActionLog
from pulque.storage.options import StorageOptions
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import Acks, Send, Status
from pulque.wire.responses import Sent, StatusReport
from tests.robustness.raw import RawClient, make_batch

pytestmark = pytest.mark.server
Start = Callable[..., BrokerProcess]
SLOW_SYNC = {"PULQUE_BROKER__STORAGE__SYNC_INTERVAL": "60s"}


def log_of(broker: BrokerProcess) -> bytes:
    return b"".join(p.read_bytes() for p in sorted((broker.data / "messages").glob("*.log")))


@pytest.mark.accepts("000-14", "000-16")
def test_success_is_reported_after_the_append_and_before_any_sync(start_broker: Start) -> None:
    broker = start_broker(environ=SLOW_SYNC)
    with pulque.connect(broker.url, acks="memory") as client:
        client.send("orders", b"seventeen")

        log = client.status()["message_log"]
        assert log["synced"] < log["end"]
        assert b"seventeen" in log_of(broker)


@pytest.mark.accepts("000-49")
def test_a_batch_is_stored_as_the_bytes_that_were_sent_and_never_opened(
    broker_process: BrokerProcess,
) -> None:
    plain = make_batch("orders", [b"a body", b"another"])
    header = read_header(plain)
    # Records that nobody could decompress: a broker that opened them would have to refuse.
    rest = HEADER.pack(*header._replace(codec=Codec.LZ4))[4:] + plain[HEADER.size :]
    sealed = seal(rest, seed_of("orders"))
    with RawClient(broker_process.url) as raw:
        for batch in (plain, sealed):
            answer = raw.expect(Sent, Send(Acks.DISK, 10_000, (("orders", batch),)))
            assert [outcome.code for outcome in answer.outcomes] == [ErrorCode.NONE]

    stored = log_of(broker_process)
    assert plain in stored
    assert sealed in stored


@pytest.mark.accepts("000-50", "000-05")
def test_a_consumer_that_asks_for_nothing_is_sent_nothing(broker_process: BrokerProcess) -> None:
    with pulque.connect(broker_process.url) as client, RawClient(broker_process.url) as idle:
        with client.consumer("orders", group="g") as consumer:
            client.send("orders", b"1")
            (message,) = consumer.pull(timeout=10)
            message.ack()

        # The first thing that it hears is the answer to what it asks now.
        idle.put(Status())
        assert isinstance(idle.get(), StatusReport)


def test_acks_go_to_the_broker_that_the_message_came_from(start_broker: Start) -> None:
    brokers = [start_broker("one"), start_broker("two")]
    with pulque.connect(brokers[0].url) as first, pulque.connect(brokers[1].url) as second:
        for client in (first, second):
            client.send("orders", b"body")
        with first.consumer("orders", group="g", consumer_id="c") as consumer:
            (message,) = consumer.pull(timeout=10)
            message.ack()

        assert first.status()["deliveries_settled"] == 1
        assert second.status()["deliveries_settled"] == 0


@pytest.mark.accepts("003-04", "003-05", "003-18", "003-20")
def test_two_logs_are_kept_and_the_other_two_are_made_from_them(start_broker: Start) -> None:
    broker = start_broker()
    with pulque.connect(broker.url) as client:
        for number in range(6):
            client.send("orders", b"%d" % number)
        with client.consumer("orders", group="g", consumer_id="c") as consumer:
            for message in consumer.pull(4, timeout=10):
                message.ack()
            consumer.pull(1, timeout=10)  # held, and handed back when the consumer leaves
    broker.stop()
    for path in broker.data.rglob("*"):
        if path.suffix in (".index", ".open", ".checkpoint"):
            path.unlink()

    broker.restart()
    with (
        pulque.connect(broker.url) as client,
        client.consumer("orders", group="g", consumer_id="d") as consumer,
    ):
        left: dict[bytes, int] = {}
        while len(left) < 2:
            for message in consumer.pull(timeout=10):
                left[message.body] = message.attempt
                message.ack()
    broker.stop()

    assert left == {b"4": 1, b"5": 1}  # to be handed back is no attempt
    files = OsFileSystem(str(broker.data))
    log = ActionLog.open(files, StorageOptions(), SilentListener(), 0)
    kinds = [type(fact) for fact in log.replay(ActionOffset(0))]
    assert {Pulled, Settled, ConsumerLost} <= set(kinds)


@pytest.mark.accepts("003-28")
def test_many_pulls_at_once_never_hand_a_message_to_two(broker_process: BrokerProcess) -> None:
    count, consumers = 2000, 8
    taken: list[list[bytes]] = [[] for _ in range(consumers)]
    with pulque.connect(broker_process.url) as client, client.producer() as producer:
        for number in range(count):
            producer.send("orders", b"%d" % number)
        producer.flush()

    def take(mine: list[bytes], name: str) -> None:
        with (
            pulque.connect(broker_process.url) as client,
            client.consumer("orders", group="g", consumer_id=name) as consumer,
        ):
            while sum(map(len, taken)) < count:
                for message in consumer.pull(7, timeout=0.5):
                    mine.append(message.body)
                    message.ack()

    threads = [threading.Thread(target=take, args=(mine, f"c{i}")) for i, mine in enumerate(taken)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    everything = [body for mine in taken for body in mine]
    assert sorted(everything, key=int) == [b"%d" % number for number in range(count)]


_NAME_MYSELF = """
import sys, pulque
with pulque.connect(sys.argv[1], name="shop") as client:
    with client.consumer("orders", group="g") as consumer:
        print(consumer.consumer_id, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.accepts("003-60", "003-61")
def test_consumer_ids_are_stable_over_restarts_and_differ_between_processes(
    broker_process: BrokerProcess,
) -> None:
    def run() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", _NAME_MYSELF, broker_process.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def name_of(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with run() as one, run() as two:
        names = {name_of(one), name_of(two)}
        for process in (one, two):
            process.communicate("\n", timeout=20)
    with run() as again:
        after = name_of(again)
        again.communicate("\n", timeout=20)

    assert len(names) == 2
    assert after in names


@pytest.mark.accepts("004-08", "003-37")
def test_a_waiting_pull_is_answered_by_the_message_and_not_by_the_clock(
    broker_process: BrokerProcess,
) -> None:
    with (
        pulque.connect(broker_process.url) as client,
        pulque.connect(broker_process.url) as other,
        client.consumer("orders", group="g") as consumer,
    ):
        answers: list[list[bytes]] = []
        waiting = threading.Thread(
            target=lambda: answers.append([m.body for m in consumer.pull(timeout=30)])
        )
        waiting.start()
        while not other.status()["pulls_waiting"]:
            pass
        other.send("orders", b"at last")
        waiting.join(10)  # a third of what the pull would wait by itself

        assert answers == [[b"at last"]]

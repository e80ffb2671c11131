"""``kill -9`` and pauses: nothing that was confirmed is lost, nothing is invented or doubled.

``PULQUE_KILLS`` sets how often the broker is killed under load (4 by default, hundreds for a
soak), ``PULQUE_TEST_SEED`` repeats a run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pulque.errors import StaleSettleError
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import Settle
from tests.robustness.brokers import flags, wait_until
from tests.robustness.load import Load
from tests.robustness.raw import RawClient, bodies_of

pytestmark = [pytest.mark.server, pytest.mark.slow]

StartBroker = Callable[..., BrokerProcess]

KILLS = int(os.environ.get("PULQUE_KILLS", "4"))
SMALL = {
    "storage.segment_size": "256KiB",
    "storage.action_segment_size": "64KiB",
    "storage.checkpoint_records": 200,
    "storage.checkpoint_interval": "1s",
}
SHORT_LEASE = {"consumption.lease": "1s", "consumption.lease_check": "100ms"}


def started(broker: BrokerProcess) -> dict[str, object]:
    """Return the last line about a start in the broker's log."""
    lines = [json.loads(line) for line in broker.stderr.splitlines() if line.startswith("{")]
    found: dict[str, object] = [line for line in lines if line["event"] == "broker_started"][-1]
    return found


# -- the broker is killed ----------------------------------------------------------------------


@pytest.mark.accepts("004-05", "004-06", "004-46")
@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.parametrize(
    ("settings", "acks"),
    [({}, ("disk", "disk")), (SMALL, ("disk", "memory"))],
    ids=["usual", "small segments"],
)
def test_nothing_confirmed_is_lost_when_the_broker_is_killed_again_and_again(
    start_broker: StartBroker,
    tmp_path: Path,
    seed: int,
    settings: dict[str, str],
    acks: tuple[str, str],
) -> None:
    draw = random.Random(seed)
    broker = start_broker(arguments=flags(settings))
    with Load(broker.url, tmp_path / "load") as load:
        for each in acks:
            load.add_producers(2, "--acks", each)
        load.add_consumers(3)
        outages = []
        for _ in range(KILLS):
            load.go_on()
            time.sleep(draw.uniform(0, 0.3))
            broker.kill()
            down_at = time.monotonic()
            broker.restart()
            outages.append(time.monotonic() - down_at)
        load.go_on()
        total, problems = load.verdict()
    print(f"{KILLS} kills, outages {[round(each, 2) for each in outages]}; {total.summary()}")

    assert problems == []
    assert not total.refused
    assert "Traceback" not in broker.stderr


@pytest.mark.accepts("000-47", "003-20")
def test_a_broker_that_is_killed_while_it_recovers_recovers_the_next_time(
    start_broker: StartBroker, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    # Nothing is checkpointed, so all of it has to be replayed.
    settings = SMALL | {
        "storage.checkpoint_records": 1_000_000,
        "storage.checkpoint_interval": "1d",
    }
    broker = start_broker(arguments=flags(settings))
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(2)
        load.add_consumers(1)
        load.go_on(1000)
        broker.kill()
        for _ in range(KILLS):
            _start_and_kill(broker, settings, after=draw.uniform(0.2, 1.2))
        broker.restart()
        load.go_on()
        total, problems = load.verdict()
    print(total.summary())

    assert problems == []


def _start_and_kill(broker: BrokerProcess, settings: dict[str, object], after: float) -> None:
    port = broker.url.rpartition(":")[2]
    command = [
        sys.executable,
        "-m",
        "pulque",
        "broker",
        "--data",
        str(broker.data),
        "--port",
        port,
    ]
    process = subprocess.Popen(
        [*command, *flags(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(after)
    finally:
        process.kill()
        process.wait()


def test_a_send_repeated_after_a_kill_is_stored_once(start_broker: StartBroker) -> None:
    broker = start_broker()
    with RawClient(broker.url) as client:
        first = client.send("a", [b"once"], producer=7, sequence=0)
    broker.kill()
    broker.restart()
    with RawClient(broker.url) as client:
        again = client.send("a", [b"once"], producer=7, sequence=0)
        after = client.send("a", [b"next"], producer=7, sequence=1)

        assert (first.is_duplicate, again.is_duplicate, after.is_duplicate) == (False, True, False)
        assert (again.first_sequence, again.stored_at_ms) == (0, first.stored_at_ms)
        assert [message.body for message in client.stored("a")] == [b"once", b"next"]


def test_positions_survive_a_kill_and_consumption_goes_on(start_broker: StartBroker) -> None:
    broker = start_broker()
    with RawClient(broker.url) as client:
        client.send("a", [b"0", b"1", b"2"])
        client.settle("a", client.pull("a", max_messages=1).deliveries[0])
        held = client.pull("a", max_messages=1).deliveries[0]
    broker.kill()
    broker.restart()
    with RawClient(broker.url) as client:
        client.send("a", [b"3"])
        pulled = client.pull("a")

        assert [bodies_of("a", each) for each in pulled.deliveries] == [[b"1"], [b"2", b"3"]]
        assert (pulled.deliveries[0].first_pull, pulled.deliveries[0].tenure) == (1, held.tenure)
        for each in pulled.deliveries:
            client.settle("a", each)
        assert not client.pull("a").deliveries


# -- the broker is paused, or stopped ----------------------------------------------------------


def test_a_broker_that_stands_still_for_two_seconds_loses_nothing(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(2)
        load.add_consumers(2)
        load.go_on()
        broker.send_signal(signal.SIGSTOP)
        time.sleep(2)
        broker.send_signal(signal.SIGCONT)
        load.go_on()
        _, problems = load.verdict()

    assert problems == []
    assert "consumer_lost" not in broker.stderr


def test_a_clean_stop_under_load_ends_with_0_and_leaves_nothing_to_replay(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(2)
        load.add_consumers(1)
        load.go_on()

        assert broker.stop() == 0
        broker.restart()
        assert (started(broker)["replayed_batches"], started(broker)["replayed_facts"]) == (0, 0)
        load.go_on()
        total, problems = load.verdict()

    assert problems == []
    assert not total.unknown
    assert "Traceback" not in broker.stderr


# -- consumers are killed, or paused -----------------------------------------------------------


@pytest.mark.accepts("003-46", "004-60")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_a_lost_consumer_held_comes_to_the_others(
    start_broker: StartBroker, tmp_path: Path, number: signal.Signals
) -> None:
    broker = start_broker(arguments=flags(SHORT_LEASE))
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(1)
        # It takes long for each message, so that it holds some whenever it is hit.
        load.start_consumer("slow", "--work", "0.2", "--nack", "0")
        wait_until(lambda: load.count("handle", "slow") > 0, within=30, what="it handles")
        if number == signal.SIGKILL:
            load.kill_consumer("slow")
        else:
            load.signal_consumer("slow", number)
        load.add_consumers(2)
        wait_until(lambda: "consumer_lost" in broker.stderr, within=10, what="the loss is seen")
        load.stop_producers()
        load.drain()
        if number == signal.SIGSTOP:
            load.signal_consumer("slow", signal.SIGCONT)
        total, problems = load.verdict()
    print(total.summary())

    assert problems == []


def test_a_late_settle_of_a_lost_consumer_is_refused(start_broker: StartBroker) -> None:
    broker = start_broker(arguments=flags(SHORT_LEASE))
    with RawClient(broker.url) as late, RawClient(broker.url) as other:
        other.send("a", [b"0", b"1"])
        held = late.pull("a", consumer="late").deliveries[0]
        deadline = time.monotonic() + 10
        retried = other.pull("a", consumer="other", timeout_ms=2000, with_retries=True).deliveries
        # Each waits a little longer or shorter, so they may come one after the other.
        while sum(each.count for each in retried) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            retried = other.pull(
                "a", consumer="other", timeout_ms=2000, with_retries=True
            ).deliveries
        answer = late.ask(Settle("a", "g", "late", 1, held.tenure, 0, 1))

        bodies = [body for each in retried for body in bodies_of("a", each)]
        assert sorted(bodies) == [b"0", b"1"]
        assert isinstance(answer, StaleSettleError)
        assert "given to others" in str(answer)


def test_a_consumer_that_is_killed_and_comes_back_gets_what_it_held(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(2)
        load.add_consumers(2)
        for _ in range(3):
            load.go_on()
            load.kill_consumer("c0")
            load.start_consumer("c0")
        total, problems = load.verdict()
    print(total.summary())

    assert problems == []
    assert "consumer_lost" not in broker.stderr

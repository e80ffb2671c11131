"""All faults of processes, drawn one after the other, under one load; then everything is judged.

``PULQUE_SOAK`` sets for how many seconds (15 by default; hours for a soak), ``PULQUE_TEST_SEED``
repeats the draw.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import StartBroker
from tests.robustness.load import Load

pytestmark = [pytest.mark.server, pytest.mark.slow]

SECONDS = float(os.environ.get("PULQUE_SOAK", "15"))
CONSUMERS = ("c0", "c1", "c2")


class Chaos:
    """What may happen to the processes."""

    def __init__(self, broker: BrokerProcess, load: Load, draw: random.Random) -> None:
        self._broker = broker
        self._load = load
        self._draw = draw

    def kill_broker(self) -> None:
        self._broker.kill()
        self._broker.restart()

    def kill_broker_twice(self) -> None:
        self.kill_broker()
        self.kill_broker()

    def stop_broker(self) -> None:
        assert self._broker.stop() == 0
        self._broker.restart()

    def pause_broker(self) -> None:
        self._broker.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.1, 1.5))
        self._broker.send_signal(signal.SIGCONT)

    def kill_consumer(self) -> None:
        name = self._draw.choice(CONSUMERS)
        self._load.kill_consumer(name)
        self._load.start_consumer(name)

    def pause_consumer(self) -> None:
        name = self._draw.choice(CONSUMERS)
        self._load.signal_consumer(name, signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.1, 2.5))
        self._load.signal_consumer(name, signal.SIGCONT)

    def nothing(self) -> None:
        pass


FAULTS = (
    Chaos.kill_broker,
    Chaos.kill_broker_twice,
    Chaos.stop_broker,
    Chaos.pause_broker,
    Chaos.kill_consumer,
    Chaos.pause_consumer,
    Chaos.nothing,
)


@pytest.mark.timeout(180 + 2 * SECONDS)
def test_nothing_is_lost_or_doubled_whatever_happens_to_the_processes(
    start_broker: StartBroker, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    broker = start_broker(
        storage__segment_size="256KiB",
        storage__action_segment_size="64KiB",
        storage__checkpoint_records=300,
        storage__checkpoint_interval="1s",
        consumption__lease="1s",
        consumption__lease_check="100ms",
    )
    happened = []
    with Load(broker.url, tmp_path / "load") as load:
        load.add_producers(3)
        for name in CONSUMERS:
            load.start_consumer(name)
        chaos = Chaos(broker, load, draw)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            load.go_on(200)
            time.sleep(draw.uniform(0, 0.3))
            fault = draw.choice(FAULTS)
            happened.append(fault.__name__)
            fault(chaos)
        total, problems = load.verdict()
    print(f"{happened}; {total.summary()}")

    assert problems == []
    assert not total.refused
    assert "Traceback" not in broker.stderr
    assert "corruption_found" not in broker.stderr

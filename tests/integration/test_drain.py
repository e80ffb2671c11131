"""Consumers, the broker and the network fail in turn; then everything is drained and compared.

For each group: confirmed = handled + dead, and nothing waits. ``PULQUE_FAULTS`` sets how many
faults there are (6 by default), ``PULQUE_TEST_SEED`` repeats a run.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pulque
from pulque.errors import PulqueError
from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import flags, wait_until
from tests.robustness.handling import SUBJECT, is_poison
from tests.robustness.proxy import Proxy

pytestmark = [pytest.mark.server, pytest.mark.slow]

FAULTS = int(os.environ.get("PULQUE_FAULTS", "6"))
GROUPS = {"crew": 3, "audit": 1}
"""How many consumers each has."""
LEASE_S = 1.5
SETTINGS = {
    "consumption.lease": f"{LEASE_S}s",
    "consumption.lease_check": "200ms",
    "retry.delays": "100ms 300ms",
    "retry.attempts": 4,
    "storage.checkpoint_interval": "1s",
    "storage.segment_size": "256KiB",
}
_BURST = 50


class Crew:
    """The consumers of all groups, each a process with a file of what it handled."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        for group, count in GROUPS.items():
            for number in range(count):
                self.start(group, number)

    def start(self, group: str, number: int) -> None:
        command = [sys.executable, "-m", "tests.robustness.handling", self._url, group]
        path = self._folder / f"{group}-{number}.handled"
        self._processes[group, number] = subprocess.Popen(
            [*command, f"{group}-{number}", str(path)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PULQUE_STATE_DIR": str(self._folder / "state")},
        )

    def handled(self, group: str) -> set[int]:
        return {
            int(line)
            for path in self._folder.glob(f"{group}-*.handled")
            for line in path.read_text().splitlines()
        }

    def kill_one(self, draw: random.Random) -> None:
        group, number = draw.choice(list(self._processes))
        process = self._processes[group, number]
        process.kill()
        process.wait()
        self.start(group, number)

    def stop_one(self, draw: random.Random) -> None:
        """Stop one for longer than its lease: others get what it holds, and it comes back."""
        process = draw.choice(list(self._processes.values()))
        process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Producer:
    """Sends numbers until told to stop, and knows which were confirmed."""

    def __init__(self, url: str) -> None:
        self.sent = 0
        self.confirmed: set[int] = set()
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pulque.connect(self._url, timeout=60) as client:
            while not self._stop.wait(0.02):
                numbers = range(self.sent, self.sent + _BURST)
                self.sent += _BURST
                try:
                    client.send_many(SUBJECT, [b"%d" % number for number in numbers])
                except PulqueError as error:
                    print("not confirmed:", numbers, error)
                else:
                    self.confirmed.update(numbers)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()


@contextmanager
def at_work(broker: BrokerProcess, folder: Path) -> Iterator[tuple[Proxy, Crew, Producer]]:
    with Proxy(int(broker.url.rpartition(":")[2])) as proxy:
        crew, producer = Crew(proxy.url, folder), Producer(broker.url)
        try:
            yield proxy, crew, producer
        finally:
            producer.end()
            crew.end()


def fail_somehow(
    draw: random.Random, broker: BrokerProcess, proxy: Proxy, crew: Crew, seen: list[str]
) -> None:
    def restart() -> None:
        broker.kill()
        broker.restart()

    def stall() -> None:
        proxy.stall()
        time.sleep(LEASE_S + 1)
        proxy.flow()

    faults: dict[str, Callable[[], None]] = {
        "kill a consumer": lambda: crew.kill_one(draw),
        "stop a consumer": lambda: crew.stop_one(draw),
        "kill the broker": restart,
        "cut the network": proxy.cut,
        "stall the network": stall,
    }
    # Each kind comes before one comes again.
    name = draw.choice([each for each in faults if seen.count(each) == len(seen) // len(faults)])
    seen.append(name)
    print("fault:", name)
    faults[name]()


def dead_letters(client: pulque.Client, group: str) -> dict[int, pulque.Message]:
    partition = f"%dead%{SUBJECT}%{group}"
    found = client.read(SUBJECT, partition=partition, max_messages=10_000)
    return {int(message.body): message for message in found}


@pytest.mark.timeout(180 + 10 * FAULTS)
@pytest.mark.accepts("000-38", "000-42", "000-43", "003-46", "004-60", "004-61")
def test_what_was_confirmed_is_handled_or_dead_whatever_failed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with (
        BrokerProcess.start(tmp_path / "data", arguments=flags(SETTINGS)) as broker,
        at_work(broker, tmp_path) as (proxy, crew, producer),
    ):
        seen: list[str] = []
        for _ in range(FAULTS):
            time.sleep(draw.uniform(0.5, 1.5))
            fail_somehow(draw, broker, proxy, crew, seen)
        producer.end()
        confirmed = producer.confirmed
        good = {number for number in confirmed if not is_poison(number)}
        poison = confirmed - good
        for group in GROUPS:
            wait_until(
                lambda group=group: good <= crew.handled(group),  # type: ignore[misc]
                within=90,
                what=f"{group} handled all that was confirmed",
            )
        with pulque.connect(broker.url, timeout=30) as client:
            for group in GROUPS:
                wait_until(
                    lambda group=group: poison <= dead_letters(client, group).keys(),  # type: ignore[misc]
                    within=60,
                    what=f"{group} gave up on what cannot be handled",
                )
            wait_until(lambda: is_empty(client), within=60, what="nothing waits")
            for group in GROUPS:
                check_group(group, crew.handled(group), dead_letters(client, group), producer)


def is_empty(client: pulque.Client) -> bool:
    return bool(client.status()["messages_left"] == 0)


def check_group(
    group: str, handled: set[int], dead: dict[int, pulque.Message], producer: Producer
) -> None:
    sent = set(range(producer.sent))
    # What a consumer lost over and over may be dead although it could have been handled.
    unlucky = {number for number in dead if not is_poison(number)}
    print(f"{group}: {len(handled)} handled, {len(dead)} dead, {len(unlucky)} of bad luck")
    assert producer.confirmed <= handled | dead.keys()
    assert handled | dead.keys() <= sent
    assert not any(is_poison(number) for number in handled)
    for message in dead.values():
        reasons = [name for name in message.headers if name.startswith("pulque.failed.")]
        assert message.attempt == 4
        assert len(reasons) == 4

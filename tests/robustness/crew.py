"""Producers and consumers of a whole cluster, and what they say became of each message.

Confirmed = handled + dead: the crew's files and the dead letters of all brokers are compared with
what the producer was promised.
"""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pulque
from pulque.errors import PulqueError, UsageError
from pulque.testing.cluster import ClusterProcesses
from tests.robustness.brokers import wait_until
from tests.robustness.handling import SUBJECT, is_poison

__all__ = [
    "BURST",
    "LEASE_S",
    "QUICK_BROKER",
    "QUICK_META",
    "Crew",
    "Producer",
    "at_work",
    "dead_letters",
    "settle",
]

BURST = 20
LEASE_S = 2.0
QUICK_META = {"cluster": {"heartbeat": "500ms"}}
QUICK_BROKER: dict[str, dict[str, object]] = {
    "consumption": {"lease": f"{LEASE_S}s", "lease_check": "200ms"},
    "retry": {"delays": "100ms 300ms", "attempts": 4},
    "storage": {"checkpoint_interval": "1s"},
}
_CONSUMERS = 2


class Crew:
    """Consumers of one group, each a process with a file of what it handled."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._processes = {number: self._start(number) for number in range(_CONSUMERS)}

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.robustness.handling", self._url, "crew"]
        path = self._folder / f"crew-{number}.handled"
        return subprocess.Popen(
            [*command, f"crew-{number}", str(path)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PULQUE_STATE_DIR": str(self._folder / "state")},
        )

    def handled(self) -> set[int]:
        paths = self._folder.glob("crew-*.handled")
        return {int(line) for path in paths for line in path.read_text().splitlines()}

    def kill_one(self, draw: random.Random) -> None:
        number = draw.choice(list(self._processes))
        self._processes[number].kill()
        self._processes[number].wait()
        self._processes[number] = self._start(number)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Producer:
    """Sends numbers until told to stop, and knows which were confirmed."""

    def __init__(self, url: str) -> None:
        self.sent = 0
        self.confirmed: set[int] = set()
        self.refused: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pulque.connect(self._url, timeout=60) as client:
            while not self._stop.wait(0.05):
                numbers = range(self.sent, self.sent + BURST)
                self.sent += BURST
                try:
                    client.send_many(SUBJECT, [b"%d" % number for number in numbers])
                except PulqueError as error:
                    self.refused.append(f"{numbers}: {error!r}")
                else:
                    self.confirmed.update(numbers)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()


@contextmanager
def at_work(cluster: ClusterProcesses, folder: Path) -> Iterator[tuple[Crew, Producer]]:
    with pulque.connect(cluster.url, timeout=60) as client:
        client.send(SUBJECT, b"0")
    crew, producer = Crew(cluster.url, folder), Producer(cluster.url)
    try:
        yield crew, producer
    finally:
        producer.end()
        crew.end()


def dead_letters(cluster: ClusterProcesses) -> dict[int, pulque.Message]:
    """Return the dead letters of all brokers that run."""
    found: dict[int, pulque.Message] = {}

    def is_read(name: str, url: str) -> bool:
        partition = f"%dead%{SUBJECT}%crew"
        with pulque.connect(url, timeout=30) as client:
            if partition not in {each["name"] for each in client.status()["partitions"]}:
                return True
            try:
                letters = list(
                    client.read(SUBJECT, partition=partition, broker=name, max_messages=10_000)
                )
            except UsageError:
                return False  # it was started just now, and no meta server has heard of it
            found.update({int(each.body): each for each in letters})
            return True

    for name, broker in cluster.brokers.items():
        if broker.is_running:
            wait_until(partial(is_read, name, broker.url), within=30, what=f"{name} is known")
    return found


def settle(
    cluster: ClusterProcesses,
    crew: Crew,
    producer: Producer,
    buried: Collection[int] = frozenset(),
) -> None:
    """Stop sending, and wait until all that was confirmed is handled or dead; then compare.

    Args:
        cluster: Where the dead letters are.
        crew: Who handled.
        producer: Who was promised something.
        buried: Dead letters of brokers that are gone for good.
    """
    producer.end()
    print("not confirmed:", producer.refused)

    def dead() -> set[int]:
        return {*dead_letters(cluster), *buried}

    good = {number for number in producer.confirmed if not is_poison(number)}
    wait_until(
        lambda: good <= crew.handled() or good <= crew.handled() | dead(),
        within=120,
        what="all that was confirmed is handled",
    )
    poison = producer.confirmed - good
    wait_until(lambda: poison <= dead(), within=60, what="what cannot be handled is dead")
    handled = crew.handled()
    assert handled | dead() <= set(range(producer.sent))
    assert not any(is_poison(number) for number in handled)

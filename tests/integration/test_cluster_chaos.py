"""Servers and consumers of a cluster are killed in turn under load; then all is compared.

Confirmed = handled + dead, for a group that pulls from all brokers. ``PULQUE_FAULTS`` sets how
many faults there are (5 by default), ``PULQUE_TEST_SEED`` repeats a run.
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
from pulque.testing.cluster import ClusterProcesses
from tests.robustness.brokers import wait_until
from tests.robustness.handling import SUBJECT, is_poison

pytestmark = [pytest.mark.server, pytest.mark.slow]

FAULTS = int(os.environ.get("PULQUE_FAULTS", "5"))
AWAY_S = 60.0
CONSUMERS = 2
LEASE_S = 2.0
META = {"cluster": {"heartbeat": "500ms"}}
BROKER: dict[str, dict[str, object]] = {
    "consumption": {"lease": f"{LEASE_S}s", "lease_check": "200ms"},
    "retry": {"delays": "100ms 300ms", "attempts": 4},
    "storage": {"checkpoint_interval": "1s"},
}
_BURST = 20


class Crew:
    """Consumers of one group, each a process with a file of what it handled."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._processes = {number: self._start(number) for number in range(CONSUMERS)}

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
                numbers = range(self.sent, self.sent + _BURST)
                self.sent += _BURST
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


def fail_somehow(
    draw: random.Random, cluster: ClusterProcesses, crew: Crew, seen: list[str]
) -> None:
    def kill(names: list[str], pause_s: float) -> None:
        for name in names:
            cluster[name].kill()
        time.sleep(pause_s)
        for name in names:
            cluster[name].restart()

    def stop_cleanly() -> None:
        broker = cluster[draw.choice(list(cluster.brokers))]
        assert broker.stop() == 0
        time.sleep(1)
        broker.restart()

    def pause() -> None:
        broker = cluster[draw.choice(list(cluster.brokers))]
        broker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        broker.send_signal(signal.SIGCONT)

    faults: dict[str, Callable[[], None]] = {
        "kill a broker": lambda: kill([draw.choice(list(cluster.brokers))], 1.0),
        "kill all meta servers": lambda: kill(list(cluster.metas), 2.0),
        "stop a broker": stop_cleanly,
        "pause a broker": pause,
        "kill a consumer": lambda: crew.kill_one(draw),
    }
    # Each kind comes before one comes again.
    name = draw.choice([each for each in faults if seen.count(each) == len(seen) // len(faults)])
    seen.append(name)
    print("fault:", name)
    faults[name]()


def dead_letters(cluster: ClusterProcesses) -> dict[int, pulque.Message]:
    """Return the dead letters of all brokers."""
    found: dict[int, pulque.Message] = {}
    partition = f"%dead%{SUBJECT}%crew"
    for broker in cluster.brokers.values():
        with pulque.connect(broker.url, timeout=30) as client:
            names = {each["name"] for each in client.status()["partitions"]}
            if partition in names:
                letters = client.read(SUBJECT, partition=partition, max_messages=10_000)
                found |= {int(each.body): each for each in letters}
    return found


@pytest.mark.timeout(240 + 20 * FAULTS)
@pytest.mark.accepts("004-15", "004-19")
def test_what_was_confirmed_is_handled_or_dead_whatever_was_killed(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    with (
        ClusterProcesses.start(
            tmp_path, brokers=2, metas=2, meta_settings=META, broker_settings=BROKER
        ) as cluster,
        at_work(cluster, tmp_path) as (crew, producer),
    ):
        seen: list[str] = []
        for _ in range(FAULTS):
            time.sleep(draw.uniform(0.5, 1.5))
            fail_somehow(draw, cluster, crew, seen)
        producer.end()
        print("not confirmed:", producer.refused)
        good = {number for number in producer.confirmed if not is_poison(number)}
        wait_until(
            lambda: good <= crew.handled() | dead_letters(cluster).keys(),
            within=120,
            what="all that was confirmed is handled",
        )
        poison = producer.confirmed - good
        wait_until(
            lambda: poison <= dead_letters(cluster).keys(),
            within=60,
            what="what cannot be handled is dead",
        )
        handled, dead = crew.handled(), dead_letters(cluster)

    assert handled | dead.keys() <= set(range(producer.sent))
    assert not any(is_poison(number) for number in handled)
    assert len(producer.confirmed) > _BURST * FAULTS


def away(cluster: ClusterProcesses, folder: Path, seconds: float) -> None:
    """Kill all meta servers for a while; sends and pulls go on as if nothing were."""
    with at_work(cluster, folder) as (crew, producer):
        wait_until(lambda: bool(crew.handled()), within=60, what="the group is at work")
        for meta in cluster.metas.values():
            meta.kill()
        before = len(producer.confirmed)
        time.sleep(seconds)
        during = len(producer.confirmed)
        producer.end()
        good = {number for number in producer.confirmed if not is_poison(number)}
        wait_until(lambda: good <= crew.handled(), within=60, what="all is handled")
    assert producer.refused == []
    assert during > before


@pytest.mark.accepts("004-19")
def test_without_any_meta_server_sending_and_consuming_go_on(tmp_path: Path) -> None:
    with ClusterProcesses.start(
        tmp_path, brokers=2, meta_settings=META, broker_settings=BROKER
    ) as cluster:
        away(cluster, tmp_path, 5.0)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_any_meta_server_for_a_minute(tmp_path: Path) -> None:
    with ClusterProcesses.start(
        tmp_path, brokers=3, metas=2, meta_settings=META, broker_settings=BROKER
    ) as cluster:
        away(cluster, tmp_path, AWAY_S)

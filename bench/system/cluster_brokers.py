"""What several brokers cost beside one, and how fast traffic follows brokers that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil

import pulque
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section
from bench.peers import work_directory
from pulque.errors import PulqueError
from pulque.testing.cluster import ClusterProcesses

__all__ = ["SteadySends", "measure"]

_BODY = b"x" * 100
_BATCH = 1000
_WARM_BATCHES = 100
_META = {"subjects": {"spread": 3}}
_MOST_S = 60.0
_PAUSE_S = 0.01


def measure(options: Options) -> Section:
    """Compare one broker with three; then add one and kill one under load."""
    messages = 100_000 if options.is_quick else 1_000_000
    section = Section("cluster", f"brokers of a cluster, {messages:,} messages of 100 B")
    with work_directory() as directory:
        alone_s, several_s = _compare(directory, options, messages)
        section.aims.append(
            Aim(
                "three brokers beside one: CPU per message",
                several_s / alone_s,
                1.15,
                is_least=False,
                unit="×",
                detail=f"{several_s:.2f} and {alone_s:.2f} CPU-seconds per million",
            )
        )
        section.aims += _come_and_go(directory / "moving")
    return section


def _compare(directory: Path, options: Options, messages: int) -> tuple[float, float]:
    """Return the CPU-seconds per million messages with one broker and with three, in turns."""
    used: dict[int, list[float]] = {1: [], 3: []}
    with ExitStack() as stack:
        clusters = {}
        for brokers in used:
            started = ClusterProcesses.start(
                directory / str(brokers), brokers=brokers, meta_settings=_META
            )
            clusters[brokers] = stack.enter_context(started)
            # Every process has its first costs, however little it does after them.
            _cpu_per_million(clusters[brokers], brokers * _WARM_BATCHES * _BATCH)
        for _ in range(options.repeats):
            for brokers, cluster in clusters.items():
                used[brokers].append(_cpu_per_million(cluster, messages))
    for brokers, rounds in used.items():
        tell(f"  {brokers} brokers: {', '.join(f'{each:.2f}' for each in rounds)} CPU-seconds")
    return median(used[1]), median(used[3])


def _cpu_per_million(cluster: ClusterProcesses, messages: int) -> float:
    """Send and consume; return the CPU-seconds of all brokers per million messages."""
    pids = [each.pid for each in cluster.brokers.values()]
    with pulque.connect(cluster.url, timeout=60) as client:
        before_s = _cpu_s(pids)
        for _ in range(messages // _BATCH):
            client.send_many("load", [_BODY] * _BATCH)
        _consume(client, messages)
        used_s = _cpu_s(pids) - before_s
    shares = [each["messages_sent"] for each in _statuses(cluster)]
    if not all(shares):
        raise BenchFailedError(f"a broker got nothing: {shares}")
    return used_s / messages * 1_000_000


def _consume(client: pulque.Client, count: int) -> None:
    with client.consumer("load", group="bench") as consumer:
        left = count
        deadline_s = time.monotonic() + _MOST_S + count / 10_000
        while left > 0:
            batch = consumer.pull(max_messages=_BATCH, timeout=1.0)
            if not batch and time.monotonic() > deadline_s:
                raise BenchFailedError(f"{left} messages did not come")
            consumer.ack_all(batch)
            left -= len(batch)


def _come_and_go(folder: Path) -> list[Aim]:
    """Add a broker under load, then kill one; return how long each took to be felt."""
    with ClusterProcesses.start(folder, brokers=2) as cluster:
        load = SteadySends(cluster.url)
        try:
            load.wait_for(100)
            made = cluster.make_broker("broker-3")
            made.restart()
            joined_s = _until_used(cluster, "broker-3")
            load.longest_s = 0.0
            cluster["broker-1"].kill()
            load.wait_for(100)
            time.sleep(2.0)
        finally:
            load.end()
    if load.failed:
        raise BenchFailedError(f"{len(load.failed)} sends failed: {load.failed[0]}")
    return [
        Aim("a new broker takes messages", joined_s, 5.0, is_least=False, unit="s"),
        Aim(
            "a broker is killed: longest wait for a send, none fails",
            load.longest_s,
            5.0,
            is_least=False,
            unit="s",
            detail=f"{load.sent:,} sends in all",
        ),
    ]


class SteadySends:
    """Sends one message after the other, each to the next of many subjects, in a thread."""

    def __init__(self, url: str) -> None:
        self.sent = 0
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pulque.connect(self._url, timeout=60) as client:
            while not self._stop.wait(_PAUSE_S):
                began_s = time.monotonic()
                try:
                    client.send(f"moving.{self.sent}", _BODY)
                except PulqueError as error:
                    self.failed.append(repr(error))
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                self.sent += 1

    def wait_for(self, count: int) -> None:
        """Wait until so many more were sent."""
        wanted, deadline_s = self.sent + count, time.monotonic() + _MOST_S
        while self.sent < wanted:
            if time.monotonic() > deadline_s:
                raise BenchFailedError(f"{self.sent} messages were sent, not {wanted}")
            time.sleep(_PAUSE_S)

    def end(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()


def _until_used(cluster: ClusterProcesses, name: str) -> float:
    """Return how long it took until a broker that serves was sent something."""
    began_s = time.monotonic()
    with pulque.connect(cluster[name].url, timeout=30) as client:
        while not client.status()["messages_sent"]:
            if time.monotonic() - began_s > _MOST_S:
                raise BenchFailedError(f"{name} got nothing within {_MOST_S:g} s")
            time.sleep(_PAUSE_S)
    return time.monotonic() - began_s


def _statuses(cluster: ClusterProcesses) -> Iterable[dict[str, object]]:
    for broker in cluster.brokers.values():
        with pulque.connect(broker.url, timeout=30) as client:
            yield client.status()


def _cpu_s(pids: Iterable[int]) -> float:
    times = (psutil.Process(pid).cpu_times() for pid in pids)
    return sum(each.user + each.system for each in times)

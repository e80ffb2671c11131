"""What followers cost, and for how long a group takes nothing when its leader is killed."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pulque
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.system.cluster_brokers import SteadySends
from pulque.testing.cluster import ClusterProcesses

__all__ = ["measure"]

_BODY = b"x" * 100
_BATCH = 1000
_SINGLES = 500
_COPIES = (1, 2, 3)
_FAILOVER_S = 10.0
_LIMIT_S = 60.0


def measure(options: Options) -> Section:
    """Send to a broker alone, to one with a follower, and with two; then kill a leader."""
    batches = 100 if options.is_quick else 1000
    section = Section(
        "replication", f"brokers with followers, {batches * _BATCH:,} messages of 100 B, synced"
    )
    with work_directory() as directory:
        rates: dict[int, float] = {}
        rows = []
        for copies in _COPIES:
            with _cluster(directory / str(copies), copies) as cluster:
                rates[copies] = median(_rate(cluster, batches) for _ in range(options.repeats))
                p50_us = _single_us(cluster)
            tell(
                f"  {copies} copies: {rates[copies]:,.0f} messages/s, "
                f"one at a time {p50_us:.0f} µs"
            )
            rows.append([str(copies), f"{rates[copies]:,.0f}", f"{p50_us:,.0f}"])
        title = "Confirmed by all copies, on disk"
        columns = ("copies", "messages/s in batches", "one at a time, p50 µs")
        section.tables.append(Table(title, columns, rows))
        section.figures["messages_per_s"] = {str(each): rate for each, rate in rates.items()}
        section.aims.append(_fail_over(directory / "failover"))
    return section


def _cluster(folder: Path, copies: int) -> ClusterProcesses:
    cluster = ClusterProcesses.start(folder, brokers=copies, copies=copies)
    deadline_s = time.monotonic() + _LIMIT_S
    with pulque.connect(cluster["meta-1"].url) as client:
        while copies > 1 and len(client.status()["leaderships"][0]["in_sync"]) < copies:
            if time.monotonic() > deadline_s:
                cluster.close()
                raise BenchFailedError(f"{copies} brokers do not get in sync")
            time.sleep(0.1)
    return cluster


def _rate(cluster: ClusterProcesses, batches: int) -> float:
    """Return how many messages a second are confirmed, several batches under way."""
    with (
        pulque.connect(cluster.url, timeout=_LIMIT_S) as client,
        client.producer() as producer,
    ):
        began_s = time.monotonic()
        for _ in range(batches):
            producer.send_many("load", [_BODY] * _BATCH)
        producer.flush()
        return batches * _BATCH / (time.monotonic() - began_s)


def _single_us(cluster: ClusterProcesses) -> float:
    """Return how long one message takes that waits for the one before, in microseconds."""
    took_s = []
    with pulque.connect(cluster.url, timeout=_LIMIT_S) as client:
        for _ in range(_SINGLES):
            began_s = time.monotonic()
            client.send("single", _BODY)
            took_s.append(time.monotonic() - began_s)
    return median(took_s) * 1e6


def _fail_over(folder: Path) -> Aim:
    """Kill the leader of three under load; return how long a send waited at most."""
    with _cluster(folder, 3) as cluster:
        load = SteadySends(cluster.url)
        try:
            load.wait_for(100)
            with pulque.connect(cluster["meta-1"].url) as client:
                leader = client.status()["leaderships"][0]["leader"]
            load.longest_s = 0.0
            cluster[leader].kill()
            load.wait_for(100)
        finally:
            load.end()
    if load.failed:
        raise BenchFailedError(f"{len(load.failed)} sends failed: {load.failed[0]}")
    return Aim(
        "the leader of three is killed: longest wait for a send, none fails",
        load.longest_s,
        _FAILOVER_S,
        is_least=False,
        unit="s",
        detail="the lease is 5 s",
    )

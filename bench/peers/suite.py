"""Measure a peer: send alone, consume alone, both at the same time, and one at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.measure import Run, WorkerFailedError, median_run, percentile, run
from bench.peers.peer import Clients, Peer, Unavailable

__all__ = ["Figures", "Plan", "measure_peer", "measure_peers", "work_directory"]

_WORK = Path(__file__).parents[2] / ".bench"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        size: Bytes of a body.
        batch: Messages handed over together, where the client has such a thing.
        repeats: Runs of each kind; their median counts.
        run_s: How long one run should take, by the peer's expected rate.
        latencies: Sends one at a time.
    """

    size: int = 100
    batch: int = 1000
    repeats: int = 3
    run_s: float = 3.0
    latencies: int = 3000

    @classmethod
    def quick(cls, size: int = 100) -> Plan:
        """One short run of each kind: shows that it works, not how fast."""
        return cls(size=size, repeats=1, run_s=1.0, latencies=500)

    def count(self, rate_hint: int) -> int:
        """Messages of a run: full batches."""
        return max(1, round(rate_hint * self.run_s / self.batch)) * self.batch


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one peer; rates are messages per second.

    Attributes:
        name: The peer.
        version: Of its server and client.
        size: Bytes of a body.
        count: Messages of each run.
        produce_rate: One process sends, each message confirmed.
        consume_rate: One process takes them from a full stream and acks.
        e2e_rate: Both at the same time, from the first send to the last ack.
        sync_p50_us: One send at a time, until it is confirmed.
        sync_p99_us: The same, in the slowest of a hundred.
        server_us: CPU of the server per message, end to end.
        client_us: CPU of both clients per message, end to end.
        server_rss_mib: Memory of the server after an end-to-end run.
        foreign_cores: The most CPU others used during a run that counts: how far to trust it.
    """

    name: str
    version: str
    size: int
    count: int
    produce_rate: float
    consume_rate: float
    e2e_rate: float
    sync_p50_us: float
    sync_p99_us: float
    server_us: float
    client_us: float
    server_rss_mib: float
    foreign_cores: float


def measure_peers(peers: Iterable[Peer], plan: Plan) -> Iterator[Figures | Unavailable]:
    """Measure one after another; a peer that fails is reported, never left out."""
    for peer in peers:
        try:
            yield measure_peer(peer, plan)
        except Exception as failure:  # noqa: BLE001 - each client library has errors of its own
            last_line = (str(failure).strip().splitlines() or [""])[-1]
            yield Unavailable(peer.name, f"{type(failure).__name__}: {last_line}")


def measure_peer(peer: Peer, plan: Plan) -> Figures | Unavailable:
    """Install the peer if need be, start it, measure it, stop it."""
    reason = peer.available()
    if reason is not None:
        return Unavailable(peer.name, reason)
    with work_directory() as directory:
        try:
            return _measure(peer, peer.start(directory), plan)
        finally:
            peer.stop()


@contextmanager
def work_directory() -> Iterator[Path]:
    """A new directory on the repository's disk (a temporary one may be memory), then removed."""
    _WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_WORK, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _measure(peer: Peer, clients: Clients, plan: Plan) -> Figures:
    count = plan.count(peer.rate_hint)
    produce = partial(clients.produce, count=count, size=plan.size, batch=plan.batch)
    consume = partial(clients.consume, count=count)
    alone: list[Run] = []
    taken: list[Run] = []
    together: list[Run] = []
    for _ in range(plan.repeats):
        clients.prepare()
        alone.append(run(produce, watch=peer.pids()))
        taken.append(_whole(run(consume, watch=peer.pids()), count * plan.size))
        clients.prepare()
        together.append(_whole(run(produce, consume, watch=peer.pids()), count * plan.size))
    clients.prepare()
    times_us = _latencies(clients, plan)
    sent, got, both = median_run(alone), median_run(taken), median_run(together)
    return Figures(
        name=peer.name,
        version=peer.version(),
        size=plan.size,
        count=count,
        produce_rate=count / sent.wall_s,
        consume_rate=count / got.wall_s,
        e2e_rate=count / both.wall_s,
        sync_p50_us=percentile(times_us, 50),
        sync_p99_us=percentile(times_us, 99),
        server_us=1e6 * both.watched_cpu_s / count,
        client_us=1e6 * both.client_cpu_s / count,
        server_rss_mib=both.watched_rss_bytes / 2**20,
        foreign_cores=max(one.foreign_cores for one in (sent, got, both)),
    )


def _latencies(clients: Clients, plan: Plan) -> list[float]:
    done = run(partial(clients.sync_latency, count=plan.latencies, size=plan.size))
    times_us: list[float] = done.workers[0].result
    # The first sends warm up connections and code on both sides.
    return times_us[len(times_us) // 10 :]


def _whole(done: Run, expected_bytes: int) -> Run:
    """The run, if its consumer (the last worker) saw every byte of every body."""
    if done.workers[-1].result != expected_bytes:
        raise WorkerFailedError(
            f"the consumer saw {done.workers[-1].result} bytes of {expected_bytes}"
        )
    return done

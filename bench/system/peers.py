"""100 B messages, one producer and one consumer, beside other queues in the same run."""

from __future__ import annotations

from dataclasses import asdict

from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import Figures, Peer, Plan, Unavailable, all_peers, measure_peers
from bench.system.pulque_peer import PulquePeer

__all__ = ["measure"]

_MEMORY = PulquePeer("memory", 600_000)
_DISK = PulquePeer("disk", 400_000)
_ONE_BY_ONE = PulquePeer("memory", 350_000, one_by_one=True)
_TIMES = {
    "Redis Streams": 8.0,
    "NATS JetStream": 25.0,
    "RabbitMQ (quorum)": 25.0,
    "RabbitMQ (classic)": 25.0,
    "Kafka": 1.5,
}
_DISK_PERCENT = 60
_HEAD = (
    "",
    "end to end /s",
    "produce /s",
    "consume /s",
    "one at a time p50 / p99 µs",
    "CPU per message, server + clients µs",
    "server MiB",
    "other load, cores",
    "versions",
)


def measure(options: Options) -> Section:
    """Measure Pulque with both kinds of acks, then every peer."""
    plan = Plan.quick() if options.is_quick else Plan()
    section = Section(
        "peers",
        f"{plan.size} B messages, batches of {plan.batch}, one producer and one consumer process, "
        "Python objects at both ends",
    )
    peers: list[Peer] = [_MEMORY, _DISK, _ONE_BY_ONE, *all_peers().values()]
    found: dict[str, Figures | Unavailable] = {}
    for result in measure_peers(peers, plan):
        found[result.name] = result
        tell(f"  {_progress(result)}")
    section.aims = _aims(found)
    section.tables = [Table("", _HEAD, [_row(result) for result in found.values()])]
    section.note(
        f"Median of {plan.repeats}; every message confirmed; consumers in a group, each message "
        "acked. Pulque's producer is handed lists (`send_many`), as the peers are; `one by one` "
        "calls `send` for each message."
    )
    for result in found.values():
        if isinstance(result, Unavailable):
            section.note(f"{result.name} could not be measured: {result.reason}")
    section.figures = {name: asdict(result) for name, result in found.items()}
    for result in found.values():
        if isinstance(result, Figures):
            section.saw(result.foreign_cores)
    return section


def _aims(found: dict[str, Figures | Unavailable]) -> list[Aim]:
    memory, disk = found[_MEMORY.name], found[_DISK.name]
    if isinstance(memory, Unavailable):
        raise BenchFailedError(f"Pulque could not be measured: {memory.reason}")
    aims = [
        Aim(
            f"end to end, × {name}",
            memory.e2e_rate / peer.e2e_rate,
            times,
            is_least=True,
            unit="×",
            detail=f"{memory.e2e_rate:,.0f} and {peer.e2e_rate:,.0f} messages/s",
        )
        for name, times in _TIMES.items()
        if isinstance(peer := found[name], Figures)
    ]
    if isinstance(disk, Figures):
        aims.append(
            Aim(
                "the same with acks=disk, of acks=memory",
                100 * disk.e2e_rate / memory.e2e_rate,
                _DISK_PERCENT,
                is_least=True,
                unit="%",
                detail=f"{disk.e2e_rate:,.0f} and {memory.e2e_rate:,.0f} messages/s",
            )
        )
    return aims


def _row(result: Figures | Unavailable) -> list[str]:
    if isinstance(result, Unavailable):
        return [result.name, f"not measured: {result.reason}", *[""] * (len(_HEAD) - 2)]
    return [
        result.name,
        f"{result.e2e_rate:,.0f}",
        f"{result.produce_rate:,.0f}",
        f"{result.consume_rate:,.0f}",
        f"{result.sync_p50_us:,.0f} / {result.sync_p99_us:,.0f}",
        f"{result.server_us:.2f} + {result.client_us:.2f}",
        f"{result.server_rss_mib:,.0f}",
        f"{result.foreign_cores:.1f}",
        result.version,
    ]


def _progress(result: Figures | Unavailable) -> str:
    if isinstance(result, Unavailable):
        return f"{result.name}: not measured: {result.reason}"
    return f"{result.name}: {result.e2e_rate:,.0f} messages/s end to end"

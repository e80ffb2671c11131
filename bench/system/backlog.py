"""Ten million messages wait: what that costs in memory, and what other groups notice of it."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, percentile, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import PullPlan, RawClient, send_frames
from bench.system.loads import pull_singly

__all__ = ["measure"]

_SIZE = 100
_BATCH = 100
_SUBJECT = "backlog"
_WARM = 500_000
_SENDS_IN_FLIGHT = 16
_PERCENT = 20
_ROUNDS = 5


def measure(options: Options) -> Section:
    """Warm up two brokers alike, let messages wait in one of them, and compare."""
    waiting = 1_000_000 if options.is_quick else 10_000_000
    section = Section("backlog", f"{waiting:,} messages of {_SIZE} B waiting for a group")
    with (
        work_directory() as directory,
        running_broker(directory, "few") as few,
        running_broker(directory, "many") as many,
    ):
        for broker in (few, many):
            _warm_up(broker)
        before = _resting_rss(many)
        tell(f"  {before / 1e6:.0f} MB before")
        _fill(many, waiting)
        after = _resting_rss(many)
        tell(f"  {after / 1e6:.0f} MB with {waiting:,} waiting")
        lag = _lag(many)
        if lag < waiting:
            raise BenchFailedError(f"{lag} messages wait, not {waiting}")
        p50s = _latencies(section, options, {"few": few, "many": many})
    _report(section, before, after, p50s)
    section.figures |= {"waiting": lag, "rss_bytes": [before, after], "pull_p50_us": p50s}
    return section


def _report(section: Section, before: int, after: int, p50s: dict[str, float]) -> None:
    section.aims = [
        Aim(
            f"{section.title}: memory, difference",
            abs(100 * (after - before) / before),
            _PERCENT,
            is_least=False,
            unit="%",
            detail=f"{before / 1e6:.0f} and {after / 1e6:.0f} MB",
        ),
        Aim(
            f"{section.title}: another group's pull p50, more",
            100 * (p50s["many"] - p50s["few"]) / p50s["few"],
            _PERCENT,
            is_least=False,
            unit="%",
            detail=f"{p50s['few']:.0f} and {p50s['many']:.0f} µs",
        ),
    ]
    section.tables = [
        Table(
            "",
            ("", "few messages", "many waiting"),
            [
                ["broker's memory, MB", f"{before / 1e6:.0f}", f"{after / 1e6:.0f}"],
                ["another group's pull, p50 µs", *(f"{value:.0f}" for value in p50s.values())],
            ],
        )
    ]
    section.note(
        f"Memory is the broker's resident set two seconds after the last message. Before: after "
        f"{_WARM:,} messages that were sent and consumed, so that caches and buffers have their "
        f"size. The messages come in batches of {_BATCH}. The other group is at the end of the "
        "same subject: one message is sent, then one `pull` is timed; rounds alternate between "
        "this broker and one that was only warmed up."
    )


def _warm_up(broker: BrokerProcess) -> None:
    _fill(broker, _WARM)
    run(partial(_consume, port=broker.port, group="warm"), limit_s=120)
    run(partial(_consume, port=broker.port, group="waiting"), limit_s=120)


def _fill(broker: BrokerProcess, count: int) -> None:
    run(partial(_send, port=broker.port, count=count), limit_s=300)


def _resting_rss(broker: BrokerProcess) -> int:
    time.sleep(2)
    return broker.rss_bytes()


def _lag(broker: BrokerProcess) -> int:
    with pulque.connect(broker.url, name="bench") as client:
        groups = client.status()["groups"]
    return int(next(group["lag"] for group in groups if group["group"] == "waiting"))


def _latencies(
    section: Section, options: Options, brokers: dict[str, BrokerProcess]
) -> dict[str, float]:
    count = 300 if options.is_quick else 1000
    p50s: dict[str, list[float]] = {name: [] for name in brokers}
    for at in range(1 if options.is_quick else _ROUNDS):
        for name, broker in brokers.items():
            done = run(
                partial(
                    pull_singly, url=broker.url, subject=_SUBJECT, group=f"other-{at}", count=count
                )
            )
            times_us: list[float] = done.workers[0].result
            p50s[name].append(percentile(times_us[count // 10 :], 50))
            section.saw(done.foreign_cores)
    return {name: median(each) for name, each in p50s.items()}


def _send(gate: Gate, *, port: int, count: int) -> None:
    frames = send_frames(_SUBJECT, count=count, size=_SIZE, batch=_BATCH)
    with RawClient(port) as client:
        gate()
        client.send_all(frames, _SENDS_IN_FLIGHT)


def _consume(gate: Gate, *, port: int, group: str) -> None:
    with RawClient(port) as client:
        gate()
        client.pull_all(PullPlan(_SUBJECT, group, 1000), _WARM)

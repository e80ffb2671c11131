"""Ten thousand pulls that wait: what they cost, and what a busy consumer notices of them."""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack
from functools import partial
from statistics import median

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import percentile, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient
from bench.system.loads import pull_singly
from pulque.wire.requests import EARLIEST, Pull, Wanted

__all__ = ["measure"]

_SIZE = 100
_PULLS_EACH = 10
_WAIT_MS = 60_000
_SUBJECTS = 100
_MB = 200
_PERCENT = 20
_ROUNDS = 5


def measure(options: Options) -> Section:
    """Compare a broker on which pulls wait with one on which none does."""
    connections = 100 if options.is_quick else 1000
    pulls = connections * _PULLS_EACH
    section = Section("waiting", f"{pulls:,} pulls wait over {connections:,} connections")
    with (
        work_directory() as directory,
        running_broker(directory, "none") as idle,
        running_broker(directory, "many") as busy,
        ExitStack() as clients,
    ):
        # Both have served alike before memory is looked at.
        for broker in (idle, busy):
            run(partial(pull_singly, url=broker.url, subject="hot", group="warm", count=500))
        before = _resting_rss(busy)
        _allow_sockets(connections)
        for number in range(connections):
            _wait(clients.enter_context(RawClient(busy.port)), number)
        _check(busy, pulls)
        after = _resting_rss(busy)
        tell(f"  {(after - before) / 1e6:.0f} MB more")
        p50s = _latencies(section, options, {"none waits": idle, "many wait": busy})
        _check(busy, pulls)
    _report(section, before, after, p50s)
    return section


def _report(section: Section, before: int, after: int, p50s: dict[str, float]) -> None:
    none, many = p50s.values()
    section.aims = [
        Aim(
            f"{section.title}: memory, more",
            (after - before) / 1e6,
            _MB,
            is_least=False,
            unit="MB",
        ),
        Aim(
            f"{section.title}: a hot pull's p50, more",
            100 * (many - none) / none,
            _PERCENT,
            is_least=False,
            unit="%",
            detail=f"{none:.0f} and {many:.0f} µs",
        ),
    ]
    rows = [[name, f"{value:.0f}"] for name, value in p50s.items()]
    section.tables = [Table("", ("", "hot pull, p50 µs"), rows)]
    section.figures = {"rss_bytes": [before, after], "pull_p50_us": p50s}
    section.note(
        f"{_PULLS_EACH} pulls of different groups on each connection wait for {_SUBJECTS} "
        "subjects that nobody sends to. The hot one: a message is sent, then one `pull` is timed."
    )


def _allow_sockets(count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * count + 1000), most))


def _wait(client: RawClient, number: int) -> None:
    for at in range(_PULLS_EACH):
        subject = f"idle-{(number + at) % _SUBJECTS}"
        client.ask_later(
            Pull(
                f"group-{number}-{at}",
                "bench",
                1,
                100,
                2**20,
                _WAIT_MS,
                EARLIEST,
                (Wanted(subject, 0), Wanted(f"%retry%{subject}%group-{number}-{at}", 0)),
            )
        )


def _check(broker: BrokerProcess, pulls: int) -> None:
    with pulque.connect(broker.url, name="bench") as client:
        waiting = int(client.status()["pulls_waiting"])
    if waiting < pulls:
        raise BenchFailedError(f"{waiting} pulls wait, not {pulls}")


def _resting_rss(broker: BrokerProcess) -> int:
    time.sleep(2)
    return broker.rss_bytes()


def _latencies(
    section: Section, options: Options, brokers: dict[str, BrokerProcess]
) -> dict[str, float]:
    count = 300 if options.is_quick else 1000
    p50s: dict[str, list[float]] = {name: [] for name in brokers}
    for at in range(1 if options.is_quick else _ROUNDS):
        for name, broker in brokers.items():
            done = run(
                partial(pull_singly, url=broker.url, subject="hot", group=f"hot-{at}", count=count)
            )
            times_us: list[float] = done.workers[0].result
            p50s[name].append(percentile(times_us[count // 10 :], 50))
            section.saw(done.foreign_cores)
    return {name: median(each) for name, each in p50s.items()}

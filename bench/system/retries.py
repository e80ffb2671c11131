"""A hundred thousand messages fail and come back: what another group notices of it."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

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
_SUBJECT = "failing"
_PERCENT = 20
_DELAY_MS = 1000
_PULLED = 1000
_ROUNDS = 5


def measure(options: Options) -> Section:
    """Time another group's pulls in quiet, and while messages are nacked, wait and come back."""
    waiting, failing = (500_000, 10_000) if options.is_quick else (5_000_000, 100_000)
    section = Section("retries", f"{failing:,} messages nacked and retried while {waiting:,} wait")
    with work_directory() as directory, running_broker(directory) as broker:
        run(partial(_fill, port=broker.port, count=waiting), limit_s=300)
        _measure(section, options, broker, failing)
    return section


def _measure(section: Section, options: Options, broker: BrokerProcess, failing: int) -> None:
    count, rounds = (300, 1) if options.is_quick else (1000, _ROUNDS)
    share = failing // rounds
    p50s: dict[str, list[float]] = {"quiet": [], "during retries": []}
    came_s = []
    for at in range(rounds):
        measuring = partial(
            pull_singly, url=broker.url, subject=_SUBJECT, group=f"other-{at}", count=count
        )
        quiet = run(measuring)
        p50s["quiet"].append(percentile(quiet.workers[0].result[count // 10 :], 50))
        during = run(
            measuring,
            partial(_fail_and_retry, port=broker.port, group=f"failing-{at}", count=share),
        )
        p50s["during retries"].append(percentile(during.workers[0].result[count // 10 :], 50))
        came_s.append(during.workers[1].result)
        section.saw(quiet.foreign_cores)
    quiet_us, during_us = (median(each) for each in p50s.values())
    section.aims = [
        Aim(
            f"{section.title}: another group's pull p50, more",
            100 * (during_us - quiet_us) / quiet_us,
            _PERCENT,
            is_least=False,
            unit="%",
            detail=f"{quiet_us:.0f} and {during_us:.0f} µs",
        )
    ]
    rows = [["quiet", f"{quiet_us:.0f}"], ["during retries", f"{during_us:.0f}"]]
    section.tables = [Table("", ("", "another group's pull, p50 µs"), rows)]
    section.figures = {"pull_p50_us": p50s, "came_back_s": came_s}
    section.note(
        f"Rounds of {share:,} messages, all nacked with a delay of {_DELAY_MS} ms, {_PULLED} in a "
        f"settle; all came back within {max(came_s):.1f} s of their nack at the latest. The other "
        "group is at the end of the same subject."
    )
    tell(f"  p50 {quiet_us:.0f} µs in quiet, {during_us:.0f} during retries")


def _fill(gate: Gate, *, port: int, count: int) -> None:
    with RawClient(port) as client:
        gate()
        client.send_all(send_frames(_SUBJECT, count=count, size=_SIZE, batch=_BATCH), 16)


def _fail_and_retry(gate: Gate, *, port: int, group: str, count: int) -> float:
    """Nack messages, then take them again; return how long that took in all."""
    with RawClient(port) as client:
        gate()
        began = time.monotonic()
        client.nack_all(PullPlan(_SUBJECT, group, _PULLED), count, delay_ms=_DELAY_MS)
        retries = PullPlan(f"%retry%{_SUBJECT}%{group}", group, _PULLED)
        taken = client.pull_some(retries, count)
    if taken != count:
        raise BenchFailedError(f"{taken} of {count} nacked messages came back")
    return time.monotonic() - began

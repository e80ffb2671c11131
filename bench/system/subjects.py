"""Ten thousand subjects instead of one: rate, memory, open files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, Run, run
from bench.options import Options, tell
from bench.outcome import Aim, Section, Table
from bench.peers import batches, work_directory
from bench.raw import PullPlan, RawClient
from bench.system.pulque_peer import check_confirmed

__all__ = ["measure"]

_MANY = 10_000
_SIZE = 100
_BATCH = 100
_RATE_PERCENT = 70
_MOST_MEGABYTES = 200


@dataclass(slots=True)
class _Side:
    """One broker with so many subjects, and what was measured of it."""

    subjects: int
    broker: BrokerProcess
    sent: list[Run] = field(default_factory=list)
    pulled: list[Run] = field(default_factory=list)
    singles: list[Run] = field(default_factory=list)
    rss_bytes: int = 0
    open_files: int = 0


def measure(options: Options) -> Section:
    """Alternate between a broker with one subject and a broker with ten thousand."""
    batches_sent = _MANY if options.is_quick else 2 * _MANY
    singles = _MANY if options.is_quick else 5 * _MANY
    section = Section("subjects", f"{_MANY:,} subjects instead of 1, batches of {_BATCH}")
    with (
        work_directory() as directory,
        running_broker(directory, "one") as one,
        running_broker(directory, "many") as many,
    ):
        first, second = _Side(1, one), _Side(_MANY, many)
        sides = [first, second]
        for at in range(options.repeats):
            for side in sides:
                _measure_batches(side, at, batches_sent)
        for side in sides:
            side.rss_bytes, side.open_files = _settled(side.broker)
        for _ in range(options.repeats):
            for side in sides:
                _measure_singles(side, singles)
    _report(section, first, second, batches_sent * _BATCH, singles)
    return section


def _measure_batches(side: _Side, at: int, batches_sent: int) -> None:
    """Send batches, then pull as many with plain sockets, always for the same group."""
    broker, watch = side.broker, [side.broker.pid]
    send = partial(_send, url=broker.url, subjects=side.subjects, sends=batches_sent, batch=_BATCH)
    side.sent.append(run(send, watch=watch))
    pull = partial(_pull, port=broker.port, subjects=side.subjects, pulls=batches_sent, at=at)
    side.pulled.append(run(pull, watch=watch))
    tell(f"  {side.subjects} subjects: {batches_sent * _BATCH / side.sent[-1].wall_s:,.0f}/s")


def _measure_singles(side: _Side, singles: int) -> None:
    send = partial(_send, url=side.broker.url, subjects=side.subjects, sends=singles, batch=1)
    side.singles.append(run(send, watch=[side.broker.pid]))


def _report(section: Section, one: _Side, many: _Side, count: int, singles: int) -> None:
    rates = {
        "send, batches of 100": [_rate(side.sent, count) for side in (one, many)],
        "pull and settle in turn": [_rate(side.pulled, count) for side in (one, many)],
        "send, single messages in turn": [_rate(side.singles, singles) for side in (one, many)],
    }
    first = rates["send, batches of 100"]
    more_megabytes = (many.rss_bytes - one.rss_bytes) / 1e6
    section.aims = [
        Aim(
            f"{_MANY:,} subjects, batches of {_BATCH}: rate, of one subject's",
            100 * first[1] / first[0],
            _RATE_PERCENT,
            is_least=True,
            unit="%",
            detail=f"{first[1]:,.0f} and {first[0]:,.0f} messages/s",
        ),
        Aim(
            f"{_MANY:,} subjects: memory, more than with one",
            more_megabytes,
            _MOST_MEGABYTES,
            is_least=False,
            unit="MB",
            detail=f"{many.rss_bytes / 1e6:.0f} and {one.rss_bytes / 1e6:.0f} MB",
        ),
        Aim(
            f"{_MANY:,} subjects: open files, more than with one",
            many.open_files - one.open_files,
            0,
            is_least=False,
            unit="files",
            detail=f"{many.open_files} and {one.open_files}",
        ),
    ]
    rows = [
        [name, f"{few:,.0f}", f"{lots:,.0f}", f"{100 * lots / few:.0f} %"]
        for name, (few, lots) in rates.items()
    ]
    head = ("messages/s", "1 subject", f"{_MANY:,} subjects", "of one")
    section.tables = [Table("", head, rows)]
    section.figures = {
        "messages_per_s": rates,
        "rss_bytes": [one.rss_bytes, many.rss_bytes],
        "open_files": [one.open_files, many.open_files],
        "broker_us_per_message_sent": [
            median(1e6 * done.watched_cpu_s / count for done in side.sent) for side in (one, many)
        ],
    }
    section.note(
        "Sends go through the client's producer, acks=memory, with every subject known to it "
        "before the clock runs. Memory and open files after the runs with batches (sent, pulled "
        "by one group and settled), two seconds of rest and with all clients gone; then single "
        "messages, each a batch of its own."
    )
    for side in (one, many):
        section.saw(max(done.foreign_cores for done in (*side.sent, *side.pulled)))


def _rate(runs: Sequence[Run], count: int) -> float:
    return count / median(done.wall_s for done in runs)


def _names(subjects: int) -> list[str]:
    return [f"subject-{number:05d}" for number in range(subjects)]


def _settled(broker: BrokerProcess) -> tuple[int, int]:
    time.sleep(2)
    return broker.rss_bytes(), broker.open_files()


def _send(gate: Gate, *, url: str, subjects: int, sends: int, batch: int) -> None:
    bodies = next(batches(count=batch, size=_SIZE, batch=batch))
    names = _names(subjects)
    with (
        pulque.connect(url, name="bench", acks="memory") as client,
        client.producer(max_batch=batch, linger=0.001) as producer,
    ):
        # A producer learns where a subject is when it first sends to it. With one subject as
        # much is sent, so that both logs have the same size.
        first = [producer.send_many(names[at % subjects], bodies) for at in range(_MANY)]
        producer.flush()
        check_confirmed(first)
        gate()
        rounds = sends // subjects
        sent = [producer.send_many(name, bodies) for _ in range(rounds) for name in names]
        producer.flush()
        check_confirmed(sent)


def _pull(gate: Gate, *, port: int, subjects: int, pulls: int, at: int) -> None:
    """Pull a batch at a time from one subject after the other."""
    plans = [PullPlan(name, "group", _BATCH) for name in _names(subjects)]
    rounds = pulls // subjects
    with RawClient(port) as client:
        gate()
        client.pull_in_turn(plans, range(at * rounds, (at + 1) * rounds))

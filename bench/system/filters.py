"""A filter that wants one message in a hundred of a backlog: how fast it is looked through."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient, joined
from pulque.model.batch import seed_of
from pulque.model.pack import BatchPacker
from pulque.wire.requests import Acks, Send

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["measure"]

_SIZE = 100
_BATCH = 100
_KINDS = 100
"""Tags there are, each equally often."""
_WANTED = 7
_LEAST = 5_000_000
_DISTINCT = 2000
"""Batches that are made; they are sent over and over."""


def measure(options: Options) -> Section:
    """Let messages of many tags wait, and drain a group that wants one of them, cold."""
    waiting = 500_000 if options.is_quick else 5_000_000
    section = Section(
        "filters", f"a filter wants 1 % of {waiting:,} messages in batches of {_BATCH}, cold"
    )
    rows: list[list[str]] = []
    with work_directory() as directory, running_broker(directory) as broker:
        for subject, words in (("sorted", "a batch is of one tag"), ("mixed", "tags are mixed")):
            fill = partial(_fill, port=broker.port, subject=subject, count=waiting)
            run(fill, limit_s=300)
            rates = []
            for number in range(options.repeats):
                _drop_pages(directory)
                rates.append(_rate(section, broker, subject, f"picky-{number}", waiting))
            rate = median(rates)
            tell(f"  {words}: {rate:,.0f} messages/s examined")
            rows.append([words, f"{rate:,.0f}"])
            section.figures[f"{subject}_per_s"] = rates
            section.aims.append(
                Aim(
                    f"{section.title}: examined, {words}",
                    rate,
                    _LEAST,
                    is_least=True,
                    unit="messages/s",
                )
            )
    section.tables = [Table("", ("", "examined, messages/s"), rows)]
    section.note(
        f"Messages of {_SIZE} B with one of {_KINDS} tags; one consumer with the client, "
        "which asks for the next ones while it handles some. Before each drain the files are "
        "dropped from the page cache."
    )
    return section


def _rate(section: Section, broker: BrokerProcess, subject: str, group: str, count: int) -> float:
    wanted = _matching(subject, count)
    drained = run(
        partial(_drain, url=broker.url, subject=subject, group=group, wanted=wanted), limit_s=300
    )
    section.saw(drained.foreign_cores)
    return float(count / drained.workers[0].result)


def _kinds(subject: str, count: int) -> list[list[int]]:
    """Return the tags of the messages of each distinct batch."""
    drawn = random.Random(7)
    return [
        [
            number % _KINDS if subject == "sorted" else drawn.randrange(_KINDS)
            for _ in range(_BATCH)
        ]
        for number in range(min(_DISTINCT, count // _BATCH))
    ]


def _matching(subject: str, count: int) -> int:
    each = [kinds.count(_WANTED) for kinds in _kinds(subject, count)]
    return sum(each[at % len(each)] for at in range(count // _BATCH))


def _fill(gate: Gate, *, port: int, subject: str, count: int) -> None:
    with RawClient(port) as client:
        gate()
        client.send_all(_frames(subject, count), 16)


def _frames(subject: str, count: int) -> Iterator[bytes]:
    frames = []
    for kinds in _kinds(subject, count):
        packer = BatchPacker()
        for kind in kinds:
            packer.add(b"x" * _SIZE, tags=[f"kind-{kind}"])
        ids = bytes(16 * _BATCH)
        batch = packer.encode(seed=seed_of(subject), ids=ids, created_at_ms=0)
        frames.append(joined(Send(Acks.MEMORY, 30_000, ((subject, batch),))))
    for at in range(count // _BATCH):
        yield frames[at % len(frames)]


def _drain(gate: Gate, *, url: str, subject: str, group: str, wanted: int) -> float:
    """Take everything that matches; return how long that took."""
    found = 0
    with (
        pulque.connect(url, name="bench") as client,
        client.consumer(
            subject, group, tags=[f"kind-{_WANTED}"], consumer_id="bench", prefetch=True
        ) as consumer,
    ):
        gate()
        began = time.monotonic()
        while found < wanted:
            messages = consumer.pull(timeout=10.0)
            if not messages:
                raise BenchFailedError(f"{found} of {wanted} came")
            found += len(messages)
            consumer.ack_all(messages)
        return time.monotonic() - began


def _drop_pages(directory: Path) -> None:
    """Have everything read from the disk again."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

"""The archive: how fast segments become rows, and how fast one of them is found again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pulque
from bench.broker import running_broker
from bench.measure import Gate, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient
from bench.system.spark import tree_cpu_s
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.pack import BatchPacker
from pulque.wire.requests import Acks, Send, encode_request

__all__ = ["measure"]

_SUBJECTS = tuple(f"history.{at}" for at in range(20))
_SIZE = 100
_BATCH = 1000
_MB = 1_000_000
_GIB = 2**30
_MILLION = 1_000_000
_LOOK_UPS = 11


class _Archived(NamedTuple):
    """One run of the archive."""

    wall_s: float
    cpu_s: float
    log_bytes: int
    messages: int

    @property
    def rate(self) -> float:
        """Megabytes of log per second."""
        return self.log_bytes / _MB / self.wall_s


def measure(options: Options) -> Section:
    """Fill a log with distinct messages, archive it, and look some of them up."""
    count = _MILLION if options.is_quick else 30 * _MILLION
    section = Section("archive", f"{count:,} messages of {_SIZE} B into a lake, and found again")
    with work_directory() as directory:
        with running_broker(directory, "log") as broker:
            run(partial(_fill, port=broker.port, count=count), limit_s=900)
            with pulque.connect(broker.url, name="bench") as client:
                client.seal()
            time.sleep(2)  # the sealed segments get their indexes
        lake, where = str(directory / "lake"), str(directory / "log")
        done = run(partial(_archive, lake=lake, where=where), limit_s=900)
        runs = [_Archived(*each) for each in done.workers[0].result]
        section.saw(done.foreign_cores)
        if sum(each.messages for each in runs) != count:
            raise BenchFailedError(f"{sum(each.messages for each in runs)} of {count} archived")
        stored = sum(p.stat().st_size for p in Path(lake, "messages").rglob("*.parquet"))
        found = run(partial(_look_up, lake=lake), limit_s=300).workers[0].result
    _report(section, runs, found, stored)
    return section


def _report(
    section: Section, runs: list[_Archived], found: dict[str, list[float]], stored: int
) -> None:
    count = sum(each.messages for each in runs)
    wall_s = sum(each.wall_s for each in runs)
    log_bytes = sum(each.log_bytes for each in runs)
    cpu_s = sum(each.cpu_s for each in runs) / (log_bytes / _GIB)
    rate = log_bytes / _MB / wall_s
    slowest = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    section.aims = [
        Aim(
            "archive of sealed segments",
            rate,
            50,
            is_least=True,
            unit="MB/s",
            detail=f"{cpu_s:.0f} CPU-s per GiB",
        )
    ]
    section.aims += [
        Aim(f"look-up by {name} in {count:,} messages", seconds, 1, is_least=False, unit="s")
        for name, seconds in slowest.items()
        if name in {"id", "key"}
    ]
    section.tables = [
        Table(
            "segments into the lake, one round after the other",
            ("messages", "log MB", "wall s", "MB/s", "CPU-s per GiB"),
            [
                [
                    f"{each.messages:,}",
                    f"{each.log_bytes / _MB:.0f}",
                    f"{each.wall_s:.1f}",
                    f"{each.rate:.0f}",
                    f"{each.cpu_s / (each.log_bytes / _GIB):.0f}",
                ]
                for each in runs
            ],
        ),
        Table(
            "look-ups without Spark, warm",
            ("by", "least s", "median s", "most s"),
            [
                [name, f"{min(times):.3f}", f"{slowest[name]:.3f}", f"{max(times):.3f}"]
                for name, times in found.items()
            ],
        ),
    ]
    section.note(
        f"{len(_SUBJECTS)} subjects, random bodies, every id and key once. A round is a copy of "
        "each segment, its rows as Parquet, both read back and compared, and the commit; the "
        f"session's start is not counted. {log_bytes / _MB:.0f} MB of log became "
        f"{stored / _MB:.0f} MB of Parquet."
    )
    tell(f"  {rate:.0f} MB/s, {cpu_s:.0f} CPU-s per GiB")


def _fill(gate: Gate, *, port: int, count: int) -> None:
    """Send messages of which no two are alike."""
    ids = IdSource(1)
    pool = random.Random(1).randbytes(4 * _MILLION)

    def frames() -> Iterator[bytes]:
        for at in range(count // _BATCH):
            subject = _SUBJECTS[at % len(_SUBJECTS)]
            packer = BatchPacker()
            for number in range(at * _BATCH, (at + 1) * _BATCH):
                start = number * 7919 % (len(pool) - 2 * _SIZE)
                size = _SIZE - 20 + number % 41
                packer.add(pool[start : start + size], key=f"order-{number}")
            now_ms = time.time_ns() // 1_000_000
            batch = packer.encode(
                seed=seed_of(subject), ids=ids.many(now_ms, _BATCH), created_at_ms=now_ms
            )
            yield b"".join(encode_request(Send(Acks.MEMORY, 30_000, ((subject, batch),)), 1, 0))

    with RawClient(port) as client:
        gate()
        client.send_all(frames(), 8)


def _archive(gate: Gate, *, lake: str, where: str) -> list[tuple[float, float, int, int]]:
    """Archive everything; return what each outcome took."""
    from pulque.pipeline.archive import Archived, Archiver, run_on_spark
    from pulque.pipeline.session import spark_session

    spark = spark_session("local[2]", settings={"spark.driver.memory": "1g"})
    spark.sparkContext.parallelize(range(2), 2).map(lambda each: each).collect()
    gate()
    runs = []
    began, cpu_s = time.monotonic(), tree_cpu_s()
    try:
        for outcome in Archiver(lake, where, "bench", lambda: run_on_spark(spark)).run():
            if not isinstance(outcome, Archived):
                raise BenchFailedError(outcome.reason)
            now, used_s = time.monotonic(), tree_cpu_s()
            runs.append((now - began, used_s - cpu_s, outcome.size, outcome.messages))
            began, cpu_s = now, used_s
    finally:
        spark.stop()
    return runs


def _look_up(gate: Gate, *, lake: str) -> dict[str, list[float]]:
    """Look up some messages, each of them once before; return how long it took."""
    from pulque.pipeline.lake import Table as LakeTable
    from pulque.pipeline.query import Question, ask

    table = LakeTable(lake).open().to_pyarrow_dataset()
    sample = table.head(200_000, columns=["message_id", "key"]).to_pylist()
    chosen = random.Random(2).sample(sample, _LOOK_UPS)
    gate()
    questions = {
        "id": [Question(id=each["message_id"]) for each in chosen],
        "key": [Question(key=each["key"]) for each in chosen],
        "key and subject": [Question(key=e["key"], subject=_SUBJECTS[0]) for e in chosen],
        "a key that is not there": [Question(key=f"none-{at}") for at in range(_LOOK_UPS)],
    }
    times: dict[str, list[float]] = {}
    for name, asked in questions.items():
        for each in asked:
            ask(lake, each)
        times[name] = [_timed(lake, each) for each in asked]
    return times


def _timed(lake: str, question: object) -> float:
    from pulque.pipeline.query import Question, ask

    assert isinstance(question, Question)
    began = time.monotonic()
    ask(lake, question)
    return time.monotonic() - began

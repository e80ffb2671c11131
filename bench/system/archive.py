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
from bench.system.tree_cpu import TreeCpu
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
    """What the archive of a log took."""

    wall_s: float
    cpu_s: float
    log_bytes: int
    messages: int
    segments: int

    @property
    def rate(self) -> float:
        """Megabytes of log per second."""
        return self.log_bytes / _MB / self.wall_s

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU-seconds, of Python and the JVM together."""
        return self.cpu_s / (self.log_bytes / _GIB)


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
        archived = _Archived(*done.workers[0].result)
        section.saw(done.foreign_cores)
        if archived.messages != count:
            raise BenchFailedError(f"{archived.messages} of {count} archived")
        stored = sum(p.stat().st_size for p in Path(lake, "messages").rglob("*.parquet"))
        found = run(partial(_look_up, lake=lake), limit_s=300).workers[0].result
    _report(section, archived, found, stored)
    return section


def _report(
    section: Section, archived: _Archived, found: dict[str, list[float]], stored: int
) -> None:
    medians = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    section.aims = [
        Aim(
            "archive of sealed segments",
            archived.rate,
            50,
            is_least=True,
            unit="MB/s",
            detail=f"{archived.cpu_s_per_gib:.0f} CPU-s per GiB",
        )
    ]
    section.aims += [
        Aim(
            f"look-up by {name} in {archived.messages:,} messages",
            medians[name],
            1,
            is_least=False,
            unit="s",
        )
        for name in ("id", "key")
    ]
    section.tables = [
        Table(
            "segments into the lake",
            ("messages", "segments", "log MB", "wall s", "MB/s", "CPU-s per GiB"),
            [
                [
                    f"{archived.messages:,}",
                    str(archived.segments),
                    f"{archived.log_bytes / _MB:.0f}",
                    f"{archived.wall_s:.1f}",
                    f"{archived.rate:.0f}",
                    f"{archived.cpu_s_per_gib:.0f}",
                ]
            ],
        ),
        Table(
            "look-ups without Spark, warm",
            ("by", "least s", "median s", "most s"),
            [
                [name, f"{min(times):.3f}", f"{medians[name]:.3f}", f"{max(times):.3f}"]
                for name, times in found.items()
            ],
        ),
    ]
    section.note(
        f"{len(_SUBJECTS)} subjects, random bodies, every id and key once; local[2]. Each segment "
        "is copied and its rows are written as Parquet, both are read back and compared, and the "
        f"files are committed; the session's start is not counted. {archived.log_bytes / _MB:.0f} "
        f"MB of log became {stored / _MB:.0f} MB of Parquet."
    )
    tell(f"  {archived.rate:.0f} MB/s, {archived.cpu_s_per_gib:.0f} CPU-s per GiB")


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


def _archive(gate: Gate, *, lake: str, where: str) -> tuple[float, float, int, int, int]:
    """Archive everything; return what it took."""
    from pulque.pipeline.archive.message_archiver import Archived, Archiver, run_on_spark
    from pulque.pipeline.session import spark_session

    spark = spark_session("local[2]", settings={"spark.driver.memory": "1g"})
    # Both workers have started, and imported what they need.
    spark.sparkContext.parallelize(range(2), 2).map(
        lambda _: bool(__import__("pulque.pipeline.archive.tasks"))
    ).collect()
    gate()
    try:
        with TreeCpu() as cpu:
            began, cpu_s = time.monotonic(), cpu.seconds()
            outcomes = list(Archiver(lake, where, "bench", lambda: run_on_spark(spark)).run())
            wall_s, cpu_s = time.monotonic() - began, cpu.seconds() - cpu_s
    finally:
        spark.stop()
    done = [each for each in outcomes if isinstance(each, Archived)]
    size, messages = sum(each.size for each in done), sum(each.messages for each in done)
    return wall_s, cpu_s, size, messages, len(done)


def _look_up(gate: Gate, *, lake: str) -> dict[str, list[float]]:
    """Look up some messages, each of them once before; return how long it took."""
    from pulque.pipeline.lake.table import Table as LakeTable
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

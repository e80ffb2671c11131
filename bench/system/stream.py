"""Streams and tasks of Spark: how long a micro-batch takes, and what a task holds in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import pulque
from bench.broker import running_broker
from bench.measure import Gate, percentile, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.pack import BatchPacker
from pulque.wire.requests import Acks, Send, encode_request

__all__ = ["measure"]

_SUBJECT = "stream"
_SIZE = 100
_PER_S = 10_000
_SENDS_PER_S = 20
_WARM_UP = 5
"""Micro-batches that are not counted."""
_SMALL_BATCH = 20
_MIB = 2**20
_SINKS = ("noop", "pulque, exactly once")


def measure(options: Options) -> Section:
    """Stream from a live broker while messages come; read segments of two sizes."""
    seconds = 40 if options.is_quick else 60
    section = Section("stream", f"Spark streams of {_PER_S:,} messages/s, and a task's memory")
    times = {sink: _stream_for(section, sink, seconds) for sink in _SINKS}
    sizes_mib = (16, 64) if options.is_quick else (64, 1024)
    peaks = [_peak_of(section, size) for size in sizes_mib]
    _report(section, times, dict(zip(sizes_mib, peaks, strict=True)))
    return section


def _report(section: Section, times: dict[str, list[float]], peaks: dict[int, int]) -> None:
    small, large = peaks.values()
    p50 = percentile(times["noop"], 50)
    section.aims = [
        Aim("Spark stream, micro-batch p50", p50, 500, is_least=False, unit="ms"),
        Aim(
            f"memory of a task, segment of {max(peaks)} MiB / {min(peaks)} MiB",
            large / small,
            1.25,
            is_least=False,
            unit="×",
            detail=f"{large / _MIB:.0f} and {small / _MIB:.0f} MiB",
        ),
    ]
    section.tables = [
        Table(
            "micro-batches, as fast as they can",
            ("into", "batches", "p50 ms", "p95 ms"),
            [
                [
                    sink,
                    str(len(found)),
                    f"{percentile(found, 50):.0f}",
                    f"{percentile(found, 95):.0f}",
                ]
                for sink, found in times.items()
            ],
        ),
        Table(
            "most memory of a worker that reads all of a log",
            ("segments of", "MiB"),
            [[f"{size} MiB", f"{peak / _MIB:.0f}"] for size, peak in peaks.items()],
        ),
    ]
    section.note(
        f"local[2], a live broker, {_SIZE} B; Spark's own time of each trigger that had rows, "
        f"without the first {_WARM_UP}. For the memory a log of one segment in batches of "
        f"{_SMALL_BATCH} messages is read in tasks of a million, all columns; the log of small "
        "segments is as long as one of them."
    )
    section.figures = {"micro_batch_ms": times, "task_peak_bytes": peaks}
    tell(f"  micro-batch p50 {p50:.0f} ms; a task holds {large / _MIB:.0f} MiB at most")


def _stream_for(section: Section, sink: str, seconds: int) -> list[float]:
    with work_directory() as directory, running_broker(directory, "broker") as broker:
        done = run(
            partial(_stream, url=broker.url, sink=sink, seconds=seconds, place=str(directory)),
            partial(_send, port=broker.port, seconds=seconds),
            limit_s=seconds + 180,
        )
        section.saw(done.foreign_cores)
    found: list[float] = done.workers[0].result
    if len(found) < 5:
        raise BenchFailedError(f"only {len(found)} micro-batches in {seconds} s")
    return found


def _frame(ids: IdSource, count: int) -> bytes:
    packer = BatchPacker()
    for number in range(count):
        packer.add(b"%0*d" % (_SIZE, number), key=f"order-{number}")
    now_ms = time.time_ns() // 1_000_000
    batch = packer.encode(
        seed=seed_of(_SUBJECT), ids=ids.many(now_ms, count), created_at_ms=now_ms
    )
    return b"".join(encode_request(Send(Acks.MEMORY, 30_000, ((_SUBJECT, batch),)), 1, 0))


def _send(gate: Gate, *, port: int, seconds: int) -> None:
    """Send at an even pace."""
    ids = IdSource(1)
    with RawClient(port) as client:
        gate()
        began = time.monotonic()
        for at in range(seconds * _SENDS_PER_S):
            time.sleep(max(0.0, began + at / _SENDS_PER_S - time.monotonic()))
            client.send_all(iter([_frame(ids, _PER_S // _SENDS_PER_S)]), 1)


def _stream(gate: Gate, *, url: str, sink: str, seconds: int, place: str) -> list[float]:
    """Run a query while messages come; return the milliseconds of each micro-batch."""
    from pulque.pipeline.session import spark_session

    settings = {
        "spark.driver.memory": "1g",
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
    }
    spark = spark_session("local[2]", settings=settings)
    source = spark.readStream.format("pulque").options(url=url, subscribe=_SUBJECT).load()
    if sink == "noop":
        writer = source.writeStream.format("noop")
    else:
        writer = (
            source.select("body", "key")
            .writeStream.format("pulque")
            .options(url=url, subject="copied", staging=f"{place}/staging")
        )
    query = writer.option("checkpointLocation", f"{place}/checkpoint").start()
    gate()
    try:
        time.sleep(seconds)
        if query.exception() is not None:
            raise BenchFailedError(str(query.exception()))
        return [
            float(each["durationMs"]["triggerExecution"])
            for each in query.recentProgress
            if each["numInputRows"]
        ][_WARM_UP:]
    finally:
        query.stop()
        spark.stop()


def _peak_of(section: Section, size_mib: int) -> int:
    """Return the most memory that a worker held while a log was read."""
    with work_directory() as directory:
        settings = {"storage.segment_size": f"{size_mib}MiB"}
        count = size_mib * _MIB // (_SIZE + 50)
        with running_broker(directory, "log", settings=settings) as broker:
            run(partial(_fill, port=broker.port, count=count), limit_s=600)
            with pulque.connect(broker.url, name="bench") as client:
                client.seal()
            time.sleep(2)  # the sealed segment gets its index
        done = run(partial(_read, where=str(directory / "log")), limit_s=600)
        section.saw(done.foreign_cores)
    peak: int = done.workers[0].result
    return peak


def _fill(gate: Gate, *, port: int, count: int) -> None:
    ids = IdSource(1)
    distinct = [_frame(ids, _SMALL_BATCH) for _ in range(64)]

    def frames() -> Iterator[bytes]:
        return (distinct[at % 64] for at in range(count // _SMALL_BATCH))

    with RawClient(port) as client:
        gate()
        client.send_all(frames(), 64)


def _read(gate: Gate, *, where: str) -> int:
    """Read everything; return the most memory that a worker held."""
    from pulque.pipeline.session import spark_session

    spark = spark_session("local[2]", settings={"spark.driver.memory": "1g"})
    reader: Any = spark.read.format("pulque").options(path=where, subscribe=_SUBJECT)
    gate()
    try:
        reader.load().write.format("noop").mode("overwrite").save()
        return max(map(_peak_bytes, _workers()))
    finally:
        spark.stop()


def _workers() -> list[psutil.Process]:
    """The processes that did tasks, and not those that planned them."""
    found = psutil.Process().children(recursive=True)
    workers = []
    for each in found:
        with suppress(psutil.Error):  # it has ended
            if each.cmdline()[-1:] == ["pyspark.worker"]:
                workers.append(each)
    return workers


def _peak_bytes(process: psutil.Process) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0

"""Reading a log with Spark: rows per second of CPU, Python's and the JVM's together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

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

_SUBJECT = "history"
_SIZE = 100
_BATCH = 1000
_COLUMNS = "message_id,subject,partition,sequence,key,body,created_at,stored_at"
_MILLION = 1_000_000
_SHARES = {"a 16th": 16, "a quarter": 4}


class _Query(NamedTuple):
    """One way to read."""

    wall_s: float
    cpu_s: float
    rows: int

    @property
    def rate(self) -> float:
        return self.rows / self.cpu_s


def measure(options: Options) -> Section:
    """Fill a log, read it as files: decoded alone, by Spark, and by Spark row by row."""
    count = _MILLION if options.is_quick else 10 * _MILLION
    section = Section("spark", f"a log of {count:,} messages of {_SIZE} B read with Spark")
    with work_directory() as directory:
        with running_broker(directory, "log") as broker:
            run(partial(_fill, port=broker.port, count=count), limit_s=300)
            with pulque.connect(broker.url, name="bench") as client:
                client.seal()
            time.sleep(2)  # the sealed segment gets its index
        where = str(directory / "log")
        alone = run(partial(_decode, where=where), limit_s=300).workers[0]
        decoded = _Query(alone.end_s - alone.begin_s, alone.cpu_s, alone.result)
        done = run(partial(_query, where=where, count=count), limit_s=600)
        queries: dict[str, _Query] = {k: _Query(*v) for k, v in done.workers[0].result.items()}
        section.saw(done.foreign_cores)
    if decoded.rows != count or queries["count"].rows != count:
        raise BenchFailedError(f"{decoded.rows} and {queries['count'].rows} rows of {count}")
    shares = {name: queries.pop(name) for name in _SHARES}
    _report(section, {"decoded alone, all 8 columns": decoded, **queries})
    _report_growth(section, [*shares.values(), queries["all 8 columns"]])
    return section


def _report_growth(section: Section, queries: list[_Query]) -> None:
    """Say how the cost grows with the data."""
    costs = [each.cpu_s / each.rows for each in queries]
    growth = costs[-1] / costs[0]
    section.aims.append(
        Aim(
            "Spark read, CPU per row, 16 × as many rows / 1 ×",
            growth,
            1.1,
            is_least=False,
            unit="×",
            detail=", ".join(f"{each.rows:,} rows {each.cpu_s:.1f} CPU-s" for each in queries),
        )
    )


def _report(section: Section, queries: dict[str, _Query]) -> None:
    alone, counted, everything, by_rows = queries.values()
    wanted = (
        ("count", counted.rate / _MILLION, 0.8, "million rows/CPU-s"),
        ("all 8 columns", everything.rate / _MILLION, 0.5, "million rows/CPU-s"),
        ("all columns, × row by row", everything.rate / by_rows.rate, 7, "×"),
        ("decoding alone", alone.rate / _MILLION, 5, "million rows/CPU-s"),
    )
    section.aims = [
        Aim(f"Spark read of a log, {what}", measured, limit, is_least=True, unit=unit)
        for what, measured, limit, unit in wanted
    ]
    rows = [
        [name, f"{each.wall_s:.1f}", f"{each.cpu_s:.1f}", f"{each.rate / _MILLION:.2f}"]
        for name, each in queries.items()
    ]
    head = ("", "wall s", "CPU s", "million rows/CPU-s")
    section.tables = [Table("", head, rows)]
    section.note(
        "Files of a stopped broker in the page cache, local[2]. CPU is that of the driver, the "
        "JVM and all workers. The session's start and one query before are not counted, nor is "
        "the first decoding of 4 MiB, with which Arrow imports pandas; of three queries the best "
        "is."
    )
    tell(f"  {counted.rate / _MILLION:.2f} million rows counted per CPU-second")


def _fill(gate: Gate, *, port: int, count: int) -> None:
    def frames() -> Iterator[bytes]:
        ids = IdSource(1)
        for at in range(64):
            packer = BatchPacker()
            for number in range(_BATCH):
                packer.add(b"%0*d" % (_SIZE, number), key=f"order-{at}-{number}")
            now_ms = time.time_ns() // 1_000_000
            batch = packer.encode(
                seed=seed_of(_SUBJECT), ids=ids.many(now_ms, _BATCH), created_at_ms=now_ms
            )
            yield b"".join(encode_request(Send(Acks.MEMORY, 30_000, ((_SUBJECT, batch),)), 1, 0))

    distinct = list(frames())
    with RawClient(port) as client:
        gate()
        client.send_all((distinct[at % 64] for at in range(count // _BATCH)), 8)


def _decode(gate: Gate, *, where: str) -> int:
    """Read and decode everything in this process; return how many rows."""
    from pulque.pipeline.options import Selection
    from pulque.pipeline.reading.batch_decoder import decode
    from pulque.pipeline.reading.ranges import Range
    from pulque.pipeline.reading.stored_log import StoredLog, read_stretch

    columns = _COLUMNS.split(",")
    log = StoredLog(where)
    (name,) = log.partitions(Selection(subjects=(_SUBJECT,)))
    tasks = log.plan(
        [Range(name, *log.bounds(name))], least=1, most_rows=_MILLION, must_be_whole=True
    )
    # Arrow imports what it needs, pandas too, when it is first used.
    decode(next(read_stretch(tasks[0], must_be_whole=True)), columns)
    gate()
    return sum(
        decode(placed, columns).num_rows
        for task in tasks
        for placed in read_stretch(task, must_be_whole=True)
    )


def _query(gate: Gate, *, where: str, count: int) -> dict[str, tuple[float, float, int]]:
    """Run each query some times; return the one that took the least CPU."""
    from pulque.pipeline.session import spark_session

    spark = spark_session("local[2]", settings={"spark.driver.memory": "2g"})
    spark.dataSource.register(_row_source())
    frame = spark.read.format("pulque").options(path=where, subscribe=_SUBJECT, columns=_COLUMNS)
    by_rows = (
        spark.read.format("pulque_rows")
        .options(path=where, subscribe=_SUBJECT, columns=_COLUMNS)
        .option("endingOffsets", f'{{"{_SUBJECT}": {min(count, _MILLION)}}}')
    )
    gate()
    frame.load().count()

    def everything(reader: Any, rows: int) -> int:
        reader.load().write.format("noop").mode("overwrite").save()
        return rows

    def part(rows: int) -> int:
        some = spark.read.format("pulque").options(
            path=where, subscribe=_SUBJECT, columns=_COLUMNS
        )
        ending = f'{{"{_SUBJECT}": {rows}}}'
        return everything(some.option("endingOffsets", ending), rows)

    try:
        return {
            **{name: _best(partial(part, count // by), 3) for name, by in _SHARES.items()},
            "count": _best(lambda: int(frame.load().count()), 3),
            "all 8 columns": _best(lambda: everything(frame, count), 3),
            "row by row, all 8 columns": _best(
                lambda: everything(by_rows, min(count, _MILLION)), 1
            ),
        }
    finally:
        spark.stop()


def _best(query: Any, times: int) -> tuple[float, float, int]:
    runs = []
    with TreeCpu() as cpu:
        for _ in range(times):
            began, cpu_s = time.monotonic(), cpu.seconds()
            rows = query()
            runs.append((time.monotonic() - began, cpu.seconds() - cpu_s, rows))
    return min(runs, key=lambda one: one[1])


def _row_source() -> Any:
    """A source that gives Spark one tuple for each message, to compare with."""
    from pulque.pipeline.data_source.source import PulqueDataSource

    class RowSource(PulqueDataSource):
        @classmethod
        def name(cls) -> str:
            return "pulque_rows"

        def reader(self, schema: Any) -> Any:
            inner = super().reader(schema)

            class Rows(type(inner)):  # type: ignore[misc]
                def __init__(self) -> None:
                    self.__dict__.update(inner.__dict__)

                def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
                    for batch in super().read(partition):
                        yield from zip(*(c.to_pylist() for c in batch.columns), strict=True)

            return Rows()

    return RowSource

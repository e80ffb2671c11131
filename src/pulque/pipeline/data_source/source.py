"""The data source ``pulque`` for Spark: reads, streams and writes.

Every read is planned from ranges of consume sequences and yields Arrow batches; nothing is ever
read past what a broker has confirmed. What Spark calls a partition is a ``Split`` here.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pulque.errors import UsageError
from pulque.model.names import PartitionName
from pulque.pipeline.columns import schema_of
from pulque.pipeline.data_source.table_writer import BatchWriter, StreamWriter
from pulque.pipeline.options import Place, ReadOptions, WriteOptions
from pulque.pipeline.reading.batch_decoder import BatchPlace, decode_readable
from pulque.pipeline.reading.broker_log import LiveLog
from pulque.pipeline.reading.ranges import (
    DataLossError,
    Range,
    Split,
    advance,
    check_not_shorter,
    resolve,
    whole_range,
)
from pulque.pipeline.reading.stored_log import SegmentStretch, StoredLog, read_stretch

__all__ = ["PulqueDataSource"]

_log = logging.getLogger("pulque.pipeline")


class PulqueDataSource(DataSource):
    """Messages of Pulque as a table."""

    @classmethod
    def name(cls) -> str:
        """``spark.read.format("pulque")``."""
        return "pulque"

    def schema(self) -> StructType:
        """Return the columns that the options ask for."""
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(schema_of(ReadOptions.parse(self.options).columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read what is stored now."""
        _check_readable(schema)
        return _Reader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Send rows as messages, each at least once."""
        _refuse_overwrite(overwrite=overwrite)
        return BatchWriter(WriteOptions.parse(self.options), schema)

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        """Send rows as messages, each exactly once."""
        _refuse_overwrite(overwrite=overwrite)
        return StreamWriter(WriteOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Read what comes."""
        _check_readable(schema)
        return _StreamReader(ReadOptions.parse(self.options, is_stream=True), schema)


def _check_readable(schema: StructType) -> None:
    """Refuse columns that messages do not have; a user may give a read a schema of their own."""
    from pyspark.sql.pandas.types import from_arrow_schema

    for found, made in zip(schema, from_arrow_schema(schema_of(schema.fieldNames())), strict=True):
        kind, allowed = found.dataType.simpleString(), made.dataType.simpleString()
        if kind != allowed:
            raise UsageError(
                f"column {found.name!r} of the schema is {kind}; it must be {allowed}: read it as "
                "it is, and cast it afterwards"
            )


def _refuse_overwrite(*, overwrite: bool) -> None:
    if overwrite:
        raise UsageError("messages cannot be overwritten: use mode append")


class _Task(InputPartition):
    """What a task reads, on its way to it."""

    def __init__(self, work: Split | SegmentStretch) -> None:
        super().__init__(work)


def _open(options: ReadOptions) -> LiveLog | StoredLog:
    return LiveLog(options.url) if options.path is None else StoredLog(options.path)


def _check_brokers(log: LiveLog | StoredLog, options: ReadOptions) -> None:
    """Wait for all brokers that have messages of a read, or log what it goes on without."""
    if not isinstance(log, LiveLog):
        return
    if options.must_be_whole:
        log.check_whole(options.selection)
        return
    for each in log.missing(options.selection):
        _log.warning("%s; the read goes on without it", each)


def _plan(
    log: LiveLog | StoredLog, ranges: Sequence[Range], options: ReadOptions
) -> list[InputPartition]:
    tasks = log.plan(
        ranges,
        least=options.min_partitions,
        most_rows=options.rows_per_partition,
        must_be_whole=options.must_be_whole,
    )
    return [_Task(each) for each in tasks]


def _read(
    options: ReadOptions, columns: Sequence[str], partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Do a task's work."""
    work = partition.value
    if isinstance(work, SegmentStretch):
        for placed in read_stretch(work, must_be_whole=options.must_be_whole):
            yield from _decoded(placed, columns, options)
    elif isinstance(work, Split):
        with LiveLog(options.url) as log:
            for placed in log.read(work.ranges, must_be_whole=options.must_be_whole):
                yield from _decoded(placed, columns, options)
    # Of no tasks Spark makes one without a value, and reads it.


def _decoded(
    placed: BatchPlace, columns: Sequence[str], options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    """Yield what can be decoded.

    Raises:
        DataLossError: A batch cannot, and all messages must be there.
    """
    batches, unreadable = decode_readable(placed, columns)
    for partition, first, reason in unreadable:
        found = f"the batch at {partition}/{first} cannot be decoded: {reason}"
        if options.must_be_whole:
            raise DataLossError(f"{found}; with failOnDataLoss=false the read goes on without it")
        _log.warning("%s; it is left out", found)
    yield from batches


class _Reader(DataSourceReader):
    """A read of what is stored."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = tuple(schema.fieldNames())

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with closing(_open(options)) as log:
            _check_brokers(log, options)
            if options.must_be_whole:
                log.check_known(options.selection)
            names = log.partitions(options.selection, must_be_whole=options.must_be_whole)
            ranges = [_range_of(log, options, name) for name in names]
            return _plan(log, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._columns, partition)


def _range_of(log: LiveLog | StoredLog, options: ReadOptions, name: PartitionName) -> Range:
    """Return what a batch read covers of one partition."""
    bounds = log.bounds(name)
    first = resolve(options.starting, name, bounds, log.at_time(name, options.starting))
    end = resolve(options.ending, name, bounds, log.at_time(name, options.ending))
    wanted = Range(name, first, max(first, end))
    named = Place.SEQUENCES in {options.starting.place, options.ending.place}
    return whole_range(wanted, bounds, must_be_whole=options.must_be_whole and named)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Its offset is the next sequence of each partition."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = tuple(schema.fieldNames())
        self._log: LiveLog | StoredLog | None = None
        self._goal: dict[str, int] | None = None
        """Where a query ends that reads only what was there when it began."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        log, options = self._connected(), self._options
        _check_brokers(log, options)
        starting = options.starting
        names = log.partitions(options.selection, must_be_whole=options.must_be_whole)
        return {
            name: resolve(starting, name, log.bounds(name), log.at_time(name, starting))
            for name in names
        }

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        ends = self._ends() if self._goal is None else self._goal
        if self._options.must_be_whole:
            check_not_shorter(start, ends)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        # A partition that is gone keeps its place: it may come back.
        return {**start, **advance(self._started(start, ends), ends, most)}

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        return self._ends()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        log, options = self._connected(), self._options
        _check_brokers(log, options)
        if options.must_be_whole:
            log.check_known(options.selection)
        self._goal = self._ends(must_be_whole=options.must_be_whole)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        started = self._started(start, end)
        ranges = [Range(PartitionName(n), started[n], end[n]) for n in sorted(end)]
        return _plan(self._connected(), ranges, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._columns, partition)

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()

    def _started(self, start: Mapping[str, int], ends: Mapping[str, int]) -> dict[str, int]:
        """A partition that came later, or began anew, is read from its beginning."""
        log = self._connected()
        return {
            name: start[name]
            if name in start and start[name] <= end
            else log.bounds(PartitionName(name)).start
            for name, end in ends.items()
        }

    def _ends(self, *, must_be_whole: bool = False) -> dict[str, int]:
        """Return where partitions end; while a broker is away a stream goes on without it."""
        log = self._connected()
        log.refresh()
        names = log.partitions(self._options.selection, must_be_whole=must_be_whole)
        return {name: log.bounds(name).end for name in names}

    def _connected(self) -> LiveLog | StoredLog:
        if self._log is None:
            self._log = _open(self._options)
        return self._log

    def __getstate__(self) -> dict[str, Any]:
        # It travels to tasks, which have connections of their own.
        return {**self.__dict__, "_log": None}

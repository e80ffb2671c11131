"""Writing tables to subjects: a batch at least once, a stream exactly once.

A batch write sends as it goes: a task that is repeated sends again, and says so in the guide. A
stream stages first and publishes by manifest, see ``pulque.pipeline.staging``.
"""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import pulque
from pulque.client.calls import Calls
from pulque.client.lanes import pack_messages
from pulque.client.options import AcksName
from pulque.client.receipt import Outgoing
from pulque.client.url import addresses_of
from pulque.errors import ErrorCode, RemoteProtocolError, UsageError, error_from_wire
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName, Subject, level_partition
from pulque.pipeline.options import WriteOptions
from pulque.pipeline.rows import check_schema, rows_of
from pulque.pipeline.staging import PackedBatch, Staged, Staging, stage
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Response, Sent

__all__ = ["BatchWriter", "StreamWriter"]

_TIMEOUT_S = 60.0
_BATCH_BYTES = 1024 * 1024
_QUERY = "sql.streaming.queryId"
_PROMISES_AT_ONCE = 50_000


@dataclass
class _Sent(WriterCommitMessage):
    """What a task of a batch write sent."""

    messages: int


@dataclass
class _StagedBatches(WriterCommitMessage):
    """What a task of a streaming write staged."""

    staged: Staged


def _check(schema: StructType, options: WriteOptions) -> None:
    fields = ((each.name, each.dataType.simpleString()) for each in schema.fields)
    check_schema(fields, has_subject=options.subject is not None)


class BatchWriter(DataSourceArrowWriter):
    """Sends every row as a message. A task that Spark repeats sends its rows again."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        _check(schema, options)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task, and return once all are confirmed."""
        options = self._options
        count = 0
        acks: AcksName = "disk" if options.acks == "disk" else "memory"
        with (
            pulque.connect(options.url, name="pulque-pipeline", acks=acks) as client,
            client.producer(max_batch=options.max_batch) as producer,
        ):
            for batch in iterator:
                for some in _in_parts(list(rows_of(batch, options.subject))):
                    promises = [producer.send_many(s, messages) for s, messages in some]
                    producer.flush()
                    for promise in promises:
                        count += len(promise.receipts())
        return _Sent(count)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """There is nothing left to do: all is confirmed."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was sent stays sent; the guide says so."""


class StreamWriter(DataSourceStreamArrowWriter):
    """Stages rows in the tasks, and publishes them from the driver, once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        _check(schema, options)
        if options.staging is None:
            raise UsageError(
                "a streaming write needs the option staging: a directory that the driver and all "
                "workers can write to, of this query's own, kept as long as its checkpoint"
            )
        self._options = options
        self._staging = options.staging

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Pack the rows of a task into batches, and leave them in a file."""
        query = _property(_QUERY)
        with closing(_calls(self._options)) as calls:
            calls.warm_up(_TIMEOUT_S)  # tells how large a message may be, before it is too late
            packer = _Packer(self._options, calls.max_message)
            return _StagedBatches(stage(self._staging, packer.pack(iterator), query=query))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish a micro-batch; a repeated one is published as it was the first time."""
        with closing(_calls(self._options)) as calls:
            acks = Acks.DISK if self._options.acks == "disk" else Acks.MEMORY

            def send(partition: PartitionName, batch: bytes) -> None:
                request = Send(acks, int(_TIMEOUT_S * 1000), ((partition, batch),))
                calls.ask(request, _TIMEOUT_S, _check_stored)

            Staging(self._staging).commit(batchId, _staged(messages), send)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Throw away what the tasks staged."""
        del batchId
        Staging(self._staging).discard(_staged(messages))


class _Packer:
    """Packs rows into batches, one open batch for each partition."""

    def __init__(self, options: WriteOptions, max_message: int) -> None:
        self._options = options
        self._max_message = max_message
        self._ids = IdSource(secrets.randbits(38))
        self._open: dict[PartitionName, list[Outgoing]] = {}
        self._sizes: dict[PartitionName, int] = {}

    def pack(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[PackedBatch, int]]:
        for batch in batches:
            for row in rows_of(batch, self._options.subject):
                partition = level_partition(Subject(row.subject), row.message.priority)
                waiting = self._open.setdefault(partition, [])
                waiting.append(row.message)
                size = self._sizes.get(partition, 0) + len(row.message.body)
                self._sizes[partition] = size
                if len(waiting) >= self._options.max_batch or size >= _BATCH_BYTES:
                    yield self._close(partition)
        for partition in list(self._open):
            yield self._close(partition)

    def _close(self, partition: PartitionName) -> tuple[PackedBatch, int]:
        messages = self._open.pop(partition)
        self._sizes.pop(partition)
        packer = pack_messages(messages, self._max_message)
        now_ms = time.time_ns() // 1_000_000
        batch = packer.encode(
            seed=seed_of(partition),
            ids=self._ids.many(now_ms, len(messages)),
            created_at_ms=now_ms,
            priority=messages[0].priority,
        )
        return PackedBatch(partition, batch), len(messages)


def _in_parts(rows: Sequence[tuple[str, Outgoing]]) -> Iterator[list[tuple[str, list[Outgoing]]]]:
    """Group rows by subject, some thousands at a time."""
    for at in range(0, len(rows), _PROMISES_AT_ONCE):
        by_subject: dict[str, list[Outgoing]] = {}
        for subject, message in rows[at : at + _PROMISES_AT_ONCE]:
            by_subject.setdefault(subject, []).append(message)
        yield list(by_subject.items())


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [each.staged for each in messages if isinstance(each, _StagedBatches)]


def _calls(options: WriteOptions) -> Calls:
    draw = secrets.SystemRandom().random
    return Calls(addresses_of(options.url, os.environ), client="pulque-pipeline", draw=draw)


def _check_stored(answer: Response) -> None:
    if not isinstance(answer, Sent) or len(answer.outcomes) != 1:
        raise RemoteProtocolError(f"a send of one batch got {answer!r}")
    outcome = answer.outcomes[0]
    if outcome.code is not ErrorCode.NONE:
        raise error_from_wire(outcome.code, outcome.text)


def _property(name: str) -> str:
    """Return a property of the query that a task belongs to; Spark has no public way to it."""
    context = TaskContext.get()
    return str(context.getLocalProperty(name) or "") if context is not None else ""

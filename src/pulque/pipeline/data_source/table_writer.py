"""Writing tables to subjects: a batch at least once, a stream exactly once.

A batch write sends as it goes: a task that is repeated sends again, and says so in the guide. A
stream stages first and publishes by manifest, see ``pulque.pipeline.data_source.staging``.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import pulque
from pulque.client.options.client_options import acks_of
from pulque.client.routing.targets import Target, Targets, kept_in_copies
from pulque.client.sending.direct_batches import pack_messages
from pulque.client.sending.outgoing_message import Outgoing, as_body
from pulque.errors import (
    ErrorCode,
    RemoteProtocolError,
    UnavailableError,
    UsageError,
    error_from_wire,
)
from pulque.model.batch import COLUMNS
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.pipeline.brokers import BrokersOfUrl, held_name, split_held
from pulque.pipeline.data_source.row_messages import Row, check_schema, rows_of
from pulque.pipeline.data_source.staging import PackedBatch, Staged, Staging, stage
from pulque.pipeline.options import WriteOptions
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Response, Sent

__all__ = ["BatchWriter", "StreamWriter"]

_TIMEOUT_S = 60.0
_BATCH_BYTES = 1024 * 1024
_COLUMNS = sum(column.width for column in COLUMNS)
"""Bytes of a message that stand in columns."""
_QUERY = "sql.streaming.queryId"
_PROMISES_AT_ONCE = 50_000


@dataclass
class _SentRows(WriterCommitMessage):
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
        with (
            pulque.connect(options.url, name="pulque-pipeline", acks=options.acks) as client,
            client.producer(max_batch=options.max_batch) as producer,
        ):
            for batch in iterator:
                for some in _in_parts(list(rows_of(batch, options.subject))):
                    promises = [producer.send_many(s, messages) for s, messages in some]
                    producer.flush()
                    for promise in promises:
                        count += len(promise.receipts())
        return _SentRows(count)

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
        with closing(BrokersOfUrl(self._options.url, timeout_s=_TIMEOUT_S)) as brokers:
            packer = _Packer(self._options, brokers)
            return _StagedBatches(stage(self._staging, packer.pack(iterator), query=query))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish a micro-batch; a repeated one is published as it was the first time."""
        with closing(BrokersOfUrl(self._options.url, timeout_s=_TIMEOUT_S)) as brokers:
            acks = acks_of(self._options.acks)

            def send(name: PartitionName, batch: bytes) -> None:
                place, partition = split_held(name)
                request = Send(acks, int(_TIMEOUT_S * 1000), ((partition, batch),))
                brokers.at(place).ask(request, _TIMEOUT_S, _check_stored)

            Staging(self._staging).commit(batchId, _staged(messages), send)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Remove what the tasks staged, unless a manifest names it: then a commit finishes it."""
        del batchId
        Staging(self._staging).discard(_staged(messages))


class _Packer:
    """Packs rows into batches, one open batch for each partition.

    Where a batch goes is decided here, and stays: whoever publishes it, however often, sends it to
    the same broker, which stores it once.
    """

    def __init__(self, options: WriteOptions, brokers: BrokersOfUrl) -> None:
        self._options = options
        self._brokers = brokers
        self._is_copied = acks_of(options.acks) is Acks.REPLICA
        self._ids = IdSource(secrets.randbits(38))
        self._targets: dict[str, Targets] = {}
        self._turns: dict[tuple[str, int], Target] = {}
        """Where messages without an order key go until the next batch, by subject and priority."""
        self._open: dict[Target, list[Outgoing]] = {}
        self._sizes: dict[Target, int] = {}

    def pack(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[PackedBatch, int]]:
        for batch in batches:
            for row in rows_of(batch, self._options.subject):
                target = self._target(row.subject, row.message)
                size = _size_of(row.message)
                while self._sizes.get(target, 0) + size > self._most_bytes(target.place):
                    if target not in self._open:
                        break  # a message that is larger by itself; packing refuses it
                    yield self._close_turn(row, target)
                    target = self._target(row.subject, row.message)
                waiting = self._open.setdefault(target, [])
                waiting.append(row.message)
                self._sizes[target] = self._sizes.get(target, 0) + size
                if len(waiting) >= self._options.max_batch:
                    yield self._close_turn(row, target)
        for target in list(self._open):
            yield self._close(target)

    def _target(self, subject: str, message: Outgoing) -> Target:
        targets = self._targets.get(subject)
        if targets is None:
            targets = self._targets[subject] = self._find(subject)
        if message.order_key:
            return targets.pick(message.order_key, message.priority)
        turn = (subject, message.priority)
        if turn not in self._turns:
            self._turns[turn] = targets.pick(None, message.priority)
        return self._turns[turn]

    def _find(self, subject: str) -> Targets:
        route = self._brokers.route(subject, is_for_sending=True)
        targets = Targets(kept_in_copies(route) if self._is_copied else route)
        if targets.is_empty:
            raise UnavailableError(f"no broker serves {subject} at present")
        targets.begin_at(secrets.SystemRandom().random())  # tasks may have one batch each
        return targets

    def _close_turn(self, row: Row, target: Target) -> tuple[PackedBatch, int]:
        """Close a batch; messages without an order key go elsewhere from now on."""
        self._turns.pop((row.subject, row.message.priority), None)
        return self._close(target)

    def _close(self, target: Target) -> tuple[PackedBatch, int]:
        messages = self._open.pop(target)
        self._sizes.pop(target)
        packer = pack_messages(messages, self._max_message(target.place))
        now_ms = time.time_ns() // 1_000_000
        batch = packer.encode(
            seed=target.seed,
            ids=self._ids.many(now_ms, len(messages)),
            created_at_ms=now_ms,
            priority=messages[0].priority,
        )
        return PackedBatch(held_name(target.place, target.partition), batch), len(messages)

    def _most_bytes(self, place: str) -> int:
        """Return how large a batch may be: a broker never takes less than one whole message."""
        return min(_BATCH_BYTES, self._max_message(place))

    def _max_message(self, place: str) -> int:
        """Return how large a message may be, before it is too late to say so."""
        calls = self._brokers.at(place)
        if not calls.max_message:
            calls.warm_up(_TIMEOUT_S)
        return calls.max_message


def _size_of(message: Outgoing) -> int:
    """Return how much room a message takes in a batch, at most."""
    texts = (message.key or "", message.order_key or "", *message.tags)
    parts = chain(texts, chain.from_iterable((message.headers or {}).items()))
    return len(as_body(message.body)) + _COLUMNS + sum(len(each.encode()) + 1 for each in parts)


def _in_parts(rows: Sequence[tuple[str, Outgoing]]) -> Iterator[list[tuple[str, list[Outgoing]]]]:
    """Group rows by subject, some thousands at a time."""
    for at in range(0, len(rows), _PROMISES_AT_ONCE):
        by_subject: dict[str, list[Outgoing]] = {}
        for subject, message in rows[at : at + _PROMISES_AT_ONCE]:
            by_subject.setdefault(subject, []).append(message)
        yield list(by_subject.items())


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [each.staged for each in messages if isinstance(each, _StagedBatches)]


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

"""Deliveries as a broker sends them, turned into the batches that a consumer holds."""

from collections.abc import Iterator

from pulque.client.receiving.log_records import (
    Served,
    check_count,
    read_gathered_record,
    read_record,
    read_single,
)
from pulque.client.receiving.received_message import ReceivedBatch, UnreadableRange
from pulque.errors import InvalidBatchError
from pulque.model.batch import seed_of
from pulque.model.gathered import GATHERED_MAGIC, Gathered
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, Tenure
from pulque.wire.responses import Delivered

__all__ = ["batches_of"]


def batches_of(
    partition: PartitionName, delivered: Delivered
) -> Iterator[ReceivedBatch | UnreadableRange]:
    """Yield the batches of a run of deliveries, each with what of it was delivered.

    A batch that its producer packed in a way that nobody can decode is a range without messages.

    Raises:
        CorruptionError: A batch is not what its producer packed.
        RemoteProtocolError: The records are out of order, or of another run.
    """
    assert not isinstance(delivered.records, tuple)  # noqa: S101  # decoded, not encoded
    records = bytes(delivered.records)
    seed = seed_of(partition)
    expected: int = delivered.first_sequence
    last = expected + delivered.count
    ahead = delivered.first_pull - expected
    at = 0
    batch: ReceivedBatch | UnreadableRange
    while at < len(records) and expected < last:
        if records.startswith(GATHERED_MAGIC, at):
            gathered = read_gathered_record(records, at, partition, expected, last)
            many = _gathered(gathered, partition, ahead, delivered.tenure)
            at += gathered.size
            expected = many.sequence_of(many.end - 1) + 1
            yield many
            continue
        single = read_single(records, at, seed)
        if single is not None and expected <= single[2] < last:
            batch = ReceivedBatch.of_single(single, partition, ahead, delivered.tenure)
            at += single[-1]
        else:
            served = read_record(records, at, partition, expected, last)
            batch = _received(served, partition, ahead, delivered.tenure)
            at += served.envelope.size
        expected = batch.first_sequence + batch.end
        yield batch


def _gathered(
    found: Gathered, partition: PartitionName, ahead: int, tenure: Tenure
) -> ReceivedBatch:
    batch = ReceivedBatch(
        found.batch,
        partition=partition,
        first_sequence=ConsumeSequence(found.first_sequence),
        stored_at_ms=found.stored_at_ms[0],
        pull_base=ahead + found.first_sequence,
        start=0,
        end=len(found.places),
        tenure=tenure,
    )
    batch.gather(found)
    return batch


def _received(
    served: Served, partition: PartitionName, ahead: int, tenure: Tenure
) -> ReceivedBatch | UnreadableRange:
    first = served.envelope.first_sequence
    try:
        batch = ReceivedBatch(
            served.data,
            partition=partition,
            first_sequence=first,
            stored_at_ms=served.envelope.stored_at_ms,
            pull_base=ahead + first,
            start=served.start,
            end=served.end,
            tenure=tenure,
        )
        check_count(len(batch), served.envelope.count)
    except InvalidBatchError as error:
        at, length = first + served.start, served.end - served.start
        return UnreadableRange(ahead + at, length, tenure, at, str(error))
    return batch

"""What tests of the engine do again and again."""

from collections.abc import Iterator
from typing import Any

from pulque.model.batch import read_header, seed_of
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import Buffer
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem

__all__ = ["Nobody", "bodies_of", "index_all", "opened", "packed", "partition_of", "store"]


class Nobody:
    """Watches no replay."""

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None: ...

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None: ...


def opened(files: MemoryFileSystem, **options: Any) -> Engine:
    """Open an engine that never runs out of room by itself."""
    chosen = StorageOptions(**{"reserve_bytes": 0, **options})
    return Engine(files, chosen, SilentListener(), Nobody(), 1)


def packed(name: str, *bodies: bytes) -> bytes:
    """Pack plain bodies."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body)
    return packer.encode(seed=seed_of(name), ids=IdSource(1).many(1, len(bodies)), created_at_ms=1)


def store(engine: Engine, name: str, *bodies: bytes, now_ms: int = 1) -> bytes:
    """Store one batch; it is confirmed at once."""
    partition = engine.create_partition(PartitionName(name), now_ms)
    batch = packed(name, *bodies)
    engine.append(partition, batch, read_header(batch), now_ms=now_ms, wants_disk=False)
    engine.write()
    return batch


def partition_of(engine: Engine, name: str) -> Partition:
    """Return a partition that is there."""
    partition = engine.partition(name)
    assert partition is not None
    return partition


def bodies_of(engine: Engine, name: str, start: int = 0, step: int = 1000) -> list[bytes]:
    """Read everything from a sequence on, at most ``step`` messages at a time."""
    partition = partition_of(engine, name)
    found: list[bytes] = []
    at = ConsumeSequence(start)
    while at < partition.confirmed:
        span = engine.span(partition, at, max_messages=step, max_bytes=1 << 20)
        if not span.pieces:
            break
        messages = _messages(name, engine.read(partition, span))
        found += [m.body for m in messages if span.first_sequence <= m.sequence < span.end]
        at = span.end
    return found


def index_all(engine: Engine) -> None:
    """Write the index of every sealed segment."""
    while (job := engine.begin_index()) is not None:
        job.run()
        engine.finish_index(job)


def _messages(name: str, records: list[Buffer]) -> Iterator[Message]:
    data = b"".join(records)
    at = 0
    while at < len(data):
        envelope = read_envelope(data, at)
        assert isinstance(envelope, Envelope), envelope
        batch = StoredBatch(
            data[at + ENVELOPE_SIZE : at + envelope.size],
            partition=PartitionName(name),
            first_sequence=envelope.first_sequence,
            stored_at_ms=envelope.stored_at_ms,
        )
        yield from (Message(batch, i) for i in range(len(batch)))
        at += envelope.size

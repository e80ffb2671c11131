"""Recover the state of a delay server from its data directory.

The checkpoint has the replayed end of the message log, and the sizes of the schedule logs
at that time. Only bytes beyond these are read.
"""

from dataclasses import dataclass, field
from struct import Struct

from pulque.delay.schedule.checkpoint import Extent
from pulque.delay.schedule.entries import MOVED_PREFIX
from pulque.delay.schedule.replay import replay_rest
from pulque.delay.schedule.store import ScheduleStore, next_sequences, open_intents
from pulque.model.batch import read_header
from pulque.model.positions import StartCount
from pulque.rules.dedup import Dedup
from pulque.storage.engine import Engine
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions

__all__ = ["RecoveredSchedule", "encode_closed", "encode_sequences", "recover"]

_PREFIX = b"next."
_CLOSED_KEY = b"closed"
_CLOSED = Struct("<QQ")
_START_BITS = 32
"""The number of bits for batches to one partition between two starts."""


@dataclass(slots=True)
class _Observer:
    """Observes the replay of the message log."""

    dedup: Dedup = field(default_factory=Dedup)
    extent: Extent = field(default_factory=lambda: Extent(0, 0, {}, {}, frozenset()))
    sequences: dict[tuple[str, str], int] = field(default_factory=dict)
    closed: tuple[int, int] = (0, 0)
    """The start whose last act was the checkpoint, and the least number since."""

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        self.dedup.load(state)
        self.extent = Extent.load(state)
        self.closed = _CLOSED.unpack(state.get(_CLOSED_KEY, bytes(_CLOSED.size)))
        for key, value in state.items():
            if key.startswith(_PREFIX):
                group, _, partition = key[len(_PREFIX) :].decode().partition("\0")
                self.sequences[group, partition] = int.from_bytes(value, "little")

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Apply one batch, as after a live append."""
        if not partition.name.startswith(MOVED_PREFIX):
            header = read_header(batch)
            self.dedup.stored(partition.id, header, entry.first_sequence, entry.stored_at_ms)


@dataclass(frozen=True, slots=True)
class RecoveredSchedule:
    """The state of a delay server."""

    engine: Engine
    store: ScheduleStore
    dedup: Dedup
    sequences: dict[tuple[str, str], int]
    """For each broker group and partition, the number of the next batch …"""
    first_sequence: int
    """… which is not less than this."""
    extent: Extent
    """The extent in the checkpoint."""
    unresumed: frozenset[int]
    """Ticks with batches of unknown outcome."""
    batches: int
    """The number of batches of the message log that were scheduled."""


def recover(
    files: FileSystem, options: StorageOptions, listener: Listener, tick_ms: int, now_ms: int
) -> RecoveredSchedule:
    """Open and recover a data directory."""
    observer = _Observer()
    engine = Engine(files, options, listener, observer, now_ms)
    store = ScheduleStore(files, listener, tick_ms)
    noted = store.recover(observer.extent)
    sequences = observer.sequences
    for key, number in next_sequences(noted).items():
        sequences[key] = max(sequences.get(key, 0), number)
    # A broker takes a number that it knows for a batch that it has. What a killed server used is
    # in dispatch logs and checkpoints, and any of these may be gone or older than it should be.
    closed, first_sequence = observer.closed
    if closed != engine.start_count - 1:
        first_sequence = engine.start_count << _START_BITS
    was_tick_ms = observer.extent.tick_ms or tick_ms
    batches = replay_rest(engine, store, listener, was_tick_ms)
    store.tell_made_again()
    unresumed = frozenset(tick for tick, each in noted if open_intents(each))
    return RecoveredSchedule(
        engine,
        store,
        observer.dedup,
        sequences,
        first_sequence,
        observer.extent,
        unresumed,
        batches,
    )


def encode_closed(start: StartCount, first_sequence: int) -> dict[bytes, bytes | None]:
    """Encode that this is a server's last checkpoint, after which it numbers no batch."""
    return {_CLOSED_KEY: _CLOSED.pack(start, first_sequence)}


def encode_sequences(sequences: dict[tuple[str, str], int]) -> dict[bytes, bytes | None]:
    """Encode the numbers of the next batches for a checkpoint."""
    return {
        _PREFIX + "\0".join(key).encode(): number.to_bytes(8, "little")
        for key, number in sequences.items()
    }

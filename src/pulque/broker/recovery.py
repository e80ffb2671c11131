"""From a data directory to the state of a broker: the checkpoint, then both logs, replayed.

The replay runs through the code that runs live. What follows from facts and is not in the log
yet (retries) is handed to the live code afterwards.
"""

from contextlib import suppress

from pulque.broker.settling.retry import origins_of
from pulque.errors import StorageFullError
from pulque.model.actions import DeadPurged
from pulque.model.batch import Flag, read_header
from pulque.model.message import StoredBatch
from pulque.model.names import Group, is_dead, is_wait, owner_of
from pulque.model.positions import ConsumeSequence
from pulque.rules.adoption import Adoption, Adoptions
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import load_state
from pulque.rules.dead import DeadLetterState
from pulque.rules.dedup import Dedup
from pulque.rules.schedule import Schedule
from pulque.storage.engine import Engine
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions

__all__ = ["Recovered", "recover"]


class Recovered:
    """The state of a broker; watches the message log while it is replayed."""

    def __init__(self) -> None:
        self.dedup = Dedup()
        self.consumption = Consumption()
        self.schedule = Schedule()
        self.dead = DeadLetterState()
        self.adoptions = Adoptions()
        self.batches = 0
        self.facts = 0
        self.was_cut = False
        """Whether a power cut took messages that positions were behind, or facts that retries
        followed from: no checkpoint from before may be used again."""
        self._owned: list[tuple[Partition, Group, Entry, bytes]] = []
        """Batches of partitions that belong to groups."""

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        """Start from what a checkpoint holds."""
        self.consumption = load_state(state)
        self.dedup.load(state)
        self.schedule.load(state)
        self.dead.load(state)
        self.adoptions.load(state)

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Take in one batch, as after a live append."""
        self.batches += 1
        header = read_header(batch)
        self.dedup.stored(partition.id, header, entry.first_sequence, entry.stored_at_ms)
        group = owner_of(partition.name)
        if group is not None:
            self._owned.append((partition, group, entry, batch))
        if header.flags & Flag.DUE and is_wait(partition.name):
            self._wait(partition, entry, batch)

    def replay_facts(self, engine: Engine) -> None:
        """Take in all facts since the checkpoint."""
        for owned in self._owned:
            self._follow(engine, *owned)
        self._owned = []
        for fact in engine.replay_actions():
            self.facts += 1
            if isinstance(fact, DeadPurged):
                self.dead.handle(fact)
            self.consumption.handle(fact)
        lacks_facts = self.consumption.end_replay()
        ends = {p.id: p.end for p in engine.partitions.by_id.values()}
        parts = (self.consumption, self.schedule, self.dead, self.adoptions)
        clipped = [part.clip(ends) for part in parts]
        self.was_cut = lacks_facts or any(clipped)

    def _wait(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Take in what waits, by the column of due times."""
        stored = StoredBatch(
            batch,
            partition=partition.name,
            first_sequence=entry.first_sequence,
            stored_at_ms=entry.stored_at_ms,
        )
        self.schedule.add(partition.id, entry.first_sequence, stored.column("due_at_ms"))

    def _follow(
        self, engine: Engine, partition: Partition, group: Group, entry: Entry, batch: bytes
    ) -> None:
        """Take note of what the messages of a batch show to be done."""
        for origin in origins_of(partition.name, batch):
            if origin.adopted:
                sequence = ConsumeSequence(entry.first_sequence + origin.at)
                place = Adoption(partition.id, sequence, entry.stored_at_ms)
                self.adoptions.stored(group, origin.adopted, place)
                continue
            source = engine.partition(origin.partition)
            if source is None:
                continue
            if is_wait(origin.partition):
                self.schedule.remove(source.id, origin.due_ms, [origin.sequence])
            elif is_dead(origin.partition):
                end = ConsumeSequence(origin.sequence + 1)
                self.dead.resolve(source.id, origin.sequence, end)
            else:
                self.consumption.remember_redelivered(source.id, group, [origin.sequence])


def recover(
    files: FileSystem, options: StorageOptions, listener: Listener, now_ms: int
) -> tuple[Engine, Recovered]:
    """Open a data directory and bring it to where it was."""
    recovered = Recovered()
    engine = Engine(files, options, listener, recovered, now_ms)
    recovered.replay_facts(engine)
    if engine.actions.was_cut:
        _begin_segment(engine, recovered.consumption)
    return engine, recovered


def _begin_segment(engine: Engine, consumption: Consumption) -> None:
    """Let the facts to come follow what their numbers stand for, as in every segment."""
    # On a full disk facts are refused as well, and housekeeping begins a segment by and by.
    with suppress(StorageFullError):
        engine.actions.start_segment(consumption.open_facts())

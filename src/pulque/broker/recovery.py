"""From a data directory to the state of a broker: the checkpoint, then both logs, replayed.

The replay runs through the code that runs live. What follows from facts and is not in the log
yet (retries) is handed to the live code afterwards.
"""

from pulque.broker.retry import origins_of
from pulque.model.batch import read_header
from pulque.model.names import PartitionName, owner_of
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import load_state
from pulque.rules.dedup import Dedup
from pulque.storage.engine import Engine
from pulque.storage.files import FileSystem
from pulque.storage.index import Entry
from pulque.storage.listener import Listener
from pulque.storage.options import StorageOptions
from pulque.storage.partitions import Partition

__all__ = ["Recovered", "recover"]


class Recovered:
    """The state of a broker; watches the message log while it is replayed."""

    def __init__(self) -> None:
        self.dedup = Dedup()
        self.consumption = Consumption()
        self.batches = 0
        self.facts = 0
        self.was_clipped = False
        """Whether positions had to be set back, as a power cut took messages away."""
        self._origins: list[tuple[PartitionName, bytes]] = []

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        """Start from what a checkpoint holds."""
        self.consumption = load_state(state)
        self.dedup.load(state)

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Take in one batch, as after a live append."""
        self.batches += 1
        header = read_header(batch)
        self.dedup.stored(partition.id, header, entry.first_sequence, entry.stored_at_ms)
        if owner_of(partition.name) is not None:
            self._origins.append((partition.name, batch))

    def replay_facts(self, engine: Engine) -> None:
        """Take in all facts since the checkpoint."""
        for name, batch in self._origins:
            for source, group, sequence in origins_of(name, batch):
                partition = engine.partition(source)
                if partition is not None:
                    self.consumption.remember_redelivered(partition.id, group, [sequence])
        self._origins = []
        for fact in engine.replay_actions():
            self.facts += 1
            self.consumption.handle(fact)
        self.was_clipped = self.consumption.clip(
            {p.id: p.end for p in engine.partitions.by_id.values()}
        )


def recover(
    files: FileSystem, options: StorageOptions, listener: Listener, now_ms: int
) -> tuple[Engine, Recovered]:
    """Open a data directory and bring it to where it was."""
    recovered = Recovered()
    engine = Engine(files, options, listener, recovered, now_ms)
    recovered.replay_facts(engine)
    return engine, recovered

"""A data directory with one of everything, to be damaged: what is in it, and where."""

from dataclasses import dataclass, replace
from random import Random

from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.engine import Engine
from pulque.storage.indexes.segment_index import Entry
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.ledger import Ledger, Sent
from tests.crash.opening import OWN, open_engine
from tests.crash.workload import SMALL, random_batch, random_fact

__all__ = ["NOW_MS", "OPTIONS", "Archive", "readable"]

NOW_MS = 1_700_000_000_000
OPTIONS = replace(SMALL, segment_bytes=10**6, segment_batches=10**6, action_segment_bytes=300)
NAMES = [PartitionName(name) for name in ("orders", "logs#1", "%retry%orders%billing")]


@dataclass(slots=True)
class Archive:
    """A stopped engine's files, and the ledger of what they hold.

    All of it was synced, and something was appended after that: nothing in it but the very last
    record and fact can be taken for a torn tail.
    """

    files: MemoryFileSystem
    ledger: Ledger

    @classmethod
    def build(cls, seed: int, *, checkpoints: bool) -> "Archive":
        files = MemoryFileSystem(random=Random(seed))
        archive = cls(files, Ledger())
        random = Random(seed)
        ids = IdSource(seed)
        engine = open_engine(files, OPTIONS, NOW_MS).engine
        for i in range(90):
            archive._send(engine, random, ids, NOW_MS + i)
            if i % 2:
                archive._act(engine, random)
            if i % 7 == 0:
                archive.sync(engine)
                archive._index(engine)
            if i == 62:
                engine.remove_oldest().run()
            if i in (12, 24, 36, 48, 60, 70, 80):
                engine.roll(NOW_MS + i)
            if checkpoints and i in (30, 84):
                archive._checkpoint(engine)
        archive.sync(engine)
        archive._send(engine, random, ids, NOW_MS + 99)
        archive._act(engine, random)
        archive.sync(engine)
        archive._index(engine)
        engine.close()
        return archive

    def copy(self) -> MemoryFileSystem:
        return self.files.after_power_cut(self.files.operations, Cut.KEPT, Random(0))

    def paths(self) -> list[str]:
        return sorted(self.files.contents())

    def size(self, path: str) -> int:
        return len(self.files.contents()[path])

    def everything(self) -> dict[tuple[str, int], bytes]:
        """Every message that is there, as its batch, by partition and first sequence."""
        oldest = min(
            int(path[9:29]) for path in self.paths() if path.endswith(".log") and path[0] == "m"
        )
        return {
            (name, sent.entry.first_sequence): sent.batch
            for name, all_sent in self.ledger.sent.items()
            for sent in all_sent
            if sent.entry.offset >= oldest
        }

    def hit_by(self, path: str, start: int, end: int) -> set[tuple[str, int]]:
        """Say which batches have bytes in a range of a segment's file."""
        base = int(path[9:29])
        return {
            (name, sent.entry.first_sequence)
            for name, all_sent in self.ledger.sent.items()
            for sent in all_sent
            if _overlap(sent.entry, base + start, base + end)
        }

    def _send(self, engine: Engine, random: Random, ids: IdSource, now_ms: int) -> None:
        name = random.choice(NAMES)
        partition = engine.create_partition(name, now_ms)
        batch = random_batch(random, ids, name)
        appended = engine.append(
            partition, batch, read_header(batch), now_ms=now_ms, wants_disk=True
        )
        engine.write()
        self.ledger.sent.setdefault(name, []).append(Sent(batch, appended.entry, wants_disk=True))

    def _act(self, engine: Engine, random: Random) -> None:
        if engine.actions.needs_roll():
            engine.actions.start_segment(())
        fact = random_fact(random)
        engine.append_action(fact)
        self.ledger.facts.append(fact)

    def _checkpoint(self, engine: Engine) -> None:
        number = len(self.ledger.states)
        state = {
            OWN + b"number": b"%d" % number,
            OWN + b"facts": b"%d" % len(self.ledger.facts),
        }
        self.ledger.states.append(state)
        job = engine.begin_checkpoint({**state})
        job.run()
        engine.finish_checkpoint(job)

    @staticmethod
    def sync(engine: Engine) -> None:
        job = engine.begin_sync(actions=True)
        if job is not None:
            job.run()
            engine.finish_sync(job)

    @staticmethod
    def _index(engine: Engine) -> None:
        while (job := engine.begin_index()) is not None:
            job.run()
            engine.finish_index(job)


def readable(engine: Engine) -> dict[tuple[str, int], bytes]:
    """Return every batch that can be read, by partition and first sequence; holes are left out."""
    found = {}
    for name, partition in engine.partitions.by_name.items():
        sequence = partition.start
        while sequence < partition.confirmed:
            span = engine.span(partition, sequence, max_messages=10**6, max_bytes=10**9)
            if not span.pieces:
                break
            sequence = span.end
            for piece in span.pieces:
                alone = span._replace(pieces=[piece])
                data = b"".join(engine.read(partition, alone))
                if data:
                    found[name, int(piece.entry.first_sequence)] = data[ENVELOPE_SIZE:]
    return found


def _overlap(entry: Entry, start: int, end: int) -> bool:
    return entry.offset < end and start < entry.offset + entry.size

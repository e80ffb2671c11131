"""Opening an engine, and keeping what it showed and said on the way."""

from dataclasses import dataclass, field

import hypothesis

from pulque.model.actions import Action
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import FileSystem
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions

__all__ = ["EFFORT", "OWN", "Heard", "Opened", "open_engine"]

EFFORT = max(1, hypothesis.settings().max_examples // 50)
"""How much to try: 1 while one works, 10 in ``make test``, 200 by night."""

OWN = b"test:"
"""What keys of the checkpoint begin with that are the test's own."""


class Heard(SilentListener):
    """A listener that remembers."""

    def __init__(self) -> None:
        self.corruptions: list[tuple[str, int, int, str]] = []
        self.cuts: list[tuple[str, int, int]] = []
        self.rebuilt: list[str] = []
        self.refused: list[str] = []
        self.written: list[str] = []
        self.sealed: list[str] = []
        self.removed: list[str] = []

    def segment_sealed(self, path: str, size: int) -> None:
        self.sealed.append(path)

    def segment_removed(self, path: str, size: int) -> None:
        self.removed.append(path)

    def tail_cut(self, path: str, offset: int, size: int) -> None:
        self.cuts.append((path, offset, size))

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        self.corruptions.append((path, offset, size, reason))

    def index_rebuilt(self, path: str, entries: int) -> None:
        self.rebuilt.append(path)

    def checkpoint_written(self, path: str, size: int) -> None:
        self.written.append(path)

    def checkpoint_refused(self, path: str, reason: str) -> None:
        self.refused.append(path)


@dataclass(slots=True)
class Replayed:
    """An observer that remembers."""

    state: dict[bytes, bytes] = field(default_factory=dict)
    seen: dict[str, list[tuple[Entry, bytes]]] = field(default_factory=dict)

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        assert not self.seen, "batches were replayed before the checkpoint was shown"
        self.state = {key: value for key, value in state.items() if key.startswith(OWN)}

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        self.seen.setdefault(partition.name, []).append((entry, batch))


@dataclass(slots=True)
class Opened:
    """An engine, and what recovery showed."""

    engine: Engine
    heard: Heard
    state: dict[bytes, bytes]
    seen: dict[str, list[tuple[Entry, bytes]]]
    facts: list[Action]


def open_engine(files: FileSystem, options: StorageOptions, now_ms: int) -> Opened:
    heard = Heard()
    replayed = Replayed()
    engine = Engine(files, options, heard, replayed, now_ms)
    facts = list(engine.replay_actions())
    return Opened(engine, heard, replayed.state, replayed.seen, facts)

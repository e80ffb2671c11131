"""Whatever is appended, rolled, indexed, removed and reopened, reads equal a list in memory.

The model keeps each partition as a plain list of bodies. A read by sequence, count and bytes must
return a run of that list, at least one message if there is one, and reading on from its end must
meet every message once. A search by time equals a walk over the list.
"""

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pulque.model.batch import Codec, read_header, verify_crc
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.logs.message_log import Appended
from pulque.testing.files import MemoryFileSystem
from tests.crash.opening import open_engine
from tests.crash.workload import SMALL, make_batch

NAMES = [PartitionName(name) for name in ("orders", "logs", "%retry%orders%g")]


@dataclass(slots=True)
class Modelled:
    """One partition, as a list."""

    bodies: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    start: int = 0
    confirmed: int = 0
    waits: list[int] = field(default_factory=list)
    """Ends of batches that wait for a sync, or behind one that does."""


@dataclass(frozen=True, slots=True)
class Queued:
    name: str
    bodies: list[bytes]
    wants_disk: bool
    appended: Appended


class StorageMachine(RuleBasedStateMachine):
    """Runs an engine and a list side by side."""

    @initialize(
        segment_batches=st.integers(1, 8),
        cache=st.sampled_from([0, 500, 100_000]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, segment_batches: int, cache: int, seed: int) -> None:
        self.options = replace(
            SMALL,
            segment_batches=segment_batches,
            segment_bytes=10_000,
            tail_cache_bytes=cache,
        )
        self.random = Random(seed)
        self.ids = IdSource(seed)
        self.now_ms = 1_700_000_000_000
        self.newest_ms = 0
        self.files = MemoryFileSystem()
        self.engine = open_engine(self.files, self.options, self.now_ms).engine
        self.model: dict[str, Modelled] = {}
        self.queue: list[Queued] = []

    # Changes.

    @rule(
        name=st.sampled_from(NAMES),
        sizes=st.lists(st.integers(0, 400), min_size=1, max_size=6),
        codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD]),
        wants_disk=st.booleans(),
        later_ms=st.sampled_from([0, 0, 1, 50, -20]),
    )
    def append(
        self,
        name: PartitionName,
        sizes: list[int],
        codec: Codec,
        wants_disk: bool,  # noqa: FBT001  # hypothesis passes it by name
        later_ms: int,
    ) -> None:
        self.now_ms += later_ms
        if name not in self.model:
            partition = self.engine.create_partition(name, self.now_ms)
            self._take_written()
            self.model[name] = Modelled()
        partition = self.engine.partitions.by_name[name]
        bodies = [self.random.randbytes(size) for size in sizes]
        batch = make_batch(name, bodies, ids=self.ids, codec=codec)
        before = len(self.engine.segments)
        appended = self.engine.append(
            partition, batch, read_header(batch), now_ms=self.now_ms, wants_disk=wants_disk
        )
        if len(self.engine.segments) > before:
            self._take_written()
        self.newest_ms = max(self.newest_ms, self.now_ms)
        assert appended.entry.stored_at_ms >= self.newest_ms
        self.newest_ms = appended.entry.stored_at_ms
        self.queue.append(Queued(name, bodies, wants_disk, appended))

    @rule()
    def write(self) -> None:
        told = {partition.name for partition in self.engine.write()}
        grown = {name for name, model in self.model.items() if model.confirmed}
        before = {name: self.model[name].confirmed for name in grown}
        self._take_written()
        assert {
            name for name, model in self.model.items() if model.confirmed > before.get(name, 0)
        } <= told

    @rule(meanwhile=st.booleans())
    def sync(self, meanwhile: bool) -> None:  # noqa: FBT001
        self.write()
        waiting = {name: list(model.waits) for name, model in self.model.items()}
        job = self.engine.begin_sync(actions=True)
        if meanwhile and self.model:
            name = PartitionName(next(iter(self.model)))
            self.append(name, [10], Codec.NONE, True, 0)
            self.write()
        if job is not None:
            job.run()
            self.engine.finish_sync(job)
        for waiter, ends in waiting.items():
            model = self.model[waiter]
            for end in ends:
                if end in model.waits:
                    model.waits.remove(end)
                    model.confirmed = max(model.confirmed, end)

    @rule()
    def roll(self) -> None:
        self.engine.roll(self.now_ms)
        self._take_written()
        self.newest_ms = max(self.newest_ms, self.now_ms)

    @rule()
    def index(self) -> None:
        job = self.engine.begin_index()
        if job is not None:
            job.run()
            self.engine.finish_index(job)

    @rule()
    def checkpoint(self) -> None:
        job = self.engine.begin_checkpoint({})
        self._take_written()
        job.run()
        self.engine.finish_checkpoint(job)

    @precondition(lambda self: len(self.engine.segments) > 2 and not self.queue)
    @rule()
    def remove_oldest(self) -> None:
        base = self.engine.segments[1].base
        self.engine.remove_oldest().run()
        for name, model in self.model.items():
            kept = [s for s in self.stored[name] if s[0] >= base]
            model.start = max(model.start, kept[0][1] if kept else len(model.bodies))
            # What is gone waits for nobody.
            model.confirmed = max(model.confirmed, model.start)
            model.waits = [end for end in model.waits if end > model.start]

    @rule(kill=st.booleans())
    def reopen(self, kill: bool) -> None:  # noqa: FBT001
        self.write()
        if not kill:
            self.engine.close()
        opened = open_engine(self.files, self.options, self.now_ms)
        assert not opened.heard.corruptions
        assert not opened.heard.cuts
        self.engine = opened.engine
        self.newest_ms = max(self.newest_ms, self.now_ms)
        for model in self.model.values():
            model.confirmed = len(model.bodies)
            model.waits = []

    # What must hold.

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if not self.model:
            return
        name = data.draw(st.sampled_from(sorted(self.model)))
        model = self.model[name]
        sequence = data.draw(st.integers(0, len(model.bodies) + 2))
        max_messages = data.draw(st.integers(1, 30))
        max_bytes = data.draw(st.sampled_from([0, 1, 300, 1000, 5000, 10**6]))
        first, bodies, size = self._read(name, sequence, max_messages, max_bytes)
        wanted = max(sequence, model.start)

        assert bodies == model.bodies[first : first + len(bodies)]
        assert first + len(bodies) <= max(model.confirmed, first)
        assert len(bodies) <= max_messages
        if wanted < model.confirmed:
            assert first == wanted
            assert bodies, "there are messages, and none came"
        if len(bodies) > 1:
            assert size <= max_bytes

    @rule(data=st.data())
    def search_by_time(self, data: st.DataObject) -> None:
        if not self.model:
            return
        name = data.draw(st.sampled_from(sorted(self.model)))
        model = self.model[name]
        around = data.draw(st.sampled_from([*model.times, self.now_ms]))
        at_ms = around + data.draw(st.sampled_from([-1, 0, 1]))
        found = self.engine.at_time(self.engine.partitions.by_name[name], at_ms)

        stored = [i for i, time in enumerate(model.times[: model.confirmed]) if time >= at_ms]
        expected = stored[0] if stored else model.confirmed
        assert found == max(expected, model.start)

    @invariant()
    def numbers_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name, model in self.model.items():
            partition = self.engine.partitions.by_name[name]
            assert partition.confirmed == model.confirmed
            assert partition.start == model.start
            queued = sum(len(q.bodies) for q in self.queue if q.name == name)
            assert partition.end == len(model.bodies) + queued

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.sync(meanwhile=False)
        for name, model in self.model.items():
            sequence, found = model.start, []
            while sequence < model.confirmed:
                first, bodies, _ = self._read(name, sequence, 7, 700)
                assert first == sequence
                found += bodies
                sequence += len(bodies)
            assert found == model.bodies[model.start :]

    @property
    def stored(self) -> dict[str, list[tuple[int, int]]]:
        return self._stored

    def _take_written(self) -> None:
        """Move what was written from the queue to the lists, and confirm what may be."""
        queue, self.queue = self.queue, []
        for queued in queue:
            assert queued.appended.is_written
            model = self.model[queued.name]
            entry = queued.appended.entry
            assert entry.first_sequence == len(model.bodies)
            self._stored.setdefault(queued.name, []).append((entry.offset, entry.first_sequence))
            model.bodies += queued.bodies
            model.times += [entry.stored_at_ms] * len(queued.bodies)
            if queued.wants_disk or model.waits:
                model.waits.append(len(model.bodies))
            else:
                model.confirmed = len(model.bodies)

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, list[tuple[int, int]]] = {}

    def _read(
        self, name: str, sequence: int, max_messages: int, max_bytes: int
    ) -> tuple[int, list[bytes], int]:
        return read_bodies(
            self.engine, name, sequence, max_messages=max_messages, max_bytes=max_bytes
        )


def read_bodies(
    engine: Engine, name: str, sequence: int, *, max_messages: int, max_bytes: int
) -> tuple[int, list[bytes], int]:
    """Return first sequence, bodies, and bytes of what a pull from ``sequence`` on hands out."""
    partition = engine.partitions.by_name[name]
    span = engine.span(
        partition, ConsumeSequence(sequence), max_messages=max_messages, max_bytes=max_bytes
    )
    data = b"".join(engine.read(partition, span))
    bodies = []
    at = 0
    while at < len(data):
        envelope = read_envelope(data, at)
        assert isinstance(envelope, Envelope)
        batch = data[at + ENVELOPE_SIZE : at + envelope.size]
        assert verify_crc(batch, partition.seed)
        stored = StoredBatch(
            batch,
            partition=partition.name,
            first_sequence=envelope.first_sequence,
            stored_at_ms=envelope.stored_at_ms,
        )
        messages = [Message(stored, i) for i in range(len(stored))]
        wanted = [m for m in messages if span.first_sequence <= m.sequence < span.end]
        assert [m.sequence for m in wanted] == list(
            range(wanted[0].sequence, wanted[0].sequence + len(wanted))
        )
        bodies += [m.body for m in wanted]
        at += envelope.size
    assert len(bodies) == span.length
    # Of a batch in part, what counts is its share.
    size = sum(p.entry.size * (p.end - p.start) // p.entry.count for p in span.pieces)
    return span.first_sequence, bodies, size


TestStorageMachine = StorageMachine.TestCase
TestStorageMachine.settings = settings(
    max_examples=min(settings().max_examples, 1000), stateful_step_count=30
)

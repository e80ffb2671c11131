"""A workload out of random steps that writes everything it was promised into a ledger."""

from collections.abc import Callable
from random import Random

import pytest

from pulque.errors import StorageFullError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    GroupConfigured,
    GroupOpened,
    GroupReset,
    NackedDelivery,
    PassedOver,
    Pulled,
    Settled,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.batch import Codec, read_header, seed_of
from pulque.model.groups import GroupSettings, Mode, RetrySettings, tag_filter
from pulque.model.ids import IdSource
from pulque.model.names import ConsumerId, Group, PartitionName, Pattern
from pulque.model.pack import BatchPacker
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.storage.logs.message_log import Appended
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem
from tests.crash.ledger import Ledger, Sent
from tests.crash.opening import OWN, Opened, open_engine

__all__ = ["SMALL", "Workload", "make_batch", "random_batch", "random_fact"]

SMALL = StorageOptions(
    segment_bytes=2500,
    segment_batches=12,
    action_segment_bytes=400,
    tail_cache_bytes=600,
    reserve_bytes=0,
)
"""So small that a few hundred steps seal and remove many segments."""
NAMES = [PartitionName(name) for name in ("orders", "logs#1", "%retry%orders%billing", "a.b-c_d")]


class Workload:
    """Drives an engine by random steps."""

    def __init__(
        self,
        files: MemoryFileSystem,
        random: Random,
        *,
        ledger: Ledger | None = None,
        opened: Opened | None = None,
        options: StorageOptions = SMALL,
        now_ms: int = 1_700_000_000_000,
    ) -> None:
        self.files = files
        self.random = random
        self.options = options
        self.now_ms = now_ms
        self.ids = IdSource(random.getrandbits(38))
        self.ledger = Ledger() if ledger is None else ledger
        self.opened = open_engine(files, options, self.now_ms) if opened is None else opened
        self.ledger.opened(self.opened)
        self.ledger.note(files.operations)
        self._steps: list[Callable[[], None]] = [self._send] * 8
        self._steps += [self._send_many] * 2 + [self._act] * 5 + [self._sync] * 4
        self._steps += [self._sync_meanwhile] * 2 + [self._checkpoint] * 2
        self._steps += [self._checkpoint_meanwhile, self._roll, self._remove]
        self._steps += [self._index] * 2
        self._steps += [self._kill, self._refuse]

    @classmethod
    def begin(
        cls, files: MemoryFileSystem, random: Random, options: StorageOptions = SMALL
    ) -> "Workload":
        """Start on an empty directory; nothing is promised before."""
        ledger = Ledger()
        ledger.note(0)
        return cls(files, random, ledger=ledger, options=options)

    def run(self, steps: int) -> Ledger:
        for _ in range(steps):
            self.step(self.random.choice(self._steps))
        return self.ledger

    def go_on(self) -> None:
        """Show that the engine works: it takes, syncs, reads and recovers messages and facts."""
        for step in (self._send, self._act, self._sync, self._kill):
            self.step(step)
        if self.random.random() < 0.2:
            self.run(4)
            self.step(self._kill)

    def never_refuse(self) -> None:
        """Leave the faults of the file system to the test."""
        self._steps = [step for step in self._steps if step != self._refuse]

    def remove_often(self) -> None:
        """Keep few segments, so that most cuts are near the removal of one."""
        self._steps += [self._roll] * 2 + [self._remove] * 12

    def step(self, step: Callable[[], None]) -> None:
        self.now_ms += self.random.choice((0, 0, 1, 1, 40, -3))
        step()
        self.note()

    def note(self) -> None:
        self.ledger.take_claims(self.opened.engine)
        self.ledger.note(self.files.operations)

    def append(self, *, wants_disk: bool) -> tuple[str, Appended]:
        engine = self.opened.engine
        name = self.random.choice(NAMES)
        partition = engine.create_partition(name, self.now_ms)
        self.ledger.sent.setdefault(name, [])
        batch = random_batch(self.random, self.ids, name)
        appended = engine.append(
            partition, batch, read_header(batch), now_ms=self.now_ms, wants_disk=wants_disk
        )
        assert appended.entry.first_sequence == self.ledger.end(name)
        self.ledger.sent[name].append(Sent(batch, appended.entry, wants_disk))
        return name, appended

    def _send(self) -> None:
        _, appended = self.append(wants_disk=self.random.random() < 0.5)
        self.opened.engine.write()
        assert appended.is_written

    def _send_many(self) -> None:
        many = [self.append(wants_disk=self.random.random() < 0.3) for _ in range(4)]
        self.opened.engine.write()
        assert all(appended.is_written for _, appended in many)

    def _act(self) -> None:
        engine = self.opened.engine
        if engine.actions.needs_roll():
            opened = [random_fact(self.random) for _ in range(self.random.randrange(3))]
            self.ledger.facts += opened
            engine.actions.start_segment(opened)
        for _ in range(self.random.randint(1, 3)):
            fact = random_fact(self.random)
            self.ledger.facts.append(fact)
            engine.append_action(fact)

    def _sync(self) -> None:
        self._run_sync(lambda: None)

    def _sync_meanwhile(self) -> None:
        self._run_sync(self._send)

    def _run_sync(self, meanwhile: Callable[[], None]) -> None:
        engine = self.opened.engine
        actions = self.random.random() < 0.6
        ends, facts = self.ledger.ends(), len(self.ledger.facts)
        job = engine.begin_sync(actions=actions)
        meanwhile()
        self.note()
        if job is not None:
            job.run()
        self.ledger.promise(ends)
        if actions:
            self.ledger.durable_facts = max(self.ledger.durable_facts, facts)
        self.note()
        if job is not None:
            engine.finish_sync(job)
        for name, end in ends.items():
            assert engine.partitions.by_name[name].confirmed >= end, "a sync confirmed nothing"

    def _checkpoint(self) -> None:
        self._run_checkpoint(lambda: None)

    def _checkpoint_meanwhile(self) -> None:
        self._run_checkpoint(self._send)

    def _run_checkpoint(self, meanwhile: Callable[[], None]) -> None:
        engine = self.opened.engine
        ledger = self.ledger
        number = len(ledger.states)
        changes: dict[bytes, bytes | None] = {
            OWN + b"number": b"%d" % number,
            OWN + b"facts": b"%d" % len(ledger.facts),
        }
        for name, end in ledger.ends().items():
            changes[OWN + b"end:" + name.encode()] = b"%d" % end
        key = OWN + b"%d" % self.random.randrange(4)
        changes[key] = self.random.choice((None, self.random.randbytes(30)))
        merged = {**ledger.states[-1], **changes}
        ledger.states.append({k: v for k, v in merged.items() if v is not None})
        job = engine.begin_checkpoint(changes)
        meanwhile()
        self.note()
        job.run()
        ledger.durable_state = number
        self.note()
        engine.finish_checkpoint(job)

    def _roll(self) -> None:
        self.opened.engine.roll(self.now_ms)

    def _index(self) -> None:
        job = self.opened.engine.begin_index()
        if job is not None:
            job.run()
            self.note()
            self.opened.engine.finish_index(job)

    def _remove(self) -> None:
        engine = self.opened.engine
        if len(engine.segments) > 3:
            job = engine.remove_oldest()
            for name in self.ledger.sent:
                self.ledger.starts[name] = engine.partitions.by_name[name].start
            self.note()
            job.run()

    def _refuse(self) -> None:
        """Let the disk be full for one write: what is refused must never appear."""
        engine = self.opened.engine
        name = self.random.choice(NAMES)
        batch = random_batch(self.random, self.ids, name)
        part = self.random.randrange(2 * len(batch))
        self.files.fail_after(1, StorageFullError("no room"), part=part)
        ends = {n: p.end for n, p in engine.partitions.by_name.items()}
        before = self.files.operations
        with pytest.raises(StorageFullError):
            self._try_to_send(name, batch)
        self.ledger.unknown.update(range(before + 1, self.files.operations))
        assert ends == {n: p.end for n, p in engine.partitions.by_name.items()}
        self.note()
        if not engine.actions.needs_roll():
            self.files.fail_after(1, StorageFullError("no room"), part=part)
            before = self.files.operations
            with pytest.raises(StorageFullError):
                engine.append_action(random_fact(self.random))
            self.ledger.unknown.update(range(before + 1, self.files.operations))

    def _try_to_send(self, name: PartitionName, batch: bytes) -> None:
        engine = self.opened.engine
        partition = engine.create_partition(name, self.now_ms)
        header = read_header(batch)
        engine.append(partition, batch, header, now_ms=self.now_ms, wants_disk=True)
        engine.write()

    def _kill(self) -> None:
        """End the process, not the machine: all that was written is there."""
        self.opened = open_engine(self.files, self.options, self.now_ms)
        self.ledger.note(self.files.operations)
        self.ledger.check(self.opened, self.files.operations)
        ends = {n: p.end for n, p in self.opened.engine.partitions.by_name.items()}
        assert ends == self.ledger.ends()
        self.ledger.opened(self.opened)


def random_batch(random: Random, ids: IdSource, name: str) -> bytes:
    count = random.choice((1, 1, 2, 5))
    bodies = [random.randbytes(random.choice((0, 3, 20, 60, 200))) for _ in range(count)]
    codec = random.choice((Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD))
    tags = random.choice(((), ("red",), ("red", "blue")))
    return make_batch(name, bodies, ids=ids, codec=codec, tags=tags)


def make_batch(
    name: str,
    bodies: list[bytes],
    *,
    ids: IdSource,
    codec: Codec = Codec.NONE,
    tags: tuple[str, ...] = (),
) -> bytes:
    packer = BatchPacker()
    for body in bodies:
        packer.add(body, tags=tags)
    return packer.encode(
        seed=seed_of(name), ids=ids.many(1000, len(bodies)), created_at_ms=1000, codec=codec
    )


def random_fact(random: Random) -> Action:  # noqa: PLR0911  # one for each kind
    subscription = SubscriptionId(random.randrange(5))
    sequence = random.randrange(1000)
    match random.randrange(8):
        case 0:
            return GroupOpened(PartitionId(1), Group("billing"), ConsumeSequence(sequence))
        case 1:
            return SubscriptionOpened(
                subscription, PartitionId(2), Group("g"), ConsumerId("host@app:1"), sequence
            )
        case 2:
            tenure = Tenure(Epoch(0), StartCount(random.randrange(9)))
            pull = PullSequence(random.randrange(99))
            return Pulled(subscription, tenure, pull, ConsumeSequence(sequence), 7, 1234)
        case 3:
            nacked = NackedDelivery(PullSequence(sequence), 0, "why" * random.randrange(9))
            first, last = PullSequence(sequence), PullSequence(sequence + 3)
            return Settled(subscription, first, last, (nacked,) * random.randrange(3), 99)
        case 4:
            return GroupReset(PartitionId(1), Group("billing"), ConsumeSequence(sequence), 55)
        case 5:
            return PassedOver(PartitionId(1), Group("#reader"), ConsumeSequence(sequence))
        case 6:
            tags = [f"tag-{number}" for number in range(random.randrange(4))]
            retry = RetrySettings((1000,) * random.randrange(3), 10, random.randrange(9))
            mode = random.choice(list(Mode))
            told = GroupSettings(mode, tag_filter(tags, tags[1:]), retry)
            return GroupConfigured(Group("billing"), Pattern("order.*"), told)
        case _:
            return ConsumerLost(subscription, "silent " * random.randrange(4), 77)

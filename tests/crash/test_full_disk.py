"""A full disk refuses what it cannot hold, as a whole, and goes on as soon as there is room."""

from dataclasses import replace
from random import Random

import pytest

from pulque.errors import StorageFullError, UsageError
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.storage.engine import Engine
from pulque.storage.logs.message_log import Appended
from pulque.testing.files import MemoryFileSystem
from pulque.testing.power import Wrote
from tests.crash.ledger import read_all
from tests.crash.opening import EFFORT, OWN, Opened, open_engine
from tests.crash.workload import SMALL, make_batch, random_fact

NOW_MS = 1_700_000_000_000
NAMES = [PartitionName(name) for name in ("a", "b", "c")]


class Script:
    """The same steps each time; a step that is refused is done again."""

    def __init__(self, files: MemoryFileSystem) -> None:
        self.files = files
        self.random = Random(7)
        self.ids = IdSource(7)
        self.engine = open_engine(files, SMALL, NOW_MS).engine
        self.sent: dict[str, list[bytes]] = {}
        self.facts: list[object] = []
        self.state: dict[bytes, bytes] = {}
        self.base = 0
        self.refused = 0

    def run(self) -> None:
        for i in range(40):
            self._send(NAMES[i % 3], 1 + i % 4)
            if i % 3 == 0:
                self._act()
            if i % 5 == 0:
                self._index()
            if i % 10 == 9:
                self._checkpoint(i)
            if i % 13 == 12:
                self.engine.remove_oldest().run()

    def _send(self, name: PartitionName, count: int) -> None:
        batches = [make_batch(name, [b"%d" % i] * 5, ids=self.ids) for i in range(count)]
        for _ in range(2):
            before = self._numbers()
            appended: list[Appended] = []
            try:
                partition = self.engine.create_partition(name, NOW_MS)
                appended.extend(self._append(partition.name, batch) for batch in batches)
                self.engine.write()
            except StorageFullError:
                self.refused += 1
                # A roll writes what is queued before it: that much may be stored already.
                batches = self._take_stored(name, batches, appended, before)
                continue
            self._take_stored(name, batches, appended, before)
            return
        raise AssertionError("refused twice")

    def _append(self, name: str, batch: bytes) -> Appended:
        partition = self.engine.partitions.by_name[name]
        return self.engine.append(
            partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=False
        )

    def _take_stored(
        self,
        name: str,
        batches: list[bytes],
        appended: list[Appended],
        before: dict[str, tuple[int, int]],
    ) -> list[bytes]:
        """Note what is stored, check that nothing else changed, and return the rest."""
        self.engine.write()
        stored = [a.batch for a in appended if a.is_written]
        assert stored == batches[: len(stored)]
        self.sent.setdefault(name, []).extend(stored)
        start, end = before.get(name, (0, 0))
        expected = {**before, name: (start, end + 5 * len(stored))}
        found = self._numbers()
        assert {n: e for n, (_, e) in found.items()} == {
            n: e for n, (_, e) in expected.items() if n in found
        }
        return batches[len(stored) :]

    def _numbers(self) -> dict[str, tuple[int, int]]:
        partitions = self.engine.partitions.by_name
        assert all(p.confirmed == p.end for p in partitions.values())
        return {name: (p.start, p.end) for name, p in partitions.items()}

    def _act(self) -> None:
        fact = random_fact(self.random)
        for _ in range(2):
            end = self.engine.actions.end
            try:
                if self.engine.actions.needs_roll():
                    self.engine.actions.start_segment([fact])
                    self.facts.append(fact)
                end = self.engine.actions.end
                self.engine.append_action(fact)
            except StorageFullError:
                self.refused += 1
                assert self.engine.actions.end == end
                continue
            self.facts.append(fact)
            return
        raise AssertionError("refused twice")

    def _index(self) -> None:
        while (job := self.engine.begin_index()) is not None:
            try:
                job.run()
            except StorageFullError:
                self.refused += 1
                continue
            self.engine.finish_index(job)

    def _checkpoint(self, number: int) -> None:
        self.state = {OWN + b"number": b"%d" % number, OWN + b"end": b"x" * number}
        self.base = len(self.facts)
        changes: dict[bytes, bytes | None] = {**self.state}
        for _ in range(2):
            job = self.engine.begin_checkpoint(changes)
            changes = {}  # what was handed over once is kept, whatever happens
            try:
                job.run()
            except StorageFullError:
                self.refused += 1
                self.engine.abandon_checkpoint()
                continue
            self.engine.finish_checkpoint(job)
            return
        raise AssertionError("refused twice")


def check(opened: Opened, script: Script) -> None:
    for name, batches in script.sent.items():
        found = [batch for _, batch in read_all(opened.engine, name)]
        assert found == batches[len(batches) - len(found) :]
        assert opened.engine.partitions.by_name[name].end == 5 * len(batches)
    assert opened.state == script.state
    assert opened.facts == script.facts[script.base :]


@pytest.mark.parametrize("part", [0, 1, 70, 10**6], ids=["none", "a byte", "some", "all"])
def test_a_write_refused_at_any_point_leaves_nothing_behind(part: int) -> None:
    writes = count_writes()
    assert writes > 80
    for nth in range(1, writes + 1, 4 if EFFORT == 1 else 1):
        files = MemoryFileSystem(random=Random(1))
        script = Script(files)
        files.fail_after(nth, StorageFullError("no room"), part=part)
        script.run()
        leftovers = [path for path in files.contents() if path.endswith(".tmp")]
        script.engine.close()

        assert script.refused <= 1
        assert not leftovers
        check(open_engine(files, SMALL, NOW_MS), script)


def count_writes() -> int:
    files = MemoryFileSystem(random=Random(1))
    script = Script(files)
    before = files.operations
    script.run()
    assert not script.refused
    return sum(isinstance(files.operation(i), Wrote) for i in range(before, files.operations))


def test_a_new_segment_that_is_refused_leaves_the_open_one_open() -> None:
    files = MemoryFileSystem(random=Random(1))
    script = Script(files)
    script.run()
    engine = script.engine
    segments = list(engine.segments)
    files.fail_after(1, StorageFullError("no room"), part=10)

    with pytest.raises(StorageFullError):
        engine.roll(NOW_MS)
    assert engine.segments == segments
    engine.roll(NOW_MS)
    assert len(engine.segments) == len(segments) + 1


class TestReserve:
    RESERVE = 5000

    def fill(self) -> tuple[MemoryFileSystem, Engine, int]:
        files = MemoryFileSystem(random=Random(1))
        options = replace(SMALL, reserve_bytes=self.RESERVE)
        engine = open_engine(files, options, NOW_MS).engine
        files.room = 30_000
        stored = 0
        while not engine.is_full:
            stored += send(engine)
            engine.check_room()
        return files, engine, stored

    def test_sends_are_refused_before_the_last_room_is_used(self) -> None:
        files, engine, stored = self.fill()

        assert engine.is_full
        assert stored > 50
        assert 0 < files.free_bytes() < self.RESERVE
        with pytest.raises(StorageFullError, match="less than 5000 bytes are free"):
            send(engine)
        with pytest.raises(StorageFullError):
            engine.create_partition(PartitionName("new"), NOW_MS)

    def test_reading_settling_and_retries_go_on(self) -> None:
        _, engine, stored = self.fill()
        end = engine.actions.end
        engine.append_action(random_fact(Random(1)))
        send(engine, from_reserve=True)
        engine.create_partition(PartitionName("%retry%a%g"), NOW_MS, from_reserve=True)

        assert engine.actions.end > end
        assert len(read_all(engine, "a")) == stored + 1

    def test_room_is_found_without_a_restart(self) -> None:
        files, engine, _ = self.fill()
        engine.remove_oldest().run()
        engine.remove_oldest().run()
        engine.remove_oldest().run()
        send(engine)
        assert not engine.is_full

        files.room = files.room and files.room - files.free_bytes()
        engine.check_room()
        with pytest.raises(StorageFullError):
            send(engine)
        files.room = 10**9
        send(engine)

    def test_the_oldest_segment_goes_even_if_there_is_no_room_at_all(self) -> None:
        files, engine, _ = self.fill()
        files.room = sum(map(len, files.contents().values()))
        oldest = engine.segments[0].path
        engine.remove_oldest().run()

        assert not files.exists(oldest)
        engine.close()
        files.room = None
        assert not open_engine(files, SMALL, NOW_MS).heard.corruptions

    def test_a_start_on_a_full_disk_keeps_indexes_in_memory(self) -> None:
        files, engine, stored = self.fill()
        engine.close()
        for path in files.contents():
            if path.endswith(".index"):
                files.remove(path)
        used = sum(map(len, files.contents().values()))
        files.room = used + 60  # for the count of starts, and not for an index
        opened = open_engine(files, SMALL, NOW_MS)

        assert len(read_all(opened.engine, "a")) == stored
        job = opened.engine.begin_index()
        assert job is not None
        with pytest.raises(StorageFullError):
            job.run()
        files.room = None
        job.run()
        opened.engine.finish_index(job)
        assert len(read_all(opened.engine, "a")) == stored


class TestBallast:
    """A little room that is taken up in advance."""

    def full(self) -> tuple[MemoryFileSystem, Engine]:
        files = MemoryFileSystem(random=Random(1))
        options = replace(SMALL, reserve_bytes=100, ballast_bytes=100_000)
        engine = open_engine(files, options, NOW_MS).engine
        engine.append_action(random_fact(Random(1)))
        files.room = sum(map(len, files.contents().values()))  # somebody else has the rest
        return files, engine

    def test_a_fact_finds_room_when_there_is_none(self) -> None:
        files, engine = self.full()
        assert files.exists("ballast")
        facts = [random_fact(Random(i)) for i in range(20)]
        for fact in facts:
            engine.append_action(fact)

        assert not files.exists("ballast")
        engine.close()
        files.room = None
        assert open_engine(files, SMALL, NOW_MS).facts[1:] == facts

    def test_a_message_does_not(self) -> None:
        files, engine = self.full()
        engine.check_room()

        with pytest.raises(StorageFullError):
            send(engine)
        assert files.exists("ballast")

    def test_it_is_taken_again_when_there_is_room(self) -> None:
        files, engine = self.full()
        engine.append_action(random_fact(Random(2)))
        assert not files.exists("ballast")
        files.room = 10**9
        engine.check_room()

        assert len(files.contents()["ballast"]) == 100_000


def test_the_open_segment_is_never_removed() -> None:
    engine = open_engine(MemoryFileSystem(random=Random(1)), SMALL, NOW_MS).engine

    with pytest.raises(UsageError, match="open segment"):
        engine.remove_oldest()


def send(engine: Engine, *, from_reserve: bool = False) -> int:
    partition = engine.create_partition(PartitionName("a"), NOW_MS, from_reserve=from_reserve)
    batch = make_batch("a", [b"x" * 50], ids=IdSource(3))
    engine.append(
        partition,
        batch,
        read_header(batch),
        now_ms=NOW_MS,
        wants_disk=False,
        from_reserve=from_reserve,
    )
    engine.write()
    return 1

"""Threads read while the owner of the engine appends, rolls, indexes, removes and checkpoints."""

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import OsFileSystem, WouldBlockError
from pulque.storage.options import StorageOptions
from tests.unit.storage.storing import Nobody, bodies_of, partition_of, store

NAMES = ["orders", "logs", "others"]


class Alarm(SilentListener):
    """Hears of damage, which there is none."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        self.heard.append(f"{path} {offset} {size} {reason}")


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Readers:
    """Threads that read everything again and again, each at its own pace."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine = engine
        self.problems: list[str] = []
        self.read = 0
        self._done = Event()
        self._threads = [Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        while not self._done.is_set():
            try:
                self._pass(NAMES[number % len(NAMES)], may_block=number % 2 == 0)
            except WouldBlockError:
                continue
            except BaseException as error:  # noqa: BLE001  # whatever it is, the test must see it
                self.problems.append(f"{type(error).__name__}: {error}")
                return

    def _pass(self, name: str, *, may_block: bool) -> None:
        partition = self.engine.partition(name)
        if partition is None:
            return
        sequence = partition.start
        while sequence < partition.confirmed and not self._done.is_set():
            span = self.engine.span(
                partition, sequence, max_messages=50, max_bytes=5000, may_block=may_block
            )
            if not span.pieces:
                return
            # Retention may have moved the start meanwhile; nothing else may be left out.
            if span.first_sequence != sequence and partition.start <= sequence:
                self.problems.append(f"{name}: {sequence} was skipped to {span.first_sequence}")
            data = b"".join(self.engine.read(partition, span, may_block=may_block))
            for piece in span.pieces:
                body = b"%s-%d" % (name.encode(), piece.entry.first_sequence)
                if body not in data and partition.start <= piece.entry.first_sequence:
                    self.problems.append(f"{name}: {piece.entry.first_sequence} is not there")
            self.engine.at_time(partition, 5)
            self.read += span.length
            sequence = span.end


def keep_house(engine: Engine, turn: int) -> None:
    if turn % 3 == 0 and (job := engine.begin_index()) is not None:
        job.run()
        engine.finish_index(job)
    if turn % 8 == 0:
        checkpoint = engine.begin_checkpoint({})
        checkpoint.run()
        engine.finish_checkpoint(checkpoint)
    if turn % 20 == 19 and len(engine.segments) > 10:
        engine.remove_oldest().run()


@pytest.mark.slow
def test_readers_miss_nothing_and_meet_no_trouble(tmp_path: Path) -> None:
    options = StorageOptions(reserve_bytes=0, segment_batches=20, tail_cache_bytes=2000)
    alarm = Alarm()
    engine = Engine(OsFileSystem(str(tmp_path)), options, alarm, Nobody(), 1)
    readers = Readers(engine, 4)
    try:
        for turn in range(500):
            for name in NAMES:
                store(engine, name, b"%s-%d" % (name.encode(), turn), now_ms=turn)
            keep_house(engine, turn)
    finally:
        readers.stop()

    assert not readers.problems
    assert not alarm.heard
    assert readers.read > 0
    for name in NAMES:
        partition = partition_of(engine, name)
        assert bodies_of(engine, name, partition.start) == [
            b"%s-%d" % (name.encode(), turn) for turn in range(partition.start, 500)
        ]
    engine.close()


def test_a_reader_goes_on_with_a_segment_that_was_removed(tmp_path: Path) -> None:
    options = StorageOptions(reserve_bytes=0, tail_cache_bytes=0)
    engine = Engine(OsFileSystem(str(tmp_path)), options, SilentListener(), Nobody(), 1)
    store(engine, "orders", b"body")
    engine.roll(1)
    segment = engine.segments[0]
    engine.remove_oldest().run()
    # The descriptor must not become another file's while somebody reads it.
    engine.roll(1)

    assert b"body" in segment.read(segment.base, segment.end - segment.base)
    assert not (tmp_path / segment.path).exists()


def test_what_retention_removed_between_finding_and_reading_is_left_out(tmp_path: Path) -> None:
    options = StorageOptions(reserve_bytes=0, tail_cache_bytes=0)
    alarm = Alarm()
    engine = Engine(OsFileSystem(str(tmp_path)), options, alarm, Nobody(), 1)
    store(engine, "orders", b"old")
    engine.roll(1)
    partition = partition_of(engine, "orders")
    span = engine.span(partition, ConsumeSequence(0), max_messages=9, max_bytes=999)
    engine.remove_oldest().run()

    assert engine.read(partition, span) == []
    assert not alarm.heard

"""A search whose batches have to be read from the disk finds what one in memory finds."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulque.errors import StorageError
from pulque.model.batch import read_header, seed_of
from pulque.model.groups import tag_filter
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import READ_BLOCK, File, OsFileSystem, WouldBlockError
from pulque.storage.options import StorageOptions
from pulque.storage.reading import read_ahead as feed
from pulque.storage.reading.tag_search import Budget, TagTest
from pulque.testing.raw import messages_in
from tests.unit.storage.storing import Nobody

NAME = PartitionName("orders")
WANTED = tag_filter(["red"], [])
BATCHES, COUNT = 60, 25


class ColdFiles(OsFileSystem):
    """Whatever is asked for is not in memory."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.is_broken = False

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return _ColdFile(self, super().open(path, create=create, writable=writable))


class _ColdFile:
    def __init__(self, files: ColdFiles, file: File) -> None:
        self._files, self._file = files, file
        self.write, self.sync, self.truncate = file.write, file.sync, file.truncate
        self.size, self.close = file.size, file.close

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        if not may_block:
            raise WouldBlockError
        return self._file.read(size, offset)

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        if self._files.is_broken:
            raise StorageError("the disk is gone")
        return self._file.read_into(buffer, offset, is_cached=is_cached)


def opened(files: OsFileSystem) -> Engine:
    options = StorageOptions(reserve_bytes=0, tail_cache_bytes=0)
    return Engine(files, options, SilentListener(), Nobody(), 1)


def store(engine: Engine) -> list[int]:
    """Store batches of mixed tags in several segments; return what is wanted of them."""
    partition = engine.create_partition(NAME, 1)
    wanted = []
    for number in range(BATCHES):
        packer = BatchPacker()
        for at in range(COUNT):
            sequence = COUNT * number + at
            is_red = sequence * 31 % 17 == 0
            wanted += [sequence] * is_red
            packer.add(b"%d" % sequence * (1 + sequence % 40), tags=["red" if is_red else "blue"])
        batch = packer.encode(seed=seed_of(NAME), ids=bytes(16 * COUNT), created_at_ms=1)
        engine.append(partition, batch, read_header(batch), now_ms=number + 1, wants_disk=False)
        engine.write()
        if number % 25 == 24:
            engine.roll(number + 1)
    return wanted


def scan(engine: Engine, messages: int) -> list[int]:
    """Look through everything, some matches at a time, and compare the bodies."""
    partition = engine.partition(NAME)
    assert partition is not None
    test = TagTest(WANTED.any_bits, WANTED.all_bits)
    at, seen = ConsumeSequence(0), []
    while at < partition.confirmed:
        budget = Budget(messages, 1 << 20, 1000, 100_000)
        found = engine.search.find(partition, at, test, budget)
        records = b"".join(found.buffers)
        for message in messages_in(NAME, found.first_sequence, found.length, records):
            sequence = int(message.sequence)
            assert message.body == b"%d" % sequence * (1 + sequence % 40)
            assert message.stored_at_ms == sequence // COUNT + 1
            seen += [sequence] * (message.tags == ("red",))
        at = found.examined
    return seen


@pytest.fixture(params=[1, 20_000, 1 << 22])
def stretch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read so many bytes at once."""
    monkeypatch.setattr(feed, "_STRETCH_BYTES", request.param)
    monkeypatch.setattr(feed, "_BUFFER_BYTES", max(request.param, 1) + 2 * READ_BLOCK)


@pytest.mark.usefixtures("stretch")
@pytest.mark.parametrize("is_cold", [True, False])
def test_everything_is_found(tmp_path: Path, *, is_cold: bool) -> None:
    engine = opened(ColdFiles(tmp_path) if is_cold else OsFileSystem(str(tmp_path)))
    wanted = store(engine)

    assert scan(engine, 1000) == wanted
    assert scan(engine, 3) == wanted
    engine.close()


@pytest.mark.usefixtures("stretch")
def test_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    engine = opened(ColdFiles(tmp_path))
    wanted = store(engine)

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda limit: scan(engine, limit), [2, 5, 1000, 7, 3, 1000]))

    assert all(each == wanted for each in found)
    engine.close()


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    files = ColdFiles(tmp_path)
    engine = opened(files)
    store(engine)
    files.is_broken = True

    with pytest.raises(StorageError, match="the disk is gone"):
        scan(engine, 10)
    engine.close()


def test_a_file_system_that_cannot_read_around_its_cache_reads_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(ColdFiles(tmp_path))
    wanted = store(engine)
    monkeypatch.delattr(os, "O_DIRECT", raising=False)

    assert scan(engine, 1000) == wanted
    engine.close()

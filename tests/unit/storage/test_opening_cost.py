"""Opening reads what is new since the checkpoint, however long the log is."""

from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.events import SilentListener
from pulque.storage.files import File, FileSystem
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import Nobody, index_all, opened, partition_of, store

BODY = b"x" * 2000


class CountingFile:
    """Counts the bytes that are read."""

    def __init__(self, file: File, counts: dict[str, int], path: str) -> None:
        self._file = file
        self._counts = counts
        self._path = path
        self.write = file.write
        self.sync = file.sync
        self.truncate = file.truncate
        self.size = file.size
        self.read_into = file.read_into
        self.close = file.close

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        data = self._file.read(size, offset, may_block=may_block)
        self._counts[self._path] = self._counts.get(self._path, 0) + len(data)
        return data


class CountingFiles:
    """Hands out counting files."""

    def __init__(self, files: MemoryFileSystem) -> None:
        self._files = files
        self.counts: dict[str, int] = {}
        self.make_directory = files.make_directory
        self.list = files.list
        self.exists = files.exists
        self.rename = files.rename
        self.remove = files.remove
        self.sync_directory = files.sync_directory
        self.sync_files = files.sync_files
        self.free_bytes = files.free_bytes
        self.random_bytes = files.random_bytes

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        file = self._files.open(path, create=create, writable=writable)
        return CountingFile(file, self.counts, path)

    def total(self, suffix: str) -> int:
        return sum(count for path, count in self.counts.items() if path.endswith(suffix))


def open_counting(files: FileSystem) -> Engine:
    options = StorageOptions(reserve_bytes=0, tail_cache_bytes=0)
    return Engine(files, options, SilentListener(), Nobody(), 1)


def built(segments: int, *, tail: int = 5) -> MemoryFileSystem:
    files = MemoryFileSystem()
    engine = opened(files)
    for _ in range(segments):
        for _ in range(10):
            store(engine, "orders", BODY)
        engine.roll(1)
        index_all(engine)
    for _ in range(20):
        store(engine, "orders", BODY)
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)
    for _ in range(tail):
        store(engine, "orders", BODY)
    engine.close()
    return files


def test_sealed_segments_are_not_walked() -> None:
    few, many = CountingFiles(built(2)), CountingFiles(built(40))
    open_counting(few)
    open_counting(many)

    # A few bytes for each of the 38 segments more: its first record, not its 20,000 bytes.
    assert many.total(".log") - few.total(".log") < 38 * 200
    assert many.total(".log") < 5 * 3000 + 40 * 200


def test_a_log_without_checkpoint_is_walked_once() -> None:
    source = built(10)
    for path in source.contents():
        if path.startswith("checkpoints/"):
            source.remove(path)
    files = CountingFiles(source)
    open_counting(files)
    size = sum(len(c) for p, c in source.contents().items() if p.startswith("messages/0"))

    assert files.total(".log") <= size * 1.1


def test_a_missing_index_does_not_make_the_start_wait() -> None:
    source = built(10)
    for path in source.contents():
        if path.endswith(".index"):
            source.remove(path)
    files = CountingFiles(source)
    engine = open_counting(files)

    # Only the oldest one is needed at once: it says where partitions begin.
    assert files.total(".log") < 5 * 3000 + 2 * 21_000
    assert engine.begin_index() is not None


def test_a_late_partition_is_found_without_opening_every_index() -> None:
    source = MemoryFileSystem()
    engine = opened(source)
    for i in range(60):
        store(engine, "orders", b"1")
        if i >= 50:
            store(engine, "late", b"%d" % i)
        engine.roll(1)
        index_all(engine)
    engine.close()
    files = CountingFiles(source)
    engine = open_counting(files)
    partition = partition_of(engine, "late")
    files.counts.clear()
    span = engine.span(partition, ConsumeSequence(3), max_messages=1, max_bytes=9999)

    assert span.first_sequence == 3
    assert len(files.counts) <= 9

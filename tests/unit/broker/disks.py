"""Disks that do what a test tells them."""

import threading
from pathlib import Path

from pulque.errors import StorageFullError
from pulque.storage.files import File, OsFileSystem, WouldBlockError
from pulque.testing.files import MemoryFileSystem
from pulque.testing.power import Node

__all__ = ["ColdDirectory", "CountingDirectory", "GatedDisk", "PickyDisk", "ReplacingDirectory"]


class GatedDisk(MemoryFileSystem):
    """A disk whose syncs wait for a gate to open."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._is_open = True
        self._passes = 0
        self.syncs_waiting = 0

    def close_gate(self) -> None:
        """Let syncs wait from now on."""
        with self._changed:
            self._is_open = False
            self._passes = 0

    def let_one_through(self) -> None:
        """Let one sync go on, now or when it comes, while the gate is closed."""
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def open_gate(self) -> None:
        """Let all syncs go on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def sync(self, node: Node) -> None:
        with self._changed:
            self.syncs_waiting += 1
            if not self._changed.wait_for(lambda: self._is_open or self._passes, timeout=30):
                raise AssertionError("nobody opened the gate")
            if not self._is_open:
                self._passes -= 1
            self.syncs_waiting -= 1
        super().sync(node)


class PickyDisk(MemoryFileSystem):
    """A disk that has no room for some bytes.

    Attributes:
        refuses: Writes that contain them fail; empty for none.
        refused: How many did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuses = b""
        self.refused = 0

    def write(self, node: Node, path: str, data: bytes, offset: int) -> None:
        if self.refuses and self.refuses in data:
            self.refused += 1
            raise StorageFullError(f"{path}: no room for {self.refuses!r}")
        super().write(node, path, data, offset)


class CountingDirectory(OsFileSystem):
    """Counts how often its room is looked at, as housekeeping does first in every turn."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.looks = 0

    def free_bytes(self) -> int:
        self.looks += 1
        return super().free_bytes()


class ReplacingDirectory(CountingDirectory):
    """Remembers what was replaced, and in which thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.replaced: list[tuple[str, str]] = []

    def rename(self, source: str, target: str) -> None:
        self.replaced.append((target, threading.current_thread().name))
        super().rename(source, target)


class ColdDirectory(OsFileSystem):
    """Nothing can be read without waiting, and whoever waits waits for a gate to open."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.gate = threading.Event()
        self.gate.set()
        self.reads_waiting = 0
        self.log_reads = 0
        """How often messages were read."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        file = super().open(path, create=create, writable=writable)
        is_log = path.startswith("messages/") and path.endswith(".log")
        return _ColdFile(self, file, is_log=is_log)


class _ColdFile:
    def __init__(self, directory: ColdDirectory, file: File, *, is_log: bool) -> None:
        self._directory = directory
        self._is_log = is_log
        self._file = file
        self.write, self.sync, self.truncate = file.write, file.sync, file.truncate
        self.size, self.close = file.size, file.close

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        if not may_block:
            raise WouldBlockError
        self._directory.log_reads += self._is_log
        self._directory.reads_waiting += 1
        if not self._directory.gate.wait(timeout=30):
            raise AssertionError("nobody opened the gate")
        self._directory.reads_waiting -= 1
        return self._file.read(size, offset)

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        assert not is_cached
        data = self.read(len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

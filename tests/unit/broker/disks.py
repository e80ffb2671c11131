"""Disks that do what a test tells them."""

import threading
from pathlib import Path

from pulque.storage.files import File, OsFileSystem, WouldBlockError
from pulque.testing.files import MemoryFileSystem
from pulque.testing.power import Node

__all__ = ["ColdDirectory", "CountingDirectory", "GatedDisk"]


class GatedDisk(MemoryFileSystem):
    """A disk whose syncs wait for a gate to open."""

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.Event()
        self._gate.set()
        self.syncs_waiting = 0

    def close_gate(self) -> None:
        """Let syncs wait from now on."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Let all syncs go on."""
        self._gate.set()

    def sync(self, node: Node) -> None:
        self.syncs_waiting += 1
        if not self._gate.wait(timeout=30):
            raise AssertionError("nobody opened the gate")
        self.syncs_waiting -= 1
        super().sync(node)


class CountingDirectory(OsFileSystem):
    """Counts how often its room is looked at, as housekeeping does first in every turn."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.looks = 0

    def free_bytes(self) -> int:
        self.looks += 1
        return super().free_bytes()


class ColdDirectory(OsFileSystem):
    """Nothing can be read without waiting, and whoever waits waits for a gate to open."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.gate = threading.Event()
        self.gate.set()
        self.reads_waiting = 0

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return _ColdFile(self, super().open(path, create=create, writable=writable))


class _ColdFile:
    def __init__(self, directory: ColdDirectory, file: File) -> None:
        self._directory = directory
        self._file = file
        self.write, self.sync, self.truncate = file.write, file.sync, file.truncate
        self.size, self.close, self.will_read = file.size, file.close, file.will_read

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        if not may_block:
            raise WouldBlockError
        self._directory.reads_waiting += 1
        if not self._directory.gate.wait(timeout=30):
            raise AssertionError("nobody opened the gate")
        self._directory.reads_waiting -= 1
        return self._file.read(size, offset)

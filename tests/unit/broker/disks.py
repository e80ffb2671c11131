"""Disks that do what a test tells them."""

import threading
from pathlib import Path

from pulque.storage.files import OsFileSystem
from pulque.testing.files import MemoryFileSystem
from pulque.testing.power import Node

__all__ = ["CountingDirectory", "GatedDisk"]


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

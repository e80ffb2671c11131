"""A file system in memory whose power can be cut, at any moment of its past.

It implements the port of ``pulque.storage.files`` and keeps a history of what was done to it::

    files = MemoryFileSystem()
    run_something(files)
    for at in range(files.operations + 1):
        survivor = files.after_power_cut(at, Cut.TORN, Random(seed))
        recover_and_check(survivor)

A survivor is a file system of its own, with a history that begins at the cut: the power can fail
again during recovery. The workload runs once, however many cuts are tried.

Faults: ``fail_after`` and ``fail_sync_after`` make one call fail, ``room`` limits the disk, and
``cold`` makes reads that must not wait raise ``WouldBlockError``.
"""

import builtins
import errno
import os
from collections.abc import Sequence
from random import Random
from threading import RLock

from pulque.errors import StorageError, StorageFullError
from pulque.storage.files import Buffer, File, WouldBlockError
from pulque.testing.power import (
    ROOT,
    Cut,
    DirectorySynced,
    Disk,
    History,
    Linked,
    Node,
    Operation,
    Synced,
    SyncFailed,
    Truncated,
    Wrote,
)

__all__ = ["Cut", "MemoryFileSystem"]

_UNLIMITED = 1 << 50


class MemoryFileSystem:
    """A ``FileSystem`` in memory. Thread-safe.

    Args:
        disk: What a power cut left of another one; empty if not given.
        random: Draws what is stored at random, such as the directory's id. Pass one with a seed
            to get the same operations in every run.

    Attributes:
        room: How many bytes all files together may have; None for no limit.
        cold: Whether reads that must not wait raise ``WouldBlockError``.
    """

    def __init__(self, disk: Disk | None = None, random: Random | None = None) -> None:
        self.root = "memory"
        self._random = random or Random()  # noqa: S311  # no secrets here
        self.room: int | None = None
        self.cold = False
        self._disk = disk or Disk()
        self._history = History(self._disk)
        self._lock = RLock()
        self._next_number = 1 + max((n.number for _, n in self._disk.walk()), default=0)
        self._write_fault: _Fault | None = None
        self._sync_fault: _Fault | None = None

    # The power.

    @property
    def operations(self) -> int:
        """How many writes, cuts, syncs and changes of names there were."""
        return len(self._history)

    def operation(self, index: int) -> Operation:
        """Return one operation, to be shown by a test that failed."""
        return self._history[index]

    def after_power_cut(self, at: int, cut: Cut, random: Random) -> "MemoryFileSystem":
        """Return what is left if the power fails after the first ``at`` operations.

        Args:
            at: 0 to ``operations``; in ascending order is fastest.
            cut: What becomes of what was not synced by then.
            random: Decides where ``cut`` leaves a choice.
        """
        with self._lock:
            return MemoryFileSystem(self._history.after_power_cut(at, cut, random), random)

    def contents(self) -> dict[str, bytes]:
        """Return all files as programs see them now, by path."""
        with self._lock:
            return {
                path: bytes(self._disk.contents[node])
                for path, node in sorted(self._disk.walk())
                if not node.is_directory
            }

    # Faults.

    def fail_after(self, writes: int, error: StorageError, *, part: int = 0) -> None:
        """Let the ``writes``-th write from now on fail once, after ``part`` of its bytes."""
        self._write_fault = _Fault(writes, error, part)

    def fail_sync_after(self, syncs: int, error: StorageError) -> None:
        """Let the ``syncs``-th sync of a file from now on fail once; its writes are gone for good.

        Programs still see the bytes, and a later sync succeeds without making them durable:
        that is what Linux does.
        """
        self._sync_fault = _Fault(syncs, error)

    # The port.

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        with self._lock:
            directory, name = self._parent(path)
            node = self._disk.names[directory].get(name)
            if node is None and not create:
                raise _not_found(path)
            if node is None:
                node = self._new_node(is_directory=False)
                self._do(Linked(((directory, name, node),)))
            if node.is_directory:
                raise StorageError(f"{path}: {os.strerror(errno.EISDIR)}")
            return _MemoryFile(self, node, path, writable=writable)

    def make_directory(self, path: str) -> None:
        with self._lock:
            directory = ROOT
            for name in filter(None, path.split("/")):
                node = self._disk.names[directory].get(name)
                if node is None:
                    node = self._new_node(is_directory=True)
                    self._do(Linked(((directory, name, node),)))
                elif not node.is_directory:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                directory = node

    def list(self, path: str) -> builtins.list[str]:
        with self._lock:
            return sorted(self._disk.names[self._directory(path)])

    def exists(self, path: str) -> bool:
        with self._lock:
            try:
                self._node(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            node = self._node(source)
            from_directory, from_name = self._parent(source)
            to_directory, to_name = self._parent(target)
            replaced = self._disk.names[to_directory].get(to_name)
            if replaced == node:
                return
            if replaced is not None and (replaced.is_directory or node.is_directory):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._do(
                Linked(((from_directory, from_name, None), (to_directory, to_name, node))),
            )

    def remove(self, path: str) -> None:
        with self._lock:
            if self._node(path).is_directory:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self._do(Linked(((*self._parent(path), None),)))

    def sync_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.open(path).sync()

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._do(DirectorySynced(self._directory(path)))

    def free_bytes(self) -> int:
        with self._lock:
            return _UNLIMITED if self.room is None else max(0, self.room - self._used())

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def lock(self) -> None:
        """There is nobody to lock out."""

    def unlock(self) -> None:
        """There was nobody locked out."""

    # For files.

    def write(self, node: Node, path: str, data: bytes, offset: int) -> None:
        with self._lock:
            error, kept = self._trouble(node, path, data, offset)
            if kept:
                self._do(Wrote(node, offset, data[:kept]))
            if error is not None:
                raise error

    def read(self, node: Node, size: int, offset: int) -> bytes:
        with self._lock:
            return bytes(memoryview(self._disk.content(node))[offset : offset + size])

    def sync(self, node: Node) -> None:
        with self._lock:
            fault = self._sync_fault
            if fault is not None and fault.strikes():
                self._sync_fault = None
                self._do(SyncFailed(node))
                raise fault.error
            self._do(Synced(node))

    def truncate(self, node: Node, size: int) -> None:
        with self._lock:
            self._do(Truncated(node, size))

    def size(self, node: Node) -> int:
        with self._lock:
            return len(self._disk.content(node))

    def _do(self, operation: Operation) -> None:
        self._history.append(operation)
        if isinstance(operation, Wrote | Truncated | Linked):
            self._disk.change(operation)

    def _trouble(
        self, node: Node, path: str, data: bytes, offset: int
    ) -> tuple[StorageError | None, int]:
        """Return the error that a write runs into, and how many bytes it writes before."""
        fault = self._write_fault
        if fault is not None and fault.strikes():
            self._write_fault = None
            return fault.error, min(fault.part, len(data))
        if self.room is None:
            return None, len(data)
        kept = len(self._disk.content(node)) + self.free_bytes() - offset
        if kept >= len(data):
            return None, len(data)
        return StorageFullError(f"{path}: {os.strerror(errno.ENOSPC)}"), max(0, kept)

    def _used(self) -> int:
        return sum(
            len(self._disk.contents[node])
            for _, node in self._disk.walk()
            if not node.is_directory
        )

    def _new_node(self, *, is_directory: bool) -> Node:
        node = Node(self._next_number, is_directory)
        self._next_number += 1
        return node

    def _node(self, path: str) -> Node:
        node = ROOT
        for name in filter(None, path.split("/")):
            if not node.is_directory:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            found = self._disk.names[node].get(name)
            if found is None:
                raise _not_found(path)
            node = found
        return node

    def _directory(self, path: str) -> Node:
        node = self._node(path)
        if not node.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name


class _Fault:
    """An error that waits for its call."""

    def __init__(self, calls: int, error: StorageError, part: int = 0) -> None:
        self._calls = calls
        self.error = error
        self.part = part

    def strikes(self) -> bool:
        self._calls -= 1
        return self._calls <= 0


class _MemoryFile:
    """An open file; it lives on when its name is removed."""

    def __init__(self, files: MemoryFileSystem, node: Node, path: str, *, writable: bool) -> None:
        self._files = files
        self._node = node
        self._path = path
        self._writable = writable
        self._is_open = True

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        if not (self._is_open and self._writable):
            raise StorageError(f"{self._path}: {os.strerror(errno.EBADF)}")
        data = b"".join(buffers)
        self._files.write(self._node, self._path, data, offset)
        return len(data)

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        self._check_open()
        if self._files.cold and not may_block:
            raise WouldBlockError
        return self._files.read(self._node, size, offset)

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        del is_cached
        data = self.read(len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def sync(self) -> None:
        if not self._is_open:
            raise StorageError(f"{self._path}: sync failed: {os.strerror(errno.EBADF)}")
        self._files.sync(self._node)

    def truncate(self, size: int) -> None:
        self._check_open()
        if not self._writable:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)
        self._files.truncate(self._node, size)

    def size(self) -> int:
        self._check_open()
        return self._files.size(self._node)

    def close(self) -> None:
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

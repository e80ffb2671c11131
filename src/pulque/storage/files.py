"""The file system port of storage, and its real implementation.

Storage accesses the disk only through this port, so that a test can cut the power at any point
(``pulque.testing.files``). The effect of a power cut on unsynced calls is
part of the contract:

- ``File.write`` may be lost, or reach the disk in part, or leave zeros; ``File.sync`` makes all
  writes before it durable.
- A new, renamed or removed name may be lost or come back; ``sync_directory`` makes it durable.
  ``rename`` replaces its target in one step, whatever happens.

A disk that is full, failed or read-only raises ``StorageError``;
an error of the call itself stays an ``OSError``.
"""

import ctypes
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Protocol

from pulque.errors import DataDirectoryError, StorageError, StorageFullError

__all__ = [
    "READ_BLOCK",
    "Buffer",
    "DataDirectory",
    "File",
    "FileSystem",
    "OsFileSystem",
    "WouldBlockError",
    "open_directory",
    "replace",
]

Buffer = bytes | memoryview

_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_TROUBLE = (
    *_NO_ROOM,
    errno.EACCES,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENODEV,
    errno.ENOMEM,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
)
_MANY_FILES = 64
"""More files than this are not synced one by one: each sync would wait for the disk."""
_TELLS_FAILURES = (5, 8)
"""The first Linux release whose ``syncfs`` reports failed writes."""
READ_BLOCK = 4096
"""Reads around the page cache begin and end at multiples of it."""
_opening = Lock()
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class WouldBlockError(Exception):
    """The bytes are not in memory; ask again from a thread that may wait for the disk."""


class File(Protocol):
    """One open file. Reads may come from several threads, writes from one.

    A file shared with other threads is dropped, not closed: it is closed with the last
    reference. A descriptor that is closed early may be reused for another file.
    """

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all buffers from ``offset`` on and return how many bytes that were.

        Raises:
            StorageFullError: There is no room; some of it may be written.
            StorageError: The disk failed.
        """

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        """Return up to ``size`` bytes from ``offset`` on; fewer only at the end of the file.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            StorageError: The disk failed.
        """

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        """Fill a buffer from ``offset`` on; return the count, which is less only at the end.

        Args:
            buffer: Begins on a page of memory; its size is a multiple of ``READ_BLOCK``.
            offset: A multiple of ``READ_BLOCK``.
            is_cached: Whether the page cache has it. If not it is read around it, where that
                is possible.

        Raises:
            StorageError: The disk failed.
        """

    def sync(self) -> None:
        """Make all writes durable. A failure is final: the pages may be gone."""

    def truncate(self, size: int) -> None:
        """Cut the file, or fill it up with zeros."""

    def size(self) -> int: ...

    def close(self) -> None: ...


class FileSystem(Protocol):
    """The files of one data directory; paths are relative to it, with ``/`` between parts."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open a file.

        Raises:
            FileNotFoundError: The file does not exist, and is not to be created.
        """

    def make_directory(self, path: str) -> None:
        """Make a directory; it may exist."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""

    def exists(self, path: str) -> bool: ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Make all changes of names in a directory durable."""

    def sync_files(self, paths: Sequence[str]) -> None:
        """Make all writes to files durable, as ``File.sync`` does; many of them at once."""

    def free_bytes(self) -> int:
        """Return the free space in bytes."""

    def random_bytes(self, count: int) -> bytes:
        """Return random bytes, for ids; a simulation returns them from its seed."""


class DataDirectory(FileSystem, Protocol):
    """The files of one server: only one process at a time may have them."""

    def lock(self) -> None:
        """Take the directory for this process.

        Raises:
            DataDirectoryError: Another one has it.
        """

    def unlock(self) -> None:
        """Give it back."""


class _OsFile:
    """A file of the operating system."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._may_ask_without_waiting = hasattr(os, "RWF_NOWAIT")
        self._direct = -1
        """A descriptor with ``O_DIRECT``; the other descriptor if that is unsupported."""

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        written = 0
        try:
            for i in range(0, len(buffers), _MOST_BUFFERS):
                written += self._write_all(buffers[i : i + _MOST_BUFFERS], offset + written)
        except OSError as error:
            raise _translated(error, self._path) from error
        return written

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        try:
            if may_block or not self._may_ask_without_waiting:
                data = os.pread(self._descriptor, size, offset)
            else:
                data = self._read_without_waiting(size, offset)
            while len(data) < size:
                more = os.pread(self._descriptor, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            _raise_trouble(error, self._path)
            raise
        return data

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        descriptor = self._descriptor if is_cached else self._around_cache()
        count = 0
        try:
            while count < len(buffer):
                # After a short read the place may lie within a block: the plain way takes that.
                more = os.preadv(descriptor, [buffer[count:]], offset + count)
                if not more:
                    break
                count += more
                if count % READ_BLOCK:
                    descriptor = self._descriptor
        except OSError as error:
            _raise_trouble(error, self._path)
            raise
        return count

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self._path}: sync failed: {error.strerror}") from error

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            _raise_trouble(error, self._path)
            raise

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        descriptors = {self._descriptor, self._direct} - {-1}
        self._descriptor = self._direct = -1
        for descriptor in descriptors:
            os.close(descriptor)

    def __del__(self) -> None:
        # A removed file stays open as long as some thread reads it.
        self.close()

    def _around_cache(self) -> int:
        """Return a descriptor that bypasses the page cache, or the usual one."""
        if self._direct < 0:
            with _opening:
                if self._direct < 0:
                    self._direct = self._open_direct()
        return self._direct

    def _open_direct(self) -> int:
        if not hasattr(os, "O_DIRECT"):
            return self._descriptor
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
        try:
            # By the open file and not by its name, which may be another's by now.
            return os.open(f"/proc/self/fd/{self._descriptor}", flags)
        except OSError:
            return self._descriptor  # this file system cannot, or there is no /proc

    def _write_all(self, buffers: Sequence[Buffer], offset: int) -> int:
        written = os.pwritev(self._descriptor, buffers, offset)
        total = sum(map(len, buffers))
        if written < total:
            rest = b"".join(buffers)
            while written < total:
                written += os.pwrite(self._descriptor, rest[written:], offset + written)
        return total

    def _read_without_waiting(self, size: int, offset: int) -> bytes:
        with _scratch(size) as buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                raise WouldBlockError from None
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                # This file system cannot tell (tmpfs, for one): it is asked the plain way.
                self._may_ask_without_waiting = False
                return os.pread(self._descriptor, size, offset)
            if count < size and offset + count < self.size():
                raise WouldBlockError
            return bytes(buffer[:count])


_spare: list[bytearray] = []
_MOST_SPARE = 4
_LEAST_SCRATCH = 64 * 1024
_LARGEST_SPARE = 8 * 1024 * 1024


@contextmanager
def _scratch(size: int) -> Iterator[memoryview]:
    """Lend a reusable buffer: allocating one for each read would cost more than the read."""
    # Lists are safe between threads: each of them takes another one.
    try:
        buffer = _spare.pop()
    except IndexError:
        buffer = bytearray(_LEAST_SCRATCH)
    if len(buffer) < size:
        buffer = bytearray(size)
    with memoryview(buffer) as view, view[:size] as lent:
        yield lent
    if len(buffer) <= _LARGEST_SPARE and len(_spare) < _MOST_SPARE:
        _spare.append(buffer)


def open_directory(path: Path) -> "OsFileSystem":
    """Return the files in a directory, which is made if need be; only its owner may enter it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return OsFileSystem(str(path))


class OsFileSystem:
    """A directory of the operating system. Other users cannot read its files."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._lock: int | None = None

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        flags = os.O_RDWR if writable else os.O_RDONLY
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            return _OsFile(os.open(self._full(path), flags, 0o600), path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _translated(error, path) from error

    def make_directory(self, path: str) -> None:
        with _translating(path):
            os.makedirs(self._full(path), mode=0o700, exist_ok=True)

    def list(self, path: str) -> list[str]:
        with _translating(path):
            return sorted(os.listdir(self._full(path)))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._full(path))

    def rename(self, source: str, target: str) -> None:
        with _translating(target):
            os.replace(self._full(source), self._full(target))

    def remove(self, path: str) -> None:
        with _translating(path):
            os.unlink(self._full(path))

    def sync_directory(self, path: str) -> None:
        with _translating(path):
            descriptor = os.open(self._full(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise StorageError(f"{path}: sync failed: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def sync_files(self, paths: Sequence[str]) -> None:
        if len(paths) > _MANY_FILES and self._sync_all():
            return
        for path in paths:
            file = self.open(path)
            try:
                file.sync()
            finally:
                file.close()

    def _sync_all(self) -> bool:
        """Sync the whole file system; return False if the kernel does not report failures."""
        call = _syncfs()
        if call is None:
            return False
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if call(descriptor):
                reason = os.strerror(ctypes.get_errno())
                raise StorageError(f"{self.root}: sync failed: {reason}")
        finally:
            os.close(descriptor)
        return True

    def free_bytes(self) -> int:
        with _translating(self.root):
            found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def lock(self) -> None:
        """Lock the directory for the lifetime of this process.

        Raises:
            DataDirectoryError: Another process has it, or it belongs to another user.
        """
        owner = os.stat(self.root).st_uid
        if owner != os.geteuid():
            raise DataDirectoryError(
                f"{self.root} belongs to user {owner}, and this is user {os.geteuid()}: "
                "run as its owner, or give the directory to this user (chown -R)"
            )
        path = self._full("lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise DataDirectoryError(
                f"{self.root} is in use by process {holder or 'unknown'}: "
                "stop it first, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def unlock(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


def replace(
    files: FileSystem, path: str, buffers: Sequence[Buffer], *, is_synced: bool = True
) -> None:
    """Replace a file atomically: write to a temporary name, sync, rename.

    Its name is durable only once the directory is synced.

    Args:
        files: The file system.
        path: The file; it may exist.
        buffers: Its new contents.
        is_synced: Whether the contents must be whole after a power cut.

    Raises:
        StorageError: The write failed; the file is unchanged.
    """
    temporary = f"{path}.tmp"
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write(buffers, 0)
        if is_synced:
            file.sync()
        files.rename(temporary, path)
    except StorageError:
        # What is left of it would take up room until the next start.
        with suppress(StorageError):
            files.remove(temporary)
        raise
    finally:
        file.close()


@cache
def _syncfs() -> Callable[[int], int] | None:
    """Return the ``syncfs`` call, if it reports failures."""
    release = platform.release().split(".")
    if not sys.platform.startswith("linux") or not all(part.isdigit() for part in release[:2]):
        return None
    if (int(release[0]), int(release[1])) < _TELLS_FAILURES:
        return None
    found: Callable[[int], int] | None
    found = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found


@contextmanager
def _translating(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _raise_trouble(error, path)
        raise


def _raise_trouble(error: OSError, path: str) -> None:
    """Raise ``StorageError`` if disk or system failed; else let the ``OSError`` pass."""
    if error.errno in _TROUBLE:
        raise _translated(error, path) from error


def _translated(error: OSError, path: str) -> StorageError:
    if error.errno in _NO_ROOM:
        return StorageFullError(f"{path}: {error.strerror}")
    return StorageError(f"{path}: {error.strerror}")

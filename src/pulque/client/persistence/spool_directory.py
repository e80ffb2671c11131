"""The files of a producer's spool: a small port, and the real folder behind it.

The port is a part of that of storage (``pulque.storage.files``), so that tests can cut the power
of a spool as they do with a broker's. Whatever the disk says is a ``StorageError``.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pulque.errors import DataDirectoryError, StorageError, StorageFullError

__all__ = ["Folder", "SpoolFile", "SpoolFiles"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SpoolFile(Protocol):
    """One open file."""

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int: ...

    def read(self, size: int, offset: int) -> bytes: ...

    def sync(self) -> None: ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class SpoolFiles(Protocol):
    """The files of one spool, by name."""

    def open(self, path: str, *, create: bool = False) -> SpoolFile:
        """Open a file; raise ``FileNotFoundError`` if it is not there and not to be created."""

    def exists(self, path: str) -> bool: ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in one step; it may be another file's."""

    def sync_directory(self, path: str) -> None: ...

    def lock(self) -> None:
        """Take the files for one owner; raise ``DataDirectoryError`` if another has them."""

    def unlock(self) -> None: ...


class _File:
    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        data = b"".join(buffers)
        done = 0
        with _translating(self._path):
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:] if done else data, offset + done)
        return done

    def read(self, size: int, offset: int) -> bytes:
        found = bytearray()
        with _translating(self._path):
            while len(found) < size:
                more = os.pread(self._descriptor, size - len(found), offset + len(found))
                if not more:
                    break
                found += more
        return bytes(found)

    def sync(self) -> None:
        with _translating(self._path):
            os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        with _translating(self._path):
            os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Folder:
    """A folder of the operating system, made if need be; only its owner may look into it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = str(Path(root).absolute())
        self._lock: int | None = None
        with _translating(self.root):
            Path(self.root).mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, path: str, *, create: bool = False) -> SpoolFile:
        """Open a file for reading and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        with _translating(path):
            return _File(os.open(self._full(path), flags, 0o600), path)

    def exists(self, path: str) -> bool:
        """Say whether there is a file of this name."""
        return os.path.lexists(self._full(path))

    def rename(self, source: str, target: str) -> None:
        """Give a file another name in one step."""
        with _translating(target):
            Path(self._full(source)).replace(self._full(target))

    def sync_directory(self, path: str) -> None:
        """Make all changes of names durable."""
        with _translating(self.root):
            descriptor = os.open(self._full(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def lock(self) -> None:
        """Take the folder for this producer."""
        with _translating(self.root):
            descriptor = os.open(self._full("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataDirectoryError(
                f"the spool {self.root} is in use by another producer: close that one first, or "
                "give each of them a folder of its own"
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


@contextmanager
def _translating(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = StorageFullError if error.errno in _NO_ROOM else StorageError
        raise kind(f"{path}: {error.strerror or error}") from error

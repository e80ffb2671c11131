"""Files wherever Arrow's file systems reach: this machine, ``s3://``, ``hdfs://``.

Only what reading a segment needs. Paths without a scheme are on this machine.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from pulque.errors import StorageError, UsageError
from pulque.storage.files import Buffer

__all__ = ["ArrowFile", "Tree"]


class ArrowFile:
    """One file, for reading. Speaks storage's own port, so that its readers can be used."""

    def __init__(self, handle: pa.NativeFile, path: str) -> None:
        self._handle = handle
        self._path = path

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        """Return up to ``size`` bytes from ``offset`` on."""
        del may_block
        try:
            return bytes(self._handle.read_at(size, offset))
        except OSError as error:
            raise StorageError(f"{self._path}: {error}") from error

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        """Fill a buffer from ``offset`` on; return how many bytes there are."""
        del is_cached
        data = self.read(len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def size(self) -> int:
        """How many bytes it has."""
        return int(self._handle.size())

    def close(self) -> None:
        """Close it."""
        self._handle.close()

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Refuse: what is read here belongs to others."""
        raise UsageError(f"{self._path} is open for reading, not to write {len(buffers)} buffers")

    def sync(self) -> None:
        """There is nothing to sync."""

    def truncate(self, size: int) -> None:
        """Refuse: what is read here belongs to others."""
        raise UsageError(f"{self._path} is open for reading, not to be cut to {size}")


class Tree:
    """A directory and what is below it.

    Args:
        where: A path or a URL.

    Raises:
        UsageError: There is no such place.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        try:
            if "://" in where:
                self._files, self._root = fs.FileSystem.from_uri(where)
            else:
                self._files, self._root = fs.LocalFileSystem(), str(Path(where).absolute())
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{where} cannot be used: {error}") from None

    def names(self, directory: str = "") -> list[str]:
        """Return the names of the files in a directory, sorted; none if it is not there."""
        found = self._infos(directory)
        return sorted(info.base_name for info in found if info.type is fs.FileType.File)

    def directories(self, directory: str = "") -> list[str]:
        """Return the names of the directories in a directory, sorted."""
        found = self._infos(directory)
        return sorted(info.base_name for info in found if info.type is fs.FileType.Directory)

    def open(self, path: str) -> ArrowFile:
        """Open a file for reading.

        Raises:
            StorageError: It cannot be read.
        """
        try:
            return ArrowFile(self._files.open_input_file(self._full(path)), path)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{path}: {error}") from error

    def local(self) -> Path | None:
        """Return where it is on this machine, if it is."""
        is_local = isinstance(self._files, fs.LocalFileSystem)
        return Path(self._root) if is_local else None

    def _infos(self, directory: str) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self._full(directory), allow_not_found=True)
        try:
            return list(self._files.get_file_info(selector))
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{directory}: {error}") from error

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

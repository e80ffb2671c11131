"""Writing files wherever Arrow's file systems reach, so that they are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import pyarrow as pa
from pyarrow import fs

from pulque.errors import StorageError
from pulque.pipeline.filesystem import Tree

__all__ = ["FoundFile", "WritableTree", "crc_of"]

_BYTES_AT_ONCE = 4 * 1024 * 1024


class FoundFile(NamedTuple):
    """A file and when it was last written to."""

    path: str
    size: int
    changed_at: datetime


class WritableTree(Tree):
    """A directory that files are put into. Whatever fails says where."""

    def __init__(self, where: str) -> None:
        # Hadoop and Spark call the same place s3a.
        super().__init__(where.replace("s3a://", "s3://", 1))

    def open_new(self, path: str) -> pa.NativeFile:
        """Open a file for writing, and make the directories it is in.

        Raises:
            StorageError: That is not allowed here.
        """
        full = self._full(path)
        try:
            self._files.create_dir(full.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(full)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{path}: {error}") from error

    @contextmanager
    def create(self, path: str) -> Iterator[pa.NativeFile]:
        """Write a file; it is synced when this ends, and removed if this fails.

        Raises:
            StorageError: It cannot be written: no permission, no room.
        """
        stream = self.open_new(path)
        try:
            with stream:
                yield stream
            self.sync(path)
        except (OSError, pa.ArrowException) as error:
            self.remove(path)
            raise StorageError(f"{self.where}/{path}: {error}") from error

    def copy(self, source: Tree, source_path: str, path: str) -> int:
        """Copy a whole file into the tree; return the crc of what was read."""
        file = source.open(source_path)
        try:
            crc = at = 0
            with self.create(path) as stream:
                while data := file.read(_BYTES_AT_ONCE, at):
                    crc = google_crc32c.extend(crc, data)
                    stream.write(data)
                    at += len(data)
            return crc
        finally:
            file.close()

    def stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading, as Arrow's readers want it."""
        try:
            return self._files.open_input_file(self._full(path))
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{path}: {error}") from error

    def move(self, path: str, to: str) -> None:
        """Give a file its name; whatever had the name is replaced."""
        try:
            self._files.move(self._full(path), self._full(to))
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{to}: {error}") from error
        self.sync(to)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._files.delete_file(self._full(path))
        except FileNotFoundError:
            pass
        except (OSError, pa.ArrowException) as error:
            if self.size(path) is not None:
                raise StorageError(f"{self.where}/{path}: {error}") from error

    def size(self, path: str) -> int | None:
        """Return the size of a file; None if it is not there."""
        try:
            found = self._files.get_file_info(self._full(path))
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.where}/{path}: {error}") from error
        return int(found.size) if found.type is fs.FileType.File else None

    def older_than(self, directory: str, age: timedelta) -> list[FoundFile]:
        """Return the files in a directory that nobody wrote to for so long."""
        limit = datetime.now(UTC) - age
        found = [
            FoundFile(f"{directory}/{info.base_name}", int(info.size), info.mtime)
            for info in self._infos(directory)
            if info.type is fs.FileType.File and info.mtime is not None
        ]
        return [each for each in found if each.changed_at < limit]

    def sync(self, path: str) -> None:
        """Make a file and its name survive a power cut, where that is ours to do."""
        if self.local() is None:
            return
        full = Path(self._full(path))
        for each in (full, full.parent):
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def inner(self, path: str) -> str:
        """Return a path as the file system itself calls it."""
        return self._full(path)

    @property
    def file_system(self) -> fs.FileSystem:
        """Where the tree is, for Arrow's own readers."""
        return self._files

    def uri(self, path: str = "") -> str:
        """Return a path as others may open it."""
        return self._full(path) if self.local() is not None else f"{self.where}/{path}".rstrip("/")


def crc_of(tree: Tree, path: str) -> int:
    """Return the CRC-32C of a whole file."""
    file = tree.open(path)
    try:
        crc = at = 0
        while data := file.read(_BYTES_AT_ONCE, at):
            crc = google_crc32c.extend(crc, data)
            at += len(data)
        return crc
    finally:
        file.close()

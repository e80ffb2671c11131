"""The file with the entries of the open segment, up to the last checkpoint.

It only saves the next start a walk over the segment. The checkpoint's mark has the size that
counts, and its crc.
"""

from functools import partial
from typing import NamedTuple

import google_crc32c

from pulque.storage.checkpoint import Mark
from pulque.storage.directory.layout import MESSAGES, segment_path
from pulque.storage.disk_jobs import Step
from pulque.storage.files import FileSystem

__all__ = ["OpenEntries", "Saving"]


class Saving(NamedTuple):
    """How the entries are saved with a checkpoint."""

    size: int
    """The bytes of all entries by now."""
    crc: int
    step: Step
    """Writes the missing entries; may be called from any thread."""


class OpenEntries:
    """Tracks how many of the open segment's entries are in its file."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._size = 0
        self._crc = 0

    def begin(self) -> None:
        """Start over: the file is empty, or its contents are unknown."""
        self._size, self._crc = 0, 0

    def resume(self, mark: Mark) -> None:
        """Continue with a file that matches the checkpoint's mark."""
        self._size, self._crc = mark.index_size, mark.index_crc

    def save(self, base: int, entries: bytearray) -> Saving:
        """Return how to save the entries of the segment at ``base``."""
        saved = self._size
        fresh = bytes(memoryview(entries)[saved:])
        self._size, self._crc = len(entries), google_crc32c.extend(self._crc, fresh)
        return Saving(self._size, self._crc, partial(self._write, base, saved, fresh))

    def _write(self, base: int, at: int, fresh: bytes) -> None:
        if not fresh:
            return
        file = self._files.open(segment_path(base, "open"), create=True)
        try:
            file.write([fresh], at)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(MESSAGES)

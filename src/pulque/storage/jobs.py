"""Work of the engine that waits for the disk, to be run in any thread."""

from collections.abc import Callable

from pulque.model.positions import MessageOffset
from pulque.storage.files import FileSystem
from pulque.storage.index import OpenIndex, write_sealed_index
from pulque.storage.message_log import segment_path
from pulque.storage.recovery import Mark
from pulque.storage.segment import Segment

__all__ = ["CheckpointJob", "IndexJob", "RemovalJob"]


class CheckpointJob:
    """Writes a checkpoint; ``run`` may be called from any thread."""

    def __init__(self, steps: list[Callable[[], None]], mark: Mark) -> None:
        self._steps = steps
        self.mark = mark

    def run(self) -> None:
        """Sync both logs, then the index entries, then write the checkpoint."""
        for step in self._steps:
            step()


class IndexJob:
    """Writes the index file of a sealed segment; ``run`` may be called from any thread."""

    def __init__(self, files: FileSystem, segment: Segment, index: OpenIndex) -> None:
        self._files = files
        self.segment = segment
        self._index = index

    def run(self) -> None:
        """Write the file."""
        write_sealed_index(
            self._files,
            segment_path(self.segment.base, "index"),
            base=MessageOffset(self.segment.base),
            end=MessageOffset(self.segment.end),
            starts=self._index.starts.items(),
            entries=bytes(self._index.entries),
        )


class RemovalJob:
    """Removes the files of a segment that was forgotten; ``run`` may be called from any thread.

    The log goes last, so that no file is left without its log. Whoever still reads has the file
    open and goes on reading.
    """

    def __init__(self, files: FileSystem, segment: Segment) -> None:
        self._files = files
        self._base = segment.base

    def run(self) -> None:
        """Remove the files."""
        for suffix in ("index", "open", "log"):
            path = segment_path(self._base, suffix)
            if self._files.exists(path):
                self._files.remove(path)

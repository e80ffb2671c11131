"""Jobs that wait for the disk, to be run by any thread.

The engine makes a job (``begin_…``) and is told when it is done (``finish_…``). In between,
``run`` may be called from any thread while the engine continues.
"""

from collections.abc import Callable, Iterable

from pulque.errors import StorageError, StorageFullError
from pulque.model.positions import ActionOffset, MessageOffset
from pulque.storage.checkpoint import Mark
from pulque.storage.directory.layout import segment_path, write_oldest
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.indexes.index_rebuild import entries_of
from pulque.storage.indexes.segment_index import OpenIndex, write_sealed_index
from pulque.storage.logs.segment import Segment

__all__ = [
    "CheckpointJob",
    "DiskHealth",
    "IndexJob",
    "RemovalJob",
    "Step",
    "SyncJob",
    "SyncPoint",
]

Step = Callable[[], None]
SyncPoint = tuple[tuple[MessageOffset, int], tuple[ActionOffset, int] | None]
"""The ends of the two logs when the steps of a sync were made."""


class DiskHealth:
    """Whether the disk can still be trusted with the logs.

    A failed write or sync is final. The kernel drops pages that it could not write, so
    the next sync would succeed without effect: messages confirmed after it could be lost.
    """

    def __init__(self) -> None:
        self.failure: StorageError | None = None

    def check(self) -> None:
        """Raise if the disk failed before.

        Raises:
            StorageError: It failed before; only a restart shows what is left.
        """
        if self.failure is not None:
            raise StorageError(
                f"the disk failed, so nothing is stored until a restart: {self.failure}"
            )

    def note(self, problem: StorageError) -> None:
        """Record a failure; a full disk does not count."""
        if self.failure is None and not isinstance(problem, StorageFullError):
            self.failure = problem

    def run(self, steps: Iterable[Step]) -> None:
        """Run the syncs of logs, one after the other.

        Raises:
            StorageError: A sync failed. That is final: written data may be lost.
        """
        self.check()
        try:
            for step in steps:
                step()
        except StorageError as problem:
            # Also for want of room: pages that could not be written are gone.
            self.failure = self.failure or problem
            raise


class SyncJob:
    """Makes everything before ``end`` durable; ``run`` may be called from any thread."""

    def __init__(self, health: DiskHealth, steps: list[Step], point: SyncPoint) -> None:
        self._health = health
        self._steps = steps
        self.point = point
        self.end = point[0][0]
        self.is_done = False

    def run(self) -> None:
        """Wait for the disk.

        Raises:
            StorageError: The sync failed. That is final: written data may be lost.
        """
        self._health.run(self._steps)
        self.is_done = True


class CheckpointJob:
    """Writes a checkpoint; ``run`` may be called from any thread."""

    def __init__(self, first: Step, sync: SyncJob, last: list[Step], mark: Mark) -> None:
        self._first = first
        self._sync = sync
        self._last = last
        self.mark = mark

    def run(self) -> None:
        """Sync both logs, then the index entries, then write the checkpoint.

        Raises:
            StorageFullError: There is no room for it; the logs are unchanged.
            StorageError: The disk failed.
        """
        self._first()
        self._sync.run()
        for step in self._last:
            step()


class IndexJob:
    """Writes the index file of a sealed segment; ``run`` may be called from any thread."""

    def __init__(
        self,
        files: FileSystem,
        path: str,
        segment: Segment,
        index: OpenIndex | None,
        listener: Listener,
    ) -> None:
        self._files = files
        self._path = path
        self.segment = segment
        self._index = index
        self._listener = listener

    def run(self) -> None:
        """Write the file; if the entries are not in memory, read them from the segment."""
        index = self._index
        if index is None:
            index = entries_of(self.segment, self.segment.end, self._listener)
            self._listener.index_rebuilt(self._path, len(index))
        write_sealed_index(
            self._files,
            self._path,
            base=MessageOffset(self.segment.base),
            end=MessageOffset(self.segment.end),
            index=index,
        )


class RemovalJob:
    """Removes the files of a dropped segment; ``run`` may be called from any thread.

    The log is removed last, so that no file is left without its log. Readers have the file
    open and continue. Jobs run in the order in which they were made.
    """

    def __init__(self, files: FileSystem, segment: Segment, oldest: int, sync: SyncJob) -> None:
        self._files = files
        self._base = segment.base
        self._oldest = oldest
        self._sync = sync

    def run(self) -> None:
        """Sync later segments, record the oldest one, and remove the files."""
        self._sync.run()
        is_noted = self._note_oldest()
        for suffix in ("index", "keys", "open", "log"):
            path = segment_path(self._base, suffix)
            if self._files.exists(path):
                self._files.remove(path)
        if not is_noted:
            self._note_oldest()

    def _note_oldest(self) -> bool:
        try:
            write_oldest(self._files, self._oldest)
        except StorageFullError:
            return False  # removing is what makes room
        return True

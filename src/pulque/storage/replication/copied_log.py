"""One log of a follower: segments of the same names and bytes as the leader's.

Its bytes were checked before. Appends and cuts come from one thread; a sync runs in
another one meanwhile, as with the logs of an engine.
"""

from collections.abc import Callable
from functools import partial

from pulque.errors import StorageError, UsageError
from pulque.storage.directory.layout import MESSAGES, base_of
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.logs.segment import Segment

__all__ = ["CopiedLog"]

_BESIDE = ("index", "keys", "open")
"""The endings of files that are derived from a segment."""


class CopiedLog:
    """The segments of one log, from the files in its directory on."""

    def __init__(self, files: FileSystem, directory: str, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self._directory = directory
        self._is_of_messages = directory == MESSAGES
        self.segments = self._open()
        """In order; the last one is open."""
        self.end = self.segments[-1].end if self.segments else 0
        """Where the next record goes."""
        self.synced = 0
        """Everything before it survives a power cut."""
        # Whatever is found was perhaps only in the page cache of a process that was killed.
        self._names_changed = 1
        self._names_synced = 0
        self._cut_at = 0
        """The count of changed names at the last cut: a sync that began before does not count."""
        self._has_hidden = False
        self._hidden: list[Segment] = []
        self._lost = 0

    @property
    def begin(self) -> int:
        """Where the log begins."""
        return self.segments[0].base if self.segments else self.end

    def begins_segment(self, base: int, offset: int) -> bool:
        """Return whether bytes of the leader's begin a new segment here.

        Raises:
            UsageError: They do not follow the log.
        """
        if self.segments and base == self.segments[-1].base:
            follows = offset == self.end
        else:
            # Only facts may be missing: the leader's own log has a hole there.
            may_begin = offset == self.end or not self.segments
            follows = base == offset and (
                may_begin or (not self._is_of_messages and offset > self.end)
            )
        if not follows:
            raise UsageError(
                f"bytes at offset {offset} of the segment at {base} do not follow the log, "
                f"which ends at {self.end}"
            )
        return not self.segments or base != self.segments[-1].base

    def append(self, data: Buffer) -> None:
        """Append whole records to the open segment.

        Raises:
            StorageError: The log is unchanged.
        """
        segment = self.segments[-1]
        at = segment.end - segment.base
        try:
            segment.file.write((data,), at)
        except StorageError:
            segment.file.truncate(at)
            raise
        segment.end += len(data)
        self.end = segment.end

    def start_segment(self, base: int, data: Buffer) -> None:
        """Begin a new segment with whole records.

        Raises:
            StorageError: The log is unchanged.
        """
        path = f"{self._directory}/{base:020d}.log"
        file = self._files.open(path, create=True)
        try:
            file.truncate(0)
            file.write((data,), 0)
        except StorageError:
            file.close()
            self._files.remove(path)
            raise
        self.segments = [*self.segments, Segment(path, file, base, base + len(data))]
        self.end = base + len(data)
        self._names_changed += 1

    def hide(self, offset: int) -> None:
        """Ignore everything from an offset on; ``carry_out`` removes it.

        A file that would be empty is removed, too. Of the action log, the first one stays: it
        shows that the log reaches this far.
        """
        before = self.segments
        kept = [each for each in before if each.base < offset]
        if not kept and not self._is_of_messages:
            kept = [each for each in before[:1] if each.base == offset]
        if len(kept) < len(before) or offset < self.end:
            self._hide(kept, offset)

    def hide_all(self) -> None:
        """Ignore the whole log; ``carry_out`` removes it."""
        self._hide([], self.end)

    def _hide(self, kept: list[Segment], end: int) -> None:
        self._hidden = self.segments[len(kept) :] + self._hidden
        if kept:
            end = kept[-1].end = min(end, kept[-1].end)  # a cut in a hole is one before it
        else:
            end = 0  # as the next start will have it
        self._lost += self.end - end
        self.segments, self.end, self.synced = kept, end, min(self.synced, end)
        self._names_changed += 1
        self._cut_at = self._names_changed
        self._has_hidden = True

    def carry_out(self) -> None:
        """Remove hidden bytes durably."""
        if not self._has_hidden:
            return
        for segment in reversed(self._hidden):
            self._remove(segment, "log", *_BESIDE)
        for segment in self.segments[-1:]:
            self._remove(segment, *_BESIDE)
        self._files.sync_directory(self._directory)
        for segment in self.segments[-1:]:
            segment.file.truncate(segment.end - segment.base)
            segment.file.sync()
        for segment in (self.segments[-1:] + self._hidden)[:1]:
            self._listener.tail_cut(segment.path, self.end, self._lost)
        self._hidden, self._lost, self._has_hidden = [], 0, False

    def sync_steps(self) -> list[Callable[[], None]]:
        """Return functions that make all records durable: files in order, names after contents."""
        steps: list[Callable[[], None]] = [
            segment.file.sync for segment in self.segments if segment.end > self.synced
        ]
        if self._names_changed > self._names_synced:
            steps.append(partial(self._files.sync_directory, self._directory))
        return steps

    @property
    def sync_point(self) -> tuple[int, int]:
        """The argument for ``finish_sync``."""
        return self.end, self._names_changed

    def finish_sync(self, point: tuple[int, int]) -> None:
        """Record that the log is durable up to the point."""
        end, names = point
        if names >= self._cut_at:
            self.synced = max(self.synced, end)
            self._names_synced = max(self._names_synced, names)

    def forget_first(self) -> Segment:
        """Drop the oldest segment; the caller removes its files."""
        segment = self.segments[0]
        # Not closed: a sync in another thread may be at work on it.
        self.segments = self.segments[1:]
        self._listener.segment_removed(segment.path, segment.end - segment.base)
        return segment

    def remove_beside(self, segment: Segment) -> None:
        """Remove the derived files of a segment durably."""
        self._remove(segment, *_BESIDE)
        self._files.sync_directory(self._directory)

    def close(self) -> None:
        """Close all files."""
        for segment in self.segments + self._hidden:
            segment.file.close()

    def _open(self) -> list[Segment]:
        found = []
        names = self._files.list(self._directory)
        for name in names:
            path = f"{self._directory}/{name}"
            base = base_of(name, "log")
            if base is not None:
                file = self._files.open(path)
                found.append(Segment(path, file, base, base + file.size()))
            elif name.endswith(".tmp"):
                self._files.remove(path)
        bases = {segment.base for segment in found}
        for name in names:
            beside = [base_of(name, suffix) for suffix in _BESIDE]
            if any(base is not None and base not in bases for base in beside):
                self._files.remove(f"{self._directory}/{name}")
        return found

    def _remove(self, segment: Segment, *suffixes: str) -> None:
        """Remove a segment with its derived files, which would be taken for the next one's."""
        stem = segment.path.removesuffix("log")
        for suffix in suffixes:
            if self._files.exists(stem + suffix):
                self._files.remove(stem + suffix)

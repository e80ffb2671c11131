"""Read the log in large blocks (*stretches*), one ahead of the search.

Bytes in the page cache are copied from there. The rest is read with ``O_DIRECT`` into a reusable
buffer: scanning a cold backlog once would evict the pages of other readers, and
filling the cache and copying from it costs more than the scan. A thread reads the next stretch
meanwhile; reading releases the interpreter lock.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from mmap import mmap
from random import randrange
from threading import Lock
from typing import NamedTuple

import numpy as np

from pulque.model.positions import ConsumeSequence
from pulque.storage.files import READ_BLOCK, WouldBlockError
from pulque.storage.indexes.segment_index import Table
from pulque.storage.logs.message_log import MessageLog
from pulque.storage.logs.segment import Segment

__all__ = ["Feed", "Loaded", "Stretch"]

_STRETCH_BYTES = 4 * 1024 * 1024
"""Bytes to read at once: the more, the less each message costs."""
_GAP_BYTES = 16 * 1024
"""Reading over a gap of so many bytes is cheaper than two reads."""
_BUFFER_BYTES = _STRETCH_BYTES + 2 * READ_BLOCK
_MOST_SPARE = 8
_MOST_THREADS = 4


class Stretch(NamedTuple):
    """Entries whose batches can be read at once."""

    entries: Table
    size: int

    @property
    def first_sequence(self) -> ConsumeSequence:
        """Where it begins."""
        return ConsumeSequence(int(self.entries[0]["first_sequence"]))

    @property
    def offset(self) -> int:
        """Where in the log it begins."""
        return int(self.entries[0]["offset"])


class Loaded(NamedTuple):
    """A stretch in memory. Its bytes are valid until the next one is requested."""

    stretch: Stretch
    data: memoryview
    segment: Segment | None
    """Where it was read from; None for records from the tail cache, one after the other."""
    buffer: mmap | None


class Feed:
    """Reads stretches. May be used from any thread."""

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._spare: list[mmap] = []
        self._executor: ThreadPoolExecutor | None = None
        self._lock = Lock()

    def load(self, entries: Table, *, may_block: bool) -> Iterator[Loaded]:
        """Yield stretches that have these entries, one after the other.

        Batches that retention has removed meanwhile are left out.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
        """
        coming: deque[_Coming] = deque()
        begin = self._begin if may_block else self._begin_at_hand
        try:
            for stretch in _stretches(entries):
                begun = begin(stretch)
                if begun is not None:
                    coming.append(begun)
                    if len(coming) > 1:
                        yield from self._end(coming.popleft())
            while coming:
                yield from self._end(coming.popleft())
        finally:
            for each in coming:
                each.forget(self._give_back)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _begin(self, stretch: Stretch) -> "_Coming | None":
        """Start to read a stretch, if that needs a thread."""
        cached = self._cached(stretch)
        if cached is not None:
            return _Coming(lambda: cached)
        segment = self._log.segment_of(stretch.offset)
        if segment is None:
            return None
        if _is_at_hand(stretch, segment):
            return _Coming(partial(self._read, stretch, segment, is_cached=True))
        future = self._threads().submit(self._read, stretch, segment, is_cached=False)
        return _Coming(future.result, future)

    def _begin_at_hand(self, stretch: Stretch) -> "_Coming | None":
        cached = self._cached(stretch)
        if cached is not None:
            return _Coming(lambda: cached)
        segment = self._log.segment_of(stretch.offset)
        return None if segment is None else _Coming(partial(_read_at_hand, stretch, segment))

    def _end(self, coming: "_Coming") -> Iterator[Loaded]:
        loaded = coming.wait()
        try:
            yield loaded
        finally:
            self._give_back(loaded)

    def _cached(self, stretch: Stretch) -> Loaded | None:
        """Return records that are all in memory, or None."""
        parts: list[bytes] = []
        # From the end, as the newest are the likeliest.
        for offset in reversed(stretch.entries["offset"].tolist()):
            record = self._log.cache.get(offset)
            if record is None:
                return None
            parts += reversed(record)
        return Loaded(stretch, memoryview(b"".join(reversed(parts))), None, None)

    def _read(self, stretch: Stretch, segment: Segment, *, is_cached: bool) -> Loaded:
        place = stretch.offset - segment.base
        skipped = place % READ_BLOCK
        size = max(min(stretch.size, segment.end - stretch.offset), 0)
        whole = -(-(skipped + size) // READ_BLOCK) * READ_BLOCK
        buffer = self._lend(whole)
        view = memoryview(buffer)
        count = segment.file.read_into(view[:whole], place - skipped, is_cached=is_cached)
        return Loaded(stretch, view[skipped : min(skipped + size, count)], segment, buffer)

    def _lend(self, size: int) -> mmap:
        if size > _BUFFER_BYTES:
            return mmap(-1, size)
        try:
            return self._spare.pop()
        except IndexError:
            return mmap(-1, _BUFFER_BYTES)

    def _give_back(self, loaded: Loaded) -> None:
        # Lists are safe between threads.
        buffer = loaded.buffer
        if buffer is not None and len(buffer) == _BUFFER_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(buffer)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_MOST_THREADS, "pulque-ahead")
            return self._executor


class _Coming(NamedTuple):
    """A stretch that is being read, or will be when it is its turn."""

    wait: Callable[[], Loaded]
    future: "Future[Loaded] | None" = None

    def forget(self, give_back: Callable[[Loaded], None]) -> None:
        """Discard it; its buffer is reused once the read has ended."""
        if self.future is not None:
            self.future.add_done_callback(
                lambda done: None if done.exception() else give_back(done.result())
            )


def _is_at_hand(stretch: Stretch, segment: Segment) -> bool:
    """Return whether a stretch is in the page cache, by two bytes of it.

    A probe makes the kernel read pages around it, so each probe uses other bytes.
    """
    place = stretch.offset - segment.base
    try:
        for _ in range(2):
            at = randrange(stretch.size)  # noqa: S311  # nothing is secret here
            segment.file.read(1, place + at, may_block=False)
    except WouldBlockError:
        return False
    return True


def _read_at_hand(stretch: Stretch, segment: Segment) -> Loaded:
    size = max(min(stretch.size, segment.end - stretch.offset), 0)
    data = segment.read(stretch.offset, size, may_block=False)
    return Loaded(stretch, memoryview(data), segment, None)


def _stretches(entries: Table) -> Iterator[Stretch]:
    begins = entries["offset"].astype(np.int64)
    ends = begins + entries["size"]
    cuts = np.flatnonzero(begins[1:] - ends[:-1] > _GAP_BYTES) + 1
    start = 0
    while start < len(entries):
        fitting = int(np.searchsorted(ends, begins[start] + _STRETCH_BYTES, "right"))
        following = cuts[np.searchsorted(cuts, start, "right") :][:1].tolist()
        stop = min([max(fitting, start + 1), *following])
        yield Stretch(entries[start:stop], int(ends[stop - 1] - begins[start]))
        start = stop

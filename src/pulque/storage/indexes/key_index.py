"""The key index: the places of messages by key or id, over all segments.

Each segment has a file of its own (``pulque.storage.indexes.key_file``), which is written in the
background: messages that are not in it yet are read from the log, and so are damaged parts.
It is derived: retention removes it with its segment, and a lost file is rebuilt.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np

from pulque.errors import CorruptionError, StorageError
from pulque.storage.directory.layout import segment_path
from pulque.storage.events import Listener
from pulque.storage.files import File, FileSystem
from pulque.storage.indexes.key_file import PartHead, find_rows, read_heads, write_part
from pulque.storage.indexes.key_rows import ID_ROW, OLDEST_AGE, PART_BYTES, NameOf, Rows, collect
from pulque.storage.logs.segment import Segment

__all__ = ["EVERYTHING", "KeyCandidate", "KeyIndex", "KeyQuery", "Looked"]

EVERYTHING = 2**63 - 1
"""Greater than any instant and any offset."""


class KeyQuery(NamedTuple):
    """The condition of a search."""

    hash: int
    is_id: bool
    """Whether the hash is that of an id, not of a key."""
    since_ms: int = 0
    """Stored at or after this instant …"""
    until_ms: int = EVERYTHING
    """… and before this one."""
    before: tuple[int, int] = (EVERYTHING, 0)
    """Only messages before this offset of a batch and index in it."""


class KeyCandidate(NamedTuple):
    """A message whose key or id has the hash; it may be another one with the same."""

    offset: int
    """The offset of its batch."""
    index: int  # type: ignore[assignment]  # nobody looks for anything in this tuple


class Looked(NamedTuple):
    """The candidates in one part of the log, newest first."""

    candidates: list[KeyCandidate]
    begin: int
    """The rest of the log is before this offset."""


class KeyIndex:
    """Searches messages, and maintains the index files. Thread-safe.

    Args:
        files: The data directory.
        segments: Returns the segments of the message log; the last one is open.
        name_of: Returns the names of partitions.
        listener: Is told of damage.
    """

    def __init__(
        self,
        files: FileSystem,
        segments: Callable[[], list[Segment]],
        name_of: NameOf,
        listener: Listener,
    ) -> None:
        self._files = files
        self._segments = segments
        self._name_of = name_of
        self._listener = listener
        self._heads: dict[int, tuple[PartHead, ...]] = {}
        """By the base of the segment; only segments that were searched."""
        self._writing = Lock()

    # ── writing ────────────────────────────────────────────────────────────────────────────

    def learn(self) -> None:
        """Find the existing parts; until then all of them count as missing."""
        for segment in self._segments():
            with self._writing:
                self._known(segment)

    def missing(self) -> list[tuple[Segment, int]]:
        """Return the segments that are not fully indexed, newest first, and the missing bytes.

        Does not read from the disk.
        """
        segments = self._segments()
        found = []
        for segment in reversed(segments):
            covered = _covered(segment, self._heads.get(segment.base, ()))
            if covered < segment.end:
                found.append((segment, segment.end - covered))
        self._forget(segments)
        return found

    def extend(self, segment: Segment, *, least: int = 1) -> bool:
        """Write one more part of a segment, if so many bytes are missing; return whether it did.

        Raises:
            StorageError: The part cannot be written.
        """
        with self._writing:
            heads = self._known(segment)
            begin, end = _covered(segment, heads), segment.end
            if end - begin < least or not self._is_there(segment):
                return False
            collected = collect(segment, begin, end, self._name_of)
            place = heads[-1].place + heads[-1].size if heads else 0
            head = write_part(self._files, place, segment.base, collected)
            self._heads[segment.base] = (*heads, head)
            if not self._is_there(segment):
                # Retention removed the segment meanwhile, and this file had its name again.
                self._remove(segment)
            return True

    # ── looking up ─────────────────────────────────────────────────────────────────────────

    def look(self, wanted: KeyQuery) -> Iterator[Looked]:
        """Yield messages that may be wanted, newest first, one part of the log after the other.

        Reads from the disk; the caller stops it when it has enough, or no more time.
        """
        segments = self._segments()
        is_open = True
        for after, segment in pairwise([None, *reversed(segments)]):
            assert segment is not None  # noqa: S101  # only the first of all is None
            if after is not None and after.opened_at_ms and after.opened_at_ms < wanted.since_ms:
                return  # all before it is older
            is_before = segment.base <= wanted.before[0]
            if is_before and segment.opened_at_ms < wanted.until_ms:
                yield from self._look_in(segment, wanted, is_open=is_open)
            is_open = False

    def _look_in(self, segment: Segment, wanted: KeyQuery, *, is_open: bool) -> Iterator[Looked]:
        end = segment.end
        heads = yield from self._caught_up(segment, is_open=is_open)
        at = _covered(segment, heads)
        pieces: list[Looked] = []
        while at < end and at <= wanted.before[0]:
            found = collect(segment, at, end, self._name_of)
            pieces.append(_looked(found.rows, at, found.begun_ms, wanted))
            at = found.end
        yield from reversed(pieces)
        for head in reversed(heads):
            if head.begin <= wanted.before[0] and _may_have(head, wanted):
                yield self._look_at(segment, head, wanted)

    def _caught_up(
        self, segment: Segment, *, is_open: bool
    ) -> Generator[Looked, None, tuple[PartHead, ...]]:
        """Write parts that are missing, so that little is left to be read; return the heads.

        Written parts stay: a search that times out has less to do the next time.
        """
        least = PART_BYTES if is_open else 1
        try:
            while self.extend(segment, least=least):
                yield Looked([], segment.end)
        except StorageError:
            pass  # there is no room for it: it is read from the log, each time
        with self._writing:
            return self._known(segment)

    def _look_at(self, segment: Segment, head: PartHead, wanted: KeyQuery) -> Looked:
        path = segment_path(segment.base, "keys")
        try:
            file = self._files.open(path, writable=False)
        except FileNotFoundError:
            reason = "it is gone"
        else:
            try:
                rows = find_rows(file, head, wanted.hash, is_id=wanted.is_id)
                return _looked(rows, head.begin, head.begun_ms, wanted)
            except CorruptionError as error:
                reason = error.reason
            finally:
                file.close()
        self._spoilt(segment, head, reason)
        found = collect(segment, head.begin, head.end, self._name_of)
        return _looked(found.rows[::-1], head.begin, found.begun_ms, wanted)

    # ── inside ─────────────────────────────────────────────────────────────────────────────

    def _known(self, segment: Segment) -> tuple[PartHead, ...]:
        """Return the parts of a segment's file; call it from one thread at a time."""
        heads = self._heads.get(segment.base)
        if heads is None or _covered(segment, heads) > segment.end:
            heads = self._heads[segment.base] = self._read(segment)
        return heads

    def _read(self, segment: Segment) -> tuple[PartHead, ...]:
        path = segment_path(segment.base, "keys")
        try:
            file: File = self._files.open(path, writable=False)
        except FileNotFoundError:
            return ()
        try:
            heads, problem = read_heads(file, segment.base)
        finally:
            file.close()
        fitting = [head for head in heads if head.end <= segment.end]
        if problem or len(fitting) < len(heads):
            place = sum(head.size for head in fitting)
            reason = problem or "it has more than the segment"
            self._listener.corruption_found(path, place, 0, f"{reason}: it is made again")
        return tuple(fitting)

    def _spoilt(self, segment: Segment, head: PartHead, reason: str) -> None:
        """Drop a part and those after it; they are rebuilt."""
        path = segment_path(segment.base, "keys")
        self._listener.corruption_found(path, head.place, head.size, f"{reason}: it is made again")
        with self._writing:
            known = self._heads.get(segment.base, ())
            self._heads[segment.base] = tuple(each for each in known if each.end <= head.begin)

    def _forget(self, segments: list[Segment]) -> None:
        oldest = segments[0].base
        for base in [base for base in list(self._heads) if base < oldest]:
            self._heads.pop(base, None)

    def _is_there(self, segment: Segment) -> bool:
        return segment.base >= self._segments()[0].base

    def _remove(self, segment: Segment) -> None:
        path = segment_path(segment.base, "keys")
        if self._files.exists(path):
            self._files.remove(path)


def _covered(segment: Segment, heads: tuple[PartHead, ...]) -> int:
    return heads[-1].end if heads else segment.base


def _may_have(head: PartHead, wanted: KeyQuery) -> bool:
    return head.begun_ms < wanted.until_ms and head.last_ms >= wanted.since_ms


def _looked(rows: Rows, begin: int, begun_ms: int, wanted: KeyQuery) -> Looked:
    """Return the matching rows, newest first, from rows in any order."""
    is_hit = (rows["hash"] == wanted.hash) & ((rows["index"] >= ID_ROW) == wanted.is_id)
    hits = rows[is_hit]
    stored = hits["age_ms"].astype(np.int64) + begun_ms
    # An age that there is no room for is any age; whoever reads the message knows better.
    is_old = hits["age_ms"] == OLDEST_AGE
    hits = hits[((stored >= wanted.since_ms) | is_old) & (stored < wanted.until_ms)]
    places = hits["place"].astype(np.int64) + begin
    indexes = (hits["index"] & (ID_ROW - 1)).astype(np.int64)
    order = np.lexsort((indexes, places))[::-1]
    found = zip(places[order].tolist(), indexes[order].tolist(), strict=True)
    return Looked([KeyCandidate(*each) for each in found if each < wanted.before], begin)

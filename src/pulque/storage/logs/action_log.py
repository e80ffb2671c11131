"""The action log: what consumers did, in order. The truth of consumption.

::

    +----------+---------+---------+----------------+
    | size u32 | crc u32 | type u8 | fields         |
    +----------+---------+---------+----------------+

``size`` counts what follows the crc. ``crc`` is CRC-32C over the record's offset, its size and
what follows: a record is valid only where it was written. Every append is one write, before the
rules see the fact. Each segment begins with the subscriptions that are open, as facts of their
own, so that the numbers in it have a meaning.

After a sync, the next fact is preceded by a mark: a record that says how far the log was on disk.
Bytes that are no record are a torn tail, which is cut, unless a mark or the checkpoint says that
they were durable. Then they are reported and passed over, and nothing is cut.
"""

from collections.abc import Callable, Iterable, Iterator
from struct import Struct, error

import google_crc32c
import numpy as np

from pulque.errors import StorageError, UsageError
from pulque.model.actions import Action
from pulque.model.positions import ActionOffset
from pulque.storage.directory.layout import ACTIONS, base_of
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.logs.fact_codec import (
    LARGEST_FACT,
    MARK,
    MARK_TYPE,
    decode_action,
    encode_action,
    size_limits,
)
from pulque.storage.logs.segment import Segment
from pulque.storage.options import StorageOptions

__all__ = [
    "DIRECTORY",
    "ActionLog",
    "decode_action",
    "encode_action",
    "valid_size",
    "walk_actions",
]

DIRECTORY = ACTIONS
_HEAD = Struct("<II")
_WHERE = Struct("<QI")
_SEARCH_FACTOR = 32
"""How often a byte may be read, on average, to find the next record after damage."""
_SEARCHED_FIRST = 256
_SEARCHED_AT_ONCE = 1024 * 1024


class ActionLog:
    """Appends facts and replays them. One writer."""

    def __init__(
        self,
        files: FileSystem,
        options: StorageOptions,
        listener: Listener,
        segments: list[Segment],
    ) -> None:
        self._files = files
        self._options = options
        self._listener = listener
        self.segments = segments
        """In order; the last one is open."""
        self.end = ActionOffset(segments[-1].end if segments else 0)
        """Where the next fact goes."""
        self.synced = ActionOffset(0)
        """Facts before it survive a power cut."""
        self._marked = ActionOffset(0)
        self.was_cut = False
        """Whether opening the log cut it: perhaps the facts with which a segment began."""
        self._begun_at = ActionOffset(segments[-1].base if segments else 0)
        """Where the open segment's own facts begin, behind those it repeats."""
        self._names_changed = 0
        self._names_synced = 0

    @classmethod
    def open(
        cls, files: FileSystem, options: StorageOptions, listener: Listener, durable: int
    ) -> "ActionLog":
        """Open the log and cut its torn tail.

        Args:
            files: The data directory.
            options: The engine's.
            listener: The engine's.
            durable: The log was on disk up to here, according to the checkpoint.
        """
        files.make_directory(DIRECTORY)
        segments = []
        for name in files.list(DIRECTORY):
            base = base_of(name, "log")
            if base is not None:
                path = f"{DIRECTORY}/{name}"
                file = files.open(path)
                segments.append(Segment(path, file, base, base + file.size()))
        log = cls(files, options, listener, segments)
        log._cut_tail(durable)
        found = log.segments[-1].end if log.segments else 0
        if found < durable:
            path = log.segments[-1].path if log.segments else DIRECTORY
            missing = durable - found
            listener.corruption_found(path, found, missing, "the end of the log is missing")
            log.was_cut = True
        log.end = ActionOffset(max(found, durable))
        log.synced = ActionOffset(durable)
        # Whatever is recovered was perhaps only in the page cache of a process that was killed.
        log._names_changed += 1
        return log

    def append(self, action: Action) -> None:
        """Append one fact.

        Raises:
            UsageError: The fact is too large.
            StorageError: The fact is not in the log.
        """
        segment = self.segments[-1]
        record = self._records((action,))
        at = segment.end - segment.base
        try:
            segment.file.write((record,), at)
        except StorageError:
            segment.file.truncate(at)
            # Else a power cut could bring back a fact that never happened.
            segment.file.sync()
            raise
        self._marked = self.synced
        segment.end += len(record)
        self.end = ActionOffset(segment.end)

    def needs_roll(self) -> bool:
        """Return whether the open segment is full, or none is open."""
        if not self.segments:
            return True
        segment = self.segments[-1]
        size = segment.end - segment.base
        return segment.end < self.end or size >= self._options.action_segment_bytes

    def has_facts(self) -> bool:
        """Return whether the open segment has facts that the one before it did not have."""
        return bool(self.segments) and self.end > self._begun_at

    def start_segment(self, opened: Iterable[Action | bytes]) -> None:
        """Start a new segment with the open subscriptions, which may be encoded already.

        Raises:
            StorageError: The log is unchanged.
        """
        path = f"{DIRECTORY}/{self.end:020d}.log"
        records = self._records(opened)
        # An empty segment is what a power cut left of one: it is begun anew.
        is_new = not self.segments or self.segments[-1].base < self.end
        file = self._files.open(path, create=True) if is_new else self.segments[-1].file
        try:
            file.truncate(0)
            file.write((records,), 0)
        except StorageError:
            # Else a power cut could bring it back, and the log has gone on in the old segment.
            if is_new:
                file.close()
                self._files.remove(path)
                self._files.sync_directory(DIRECTORY)
            else:
                file.truncate(0)
                file.sync()
            raise
        base = self.end
        self._marked = self.synced
        self.end = self._begun_at = ActionOffset(base + len(records))
        before = self.segments if is_new else self.segments[:-1]
        self.segments = [*before, Segment(path, file, base, self.end)]
        self._names_changed += 1

    def replay(self, start: ActionOffset) -> Iterator[Action]:
        """Yield every fact from ``start`` on; damaged ranges are reported and passed over."""
        offset = int(start)
        for segment in self.segments:
            if segment.end <= start:
                continue
            if segment.base > offset:
                self._listener.corruption_found(
                    segment.path, offset, segment.base - offset, "facts before it are missing"
                )
            offset = segment.end
            data = segment.read(segment.base, segment.end - segment.base)
            for at, size, fact in walk_actions(data, segment.base, max(start - segment.base, 0)):
                action = _decoded(fact)
                if isinstance(action, str):
                    self._listener.corruption_found(segment.path, segment.base + at, size, action)
                else:
                    yield action

    def sync_steps(self) -> list[Callable[[], None]]:
        """Return functions that make all facts durable; none if they are.

        After running them, pass the ``sync_point`` of that time to ``finish_sync``.
        """
        steps: list[Callable[[], None]] = [
            segment.file.sync for segment in self.segments if segment.end > self.synced
        ]
        if self._names_changed > self._names_synced:
            steps.append(lambda: self._files.sync_directory(DIRECTORY))
        return steps

    @property
    def sync_point(self) -> tuple[ActionOffset, int]:
        """The argument for ``finish_sync``."""
        return self.end, self._names_changed

    def finish_sync(self, point: tuple[ActionOffset, int]) -> None:
        """Record that the log is durable up to the point."""
        self.synced = max(self.synced, point[0])
        self._names_synced = max(self._names_synced, point[1])

    def remove_before(self, offset: ActionOffset) -> None:
        """Remove segments that end at or before ``offset``; the open one stays."""
        while len(self.segments) > 1 and self.segments[0].end <= offset:
            # Not closed: a sync in another thread may be at work on it.
            self._files.remove(self.segments[0].path)
            self.segments = self.segments[1:]

    def close(self) -> None:
        for segment in self.segments:
            segment.file.close()

    def _records(self, actions: Iterable[Action | bytes]) -> bytes:
        """Encode facts for the end of the log, after a mark if one is due."""
        try:
            payloads = [
                action if isinstance(action, bytes) else encode_action(action)
                for action in actions
            ]
        except error as problem:
            raise UsageError(f"a fact cannot be written down: {problem}") from None
        if self.synced > self._marked:
            payloads.insert(0, MARK.pack(MARK_TYPE, self.synced))
        records = []
        offset = int(self.end)
        for payload in payloads:
            if len(payload) > LARGEST_FACT:
                raise UsageError(
                    f"a fact of {len(payload)} bytes; at most {LARGEST_FACT} are allowed"
                )
            where = _WHERE.pack(offset, len(payload))
            crc = google_crc32c.value(where + payload)
            records.append(_HEAD.pack(len(payload), crc) + payload)
            offset += len(records[-1])
        return b"".join(records)

    def _cut_tail(self, durable: int) -> None:
        """Cut the log at the first damage that no sync had covered."""
        highest = durable
        damages: list[tuple[int, int]] = []
        offset = durable
        for i, segment in enumerate(self.segments):
            if segment.end <= durable and i + 1 < len(self.segments):
                continue
            if segment.base > offset and i > 0:
                damages.append((i - 1, offset))
            data = segment.read(segment.base, segment.end - segment.base)
            for at, _, fact in _walk(data, segment.base, max(durable - segment.base, 0)):
                place = segment.base + at
                if fact is None:
                    damages.append((i, place))
                elif fact[0] == MARK_TYPE and len(fact) == MARK.size:
                    (synced,) = MARK.unpack(fact)[1:]
                    highest = max(highest, min(synced, place))
            offset = segment.end
        torn = next(((i, place) for i, place in damages if place >= highest), None)
        if torn is not None:
            self._cut(*torn)

    def _cut(self, index: int, offset: int) -> None:
        segment = self.segments[index]
        lost = self.segments[-1].end - offset
        for later in self.segments[index + 1 :]:
            later.file.close()
            self._files.remove(later.path)
        del self.segments[index + 1 :]
        # Its file stays even if nothing is left of it: it says that the log reaches this far,
        # though all segments before may have been removed.
        if offset < segment.end:
            segment.file.truncate(offset - segment.base)
            segment.file.sync()
            segment.end = offset
        self._files.sync_directory(DIRECTORY)
        self.was_cut = True
        self._listener.tail_cut(segment.path, offset, lost)


def walk_actions(data: bytes, base: int, at: int = 0) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield place, size and encoded fact of every record in a segment's bytes from ``at`` on.

    The fact is None for a range that cannot be read. Marks are left out.
    """
    for place, size, fact in _walk(data, base, at):
        if fact is None or fact[0] != MARK_TYPE:
            yield place, size, fact


def _walk(data: bytes, base: int, at: int) -> Iterator[tuple[int, int, bytes | None]]:
    effort = _SEARCH_FACTOR * len(data)
    while at < len(data):
        size = valid_size(data, at, base)
        if size is None:
            after, effort = _next_valid(data, at, base, effort)
            yield at, after - at, None
            at = after
        else:
            yield at, size, data[at + _HEAD.size : at + size]
            at += size


def _decoded(fact: bytes | None) -> Action | str:
    """Return a fact, or a text that describes the damage."""
    if fact is None:
        return "facts cannot be read"
    try:
        return decode_action(fact)
    except ValueError as problem:
        return str(problem)


def valid_size(data: bytes, at: int, base: int) -> int | None:
    """Return the size of the record at ``at``, or None if there is no valid one."""
    try:
        size, crc = _HEAD.unpack_from(data, at)
    except error:
        return None
    end = at + _HEAD.size + size
    if not 0 < size <= LARGEST_FACT or end > len(data):
        return None
    where = _WHERE.pack(base + at, size)
    payload = data[at + _HEAD.size : end]
    return end - at if google_crc32c.value(where + payload) == crc else None


def _next_valid(data: bytes, at: int, base: int, effort: int) -> tuple[int, int]:
    """Return where the next valid record begins, or the end of the data, and the effort left.

    Records have no magic number, so every place with a possible size and type is tried. The
    effort is bounded, in case bytes were made to look like records everywhere.
    """
    start, count = at + 1, _SEARCHED_FIRST
    while start < len(data):
        end = min(start + count, len(data))
        for place, size in _candidates(data, start, end):
            effort -= size
            if effort < 0:
                return len(data), 0
            if valid_size(data, place, base) is not None:
                return place, effort
        start, count = end, min(count * 4, _SEARCHED_AT_ONCE)
    return len(data), effort


def _candidates(data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the places of ``start..end`` where a record could begin, with its size."""
    piece = np.frombuffer(data, np.uint8)[start : end + _HEAD.size].astype(np.uint32)
    count = min(end - start, len(piece) - _HEAD.size)
    if count <= 0:
        return
    sizes = piece[:count] | piece[1 : count + 1] << 8
    sizes |= piece[2 : count + 2] << 16 | piece[3 : count + 3] << 24
    types = piece[_HEAD.size : _HEAD.size + count]
    room = len(data) - _HEAD.size - np.arange(start, start + count)
    fits = (sizes >= _LEAST[types]) & (sizes <= _MOST[types]) & (sizes <= room)
    for i in np.flatnonzero(fits):
        yield start + int(i), int(sizes[i])


_LEAST, _MOST = size_limits()

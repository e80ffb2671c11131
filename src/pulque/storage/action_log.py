"""The action log: what consumers did, in order. The truth of consumption.

::

    +----------+---------+---------+----------------+
    | size u32 | crc u32 | type u8 | fields         |
    +----------+---------+---------+----------------+

``size`` counts what follows the crc. ``crc`` is CRC-32C over the record's offset, its size and
what follows: a record is valid only where it was written. Every append is one write, before the
rules see the fact. Each segment begins with the subscriptions that are open, as facts of their
own, so that the numbers in it have a meaning.
"""

from collections.abc import Iterable, Iterator
from struct import Struct, error

import google_crc32c

from pulque.errors import StorageError
from pulque.model.actions import (
    Action,
    ConsumerLost,
    GroupOpened,
    NackedDelivery,
    Pulled,
    Settled,
    SubscriptionOpened,
)
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import ActionOffset, Epoch, StartCount, Tenure
from pulque.storage.files import File, FileSystem
from pulque.storage.listener import Listener
from pulque.storage.options import StorageOptions
from pulque.storage.segment import Segment

__all__ = ["DIRECTORY", "ActionLog", "decode_action", "encode_action", "walk_actions"]

DIRECTORY = "actions"
_HEAD = Struct("<II")
_WHERE = Struct("<QI")
_GROUP = Struct("<BIQB")
_SUBSCRIPTION = Struct("<BIIQBB")
_PULLED = Struct("<BIIIQQIq")
_SETTLED = Struct("<BIQQqH")
_NACKED = Struct("<QqH")
_LOST = Struct("<BIqH")
_GROUP_TYPE, _SUBSCRIPTION_TYPE, _PULLED_TYPE, _SETTLED_TYPE, _LOST_TYPE = range(1, 6)
_LARGEST = 16 * 1024 * 1024
_MAX_REASON = 1000


def encode_action(action: Action) -> bytes:
    """Return a fact as bytes: its type and its fields."""
    match action:
        case Pulled(subscription, tenure, first_pull, first_sequence, count, at_ms):
            return _PULLED.pack(
                _PULLED_TYPE, subscription, *tenure, first_pull, first_sequence, count, at_ms
            )
        case Settled(subscription, first, last, nacked, at_ms):
            head = _SETTLED.pack(_SETTLED_TYPE, subscription, first, last, at_ms, len(nacked))
            return head + b"".join(map(_encode_nacked, nacked))
        case ConsumerLost(subscription, reason, at_ms):
            text = reason.encode()[:_MAX_REASON]
            return _LOST.pack(_LOST_TYPE, subscription, at_ms, len(text)) + text
        case GroupOpened(partition, group, next_sequence):
            name = group.encode()
            return _GROUP.pack(_GROUP_TYPE, partition, next_sequence, len(name)) + name
        case SubscriptionOpened(subscription, partition, group, consumer, incarnation):
            names = group.encode(), consumer.encode()
            head = _SUBSCRIPTION.pack(
                _SUBSCRIPTION_TYPE, subscription, partition, incarnation, *map(len, names)
            )
            return head + b"".join(names)


def decode_action(data: bytes) -> Action:
    """Return the fact that ``encode_action`` made ``data`` from."""
    match data[0]:
        case 3:
            _, subscription, epoch, start, *fields = _PULLED.unpack(data)
            return Pulled(subscription, Tenure(Epoch(epoch), StartCount(start)), *fields)
        case 4:
            _, subscription, first, last, at_ms, count = _SETTLED.unpack_from(data)
            nacked = tuple(_decode_nacked(data, _SETTLED.size, count))
            return Settled(subscription, first, last, nacked, at_ms)
        case 5:
            _, subscription, at_ms, size = _LOST.unpack_from(data)
            text = data[_LOST.size : _LOST.size + size]
            return ConsumerLost(subscription, text.decode(errors="replace"), at_ms)
        case 1:
            _, partition, sequence, size = _GROUP.unpack_from(data)
            group = data[_GROUP.size : _GROUP.size + size].decode()
            return GroupOpened(partition, Group(group), sequence)
        case 2:
            _, subscription, partition, incarnation, *sizes = _SUBSCRIPTION.unpack_from(data)
            at = _SUBSCRIPTION.size
            group = data[at : at + sizes[0]].decode()
            consumer = data[at + sizes[0] : at + sum(sizes)].decode()
            return SubscriptionOpened(
                subscription, partition, Group(group), ConsumerId(consumer), incarnation
            )
        case kind:
            raise ValueError(f"a fact of type {kind} is unknown")


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
        self.end = ActionOffset(segments[-1].end if segments else 0)
        self._unsynced: list[File] = []
        self._is_directory_unsynced = False

    @classmethod
    def open(
        cls, files: FileSystem, options: StorageOptions, listener: Listener, durable: int
    ) -> "ActionLog":
        """Open the log and cut its torn tail.

        Args:
            files: The data directory.
            options: The engine's.
            listener: The engine's.
            durable: The log was on disk up to here: damage below is reported, never cut.
        """
        files.make_directory(DIRECTORY)
        segments = []
        for name in files.list(DIRECTORY):
            stem, _, suffix = name.partition(".")
            if suffix != "log":
                continue
            path = f"{DIRECTORY}/{name}"
            file = files.open(path)
            segments.append(Segment(path, file, int(stem), int(stem) + file.size()))
        log = cls(files, options, listener, segments)
        log._cut_tail(durable)
        return log

    def append(self, action: Action) -> None:
        """Append one fact.

        Raises:
            StorageError: It is not in the log.
        """
        record = self._record(encode_action(action))
        segment = self.segments[-1]
        at = segment.end - segment.base
        try:
            segment.file.write((record,), at)
        except StorageError:
            segment.file.truncate(at)
            raise
        segment.end += len(record)
        self.end = ActionOffset(segment.end)
        if not self._unsynced:
            self._unsynced.append(segment.file)

    def needs_roll(self) -> bool:
        """Say whether the open segment is full, or none is open."""
        if not self.segments:
            return True
        segment = self.segments[-1]
        return segment.end - segment.base >= self._options.action_segment_bytes

    def start_segment(self, opened: Iterable[Action]) -> None:
        """Begin a new segment with the subscriptions that are open."""
        base = self.end
        path = f"{DIRECTORY}/{base:020d}.log"
        file = self._files.open(path, create=True)
        file.truncate(0)
        self.segments.append(Segment(path, file, base, base))
        self._unsynced.append(file)
        self._is_directory_unsynced = True
        for action in opened:
            self.append(action)

    def replay(self, start: ActionOffset) -> Iterator[Action]:
        """Yield every fact from ``start`` on; damaged ranges are reported and passed over."""
        for segment in self.segments:
            if segment.end <= start:
                continue
            data = segment.read(segment.base, segment.end - segment.base)
            for at, size, fact in walk_actions(data, segment.base, max(start - segment.base, 0)):
                if fact is None:
                    self._listener.corruption_found(
                        segment.path, segment.base + at, size, "facts cannot be read"
                    )
                else:
                    yield decode_action(fact)

    def sync_steps(self) -> list[object]:
        """Return what makes all facts durable, as calls without arguments; empty if they are."""
        steps: list[object] = [file.sync for file in self._unsynced]
        if self._is_directory_unsynced:
            steps.append(lambda: self._files.sync_directory(DIRECTORY))
        self._unsynced = []
        self._is_directory_unsynced = False
        return steps

    def remove_before(self, offset: ActionOffset) -> None:
        """Remove segments that end at or before ``offset``; the open one stays."""
        while len(self.segments) > 1 and self.segments[0].end <= offset:
            segment = self.segments.pop(0)
            segment.file.close()
            self._files.remove(segment.path)

    def close(self) -> None:
        for segment in self.segments:
            segment.file.close()

    def _record(self, payload: bytes) -> bytes:
        where = _WHERE.pack(self.end, len(payload))
        return _HEAD.pack(len(payload), google_crc32c.value(where + payload)) + payload

    def _cut_tail(self, durable: int) -> None:
        """Cut the log at the first damage that no sync had covered."""
        for i, segment in enumerate(self.segments):
            if segment.end <= durable:
                continue
            data = segment.read(segment.base, segment.end - segment.base)
            at = max(durable - segment.base, 0)
            while at < len(data) and (size := _valid_size(data, at, segment.base)) is not None:
                at += size
            broken = at < len(data) or (
                i + 1 < len(self.segments) and self.segments[i + 1].base != segment.end
            )
            if broken:
                self._cut(i, segment.base + at)
                break
        if self.segments:
            self.end = ActionOffset(self.segments[-1].end)

    def _cut(self, index: int, offset: int) -> None:
        segment = self.segments[index]
        lost = self.segments[-1].end - offset
        for later in self.segments[index + 1 :]:
            later.file.close()
            self._files.remove(later.path)
        del self.segments[index + 1 :]
        segment.file.truncate(offset - segment.base)
        segment.file.sync()
        self._files.sync_directory(DIRECTORY)
        segment.end = offset
        self._listener.tail_cut(segment.path, offset, lost)


def walk_actions(data: bytes, base: int, at: int = 0) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield place, size and encoded fact of every record in a segment's bytes from ``at`` on.

    The fact is None for a range that cannot be read.
    """
    while at < len(data):
        size = _valid_size(data, at, base)
        if size is None:
            after = _next_valid(data, at, base)
            yield at, after - at, None
            at = after
        else:
            yield at, size, data[at + _HEAD.size : at + size]
            at += size


def _encode_nacked(nacked: NackedDelivery) -> bytes:
    reason = nacked.reason.encode()[:_MAX_REASON]
    return _NACKED.pack(nacked.sequence, nacked.delay_ms, len(reason)) + reason


def _decode_nacked(data: bytes, at: int, count: int) -> Iterator[NackedDelivery]:
    for _ in range(count):
        sequence, delay_ms, size = _NACKED.unpack_from(data, at)
        at += _NACKED.size
        yield NackedDelivery(sequence, delay_ms, data[at : at + size].decode(errors="replace"))
        at += size


def _valid_size(data: bytes, at: int, base: int) -> int | None:
    """Return the size of the record at ``at``, or None if there is no valid one."""
    try:
        size, crc = _HEAD.unpack_from(data, at)
    except error:
        return None
    end = at + _HEAD.size + size
    if not 0 < size <= _LARGEST or end > len(data):
        return None
    where = _WHERE.pack(base + at, size)
    payload = data[at + _HEAD.size : end]
    return end - at if google_crc32c.value(where + payload) == crc else None


def _next_valid(data: bytes, at: int, base: int) -> int:
    """Return where the next valid record begins, or the end of the data."""
    return next((i for i in range(at + 1, len(data)) if _valid_size(data, i, base)), len(data))

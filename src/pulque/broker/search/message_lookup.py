"""The work of finding messages, done by a thread: candidates are read, checked, and packed.

An index knows hashes only: that a message has the very key is for whoever asked to see. But it is
in the subject and the time that was asked for, and confirmed. Python lets one thread run at a
time, so this one pauses often.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from struct import Struct

from pulque.broker.settling.message_extraction import Extractor, pack_alone
from pulque.errors import InvalidBatchError, InvalidRequestError, UnknownSubjectError
from pulque.model.message import Message
from pulque.model.names import owner_of, subject_of
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.indexes.key_index import KeyCandidate, KeyIndex, KeyQuery
from pulque.storage.indexes.key_rows import hash_of_id, hash_of_key
from pulque.storage.logs.partitions import Partition
from pulque.wire.find import ANY_TIME_MS, Find, FoundMessage, FoundMessages
from pulque.wire.frame import MAX_PAYLOAD

__all__ = ["Looking"]

_PLACE = Struct("<QI")
_END = Struct("<IQ")
_BY_HASH, _BY_TIME = b"h", b"t"
_AT_ONCE = 8
_PAUSE_S = 0.0001
_LARGEST = MAX_PAYLOAD - 64 * 1024
"""A batch that grows beyond it when it is opened cannot be answered with."""


class Looking:
    """One request, and what was found for it.

    Args:
        engine: Has the messages.
        index: Says where those of a hash may be.
        request: What is looked for; it has been checked.
        max_bytes: About how many bytes an answer may have.
        is_over: Says whether the time is up.
    """

    def __init__(
        self,
        engine: Engine,
        index: KeyIndex,
        request: Find,
        max_bytes: int,
        is_over: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._index = index
        self._request = request
        self._is_over = is_over
        self._extractor = Extractor(engine)
        self._room = min(request.max_bytes, max_bytes)
        self._found: list[FoundMessage] = []
        self._partitions = {each.id: each for each in self._wanted_partitions()}
        if not self._partitions and request.subject:
            raise UnknownSubjectError(f"no message was ever sent to {request.subject} here")

    def look(self) -> FoundMessages:
        """Return what there is, and where to go on."""
        by_hash = bool(self._request.key or self._request.id)
        following = self._by_hash() if by_hash else self._by_time()
        return FoundMessages(tuple(self._found), following)

    def _wanted_partitions(self) -> Iterator[Partition]:
        subject, copies = self._request.subject, self._request.copies
        # A list: more may be made meanwhile.
        for partition in list(self._engine.partitions.by_id.values()):
            name = partition.name
            is_ours = subject in name and (not subject or subject_of(name) == subject)
            if is_ours and (copies or owner_of(name) is None):
                yield partition

    # ── by hash ────────────────────────────────────────────────────────────────────────────

    def _by_hash(self) -> bytes:
        request = self._request
        at = _read_place(request.after)
        wanted = KeyQuery(
            hash_of_id(request.id) if request.id else hash_of_key(request.subject, request.key),
            bool(request.id),
            request.since_ms,
            request.until_ms,
            at,
        )
        for looked in self._index.look(wanted):
            for candidate in looked.candidates:
                message = self._read(candidate)
                if message is not None and not self._add(message):
                    return _write_place(candidate.offset, candidate.index + 1)
                at = candidate
                if self._is_full():
                    return _write_place(*at)
            at = min(at, (looked.begin, 0))
            if self._is_over():
                return _write_place(*at)
            time.sleep(0)  # a thread that waits for the interpreter gets it now
        return b""

    def _read(self, candidate: KeyCandidate) -> Message | None:
        """Return a candidate, unless it is not wanted, not confirmed, or cannot be read."""
        envelope = self._envelope(candidate.offset)
        if envelope is None or candidate.index >= envelope.count:
            return None
        partition = self._partitions.get(envelope.partition)
        if partition is None:
            return None
        if not self._request.since_ms <= envelope.stored_at_ms < self._request.until_ms:
            return None
        sequence = ConsumeSequence(envelope.first_sequence + candidate.index)
        return next(iter(self._messages(partition, [sequence])), None)

    def _envelope(self, offset: int) -> Envelope | None:
        segments = self._engine.segments
        segment = segments[max(bisect_right(segments, offset, key=lambda each: each.base) - 1, 0)]
        if not segment.base <= offset < segment.end:
            return None  # retention has removed it meanwhile
        envelope = read_envelope(segment.read(offset, ENVELOPE_SIZE))
        if isinstance(envelope, str) or envelope.offset != offset:
            return None
        return envelope if envelope.type is RecordType.BATCH else None

    # ── by time ────────────────────────────────────────────────────────────────────────────

    def _by_time(self) -> bytes:
        ranges = self._ranges()
        ends = {partition.id: end for partition, _, end in ranges}
        walks = [self._backwards(*each, ends) for each in ranges]
        newest = merge(*walks, key=lambda found: (found[1].stored_at_ms, -found[0]), reverse=True)
        is_done = True
        for partition, message in newest:
            if self._is_over() or not self._add(message):
                is_done = False
                break
            ends[partition] = message.sequence
            if self._is_full():
                is_done = False
                break
        if is_done and not self._is_over():
            return b""
        left = [(each.id, ends[each.id]) for each, first, _ in ranges if ends[each.id] > first]
        return _BY_TIME + b"".join(_END.pack(*each) for each in left) if left else b""

    def _ranges(self) -> list[tuple[Partition, ConsumeSequence, ConsumeSequence]]:
        """Return what of each partition was stored at that time, and not answered with yet."""
        since_ms, until_ms = self._request.since_ms, self._request.until_ms
        known = _read_ends(self._request.after)
        found = []
        for partition in self._partitions.values():
            first, end = partition.start, partition.confirmed
            if known is not None:
                end = ConsumeSequence(min(end, known.get(partition.id, 0)))
            elif until_ms != ANY_TIME_MS:
                end = min(end, self._engine.at_time(partition, until_ms))
            if since_ms > 0 and first < end:
                first = self._engine.at_time(partition, since_ms)
            if first < end:
                found.append((partition, first, end))
        return found

    def _backwards(
        self,
        partition: Partition,
        first: ConsumeSequence,
        end: ConsumeSequence,
        ends: dict[PartitionId, ConsumeSequence],
    ) -> Iterator[tuple[PartitionId, Message]]:
        """Yield messages from the newest on; write down where there are none."""
        while end > first and not self._is_over():
            start = max(first, end - _AT_ONCE)
            sequences = [ConsumeSequence(each) for each in range(start, end)]
            messages = list(self._messages(partition, sequences))
            for message in reversed(messages):
                yield partition.id, message
            end = ends[partition.id] = ConsumeSequence(start)

    # ── both ───────────────────────────────────────────────────────────────────────────────

    def _messages(
        self, partition: Partition, sequences: list[ConsumeSequence]
    ) -> Iterable[Message]:
        time.sleep(_PAUSE_S)
        return self._extractor.messages(partition, sequences)

    def _add(self, message: Message) -> bool:
        """Take in a message; say whether there was room for it."""
        try:
            batch = pack_alone(message)
        except InvalidBatchError:
            return True  # its producer packed nonsense
        if len(batch) > _LARGEST:
            return True
        if self._found and len(batch) > self._room:
            return False
        self._room -= len(batch)
        self._found.append(
            FoundMessage(message.partition, message.sequence, message.stored_at_ms, batch)
        )
        return True

    def _is_full(self) -> bool:
        return len(self._found) >= self._request.max_messages or self._room <= 0


def _write_place(offset: int, index: int) -> bytes:
    return _BY_HASH + _PLACE.pack(offset, index)


def _read_place(after: bytes) -> tuple[int, int]:
    if not after:
        return KeyQuery(0, is_id=False).before
    if not after.startswith(_BY_HASH) or len(after) != 1 + _PLACE.size:
        raise InvalidRequestError("this is no place where an answer to the same request ended")
    offset, index = _PLACE.unpack_from(after, 1)
    return offset, index


def _read_ends(after: bytes) -> dict[int, int] | None:
    if not after:
        return None
    if not after.startswith(_BY_TIME) or (len(after) - 1) % _END.size:
        raise InvalidRequestError("this is no place where an answer to the same request ended")
    return dict(_END.iter_unpack(after[1:]))

"""Single messages, taken out of stored batches and packed anew: for retries and dead letters.

This is work for a thread, and there may be much of it. Python lets one thread run at a time, so
whoever works here pauses often: the event loop never waits long for its turn.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pulque.errors import InvalidBatchError, StorageError
from pulque.model.batch import Codec, Flag, seed_of
from pulque.model.gathered import GATHERED_MAGIC, Gathered, read_gathered
from pulque.model.groups import Filter
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, encode_headers
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.files import Buffer
from pulque.storage.indexes.consume_log import Span
from pulque.storage.logs.partitions import Partition
from pulque.storage.reading.tag_search import Budget, TagTest

__all__ = [
    "Extractor",
    "Packing",
    "RepackedBatch",
    "Unreadable",
    "Withheld",
    "pack_alone",
    "unreadable_message",
    "withheld_of",
]

_KEYS, _ORDER_KEYS = int(Flag.KEYS), int(Flag.ORDER_KEYS)
_TAGS, _HEADERS = int(Flag.TAGS), int(Flag.HEADERS)
_MOST_BYTES = 1024 * 1024
_NEAR = 16
"""Messages that are not wanted are read along if so few lie between two that are."""
_MESSAGES_AT_ONCE = 16
_MOST_WANTED = 500
_MOST_ENTRIES, _MOST_READ = 65_536, 16 * 1024 * 1024
_PAUSE_S = 0.0001


class Unreadable(NamedTuple):
    """Messages ``first..end`` of a stored batch, which cannot be decoded."""

    first: ConsumeSequence
    end: ConsumeSequence
    batch_first: ConsumeSequence
    """The sequence of the batch's first message."""
    raw: bytes
    """The batch, or as much of it as was read."""
    problem: str
    message_id: bytes = b""
    """Of the message, if it is a single one of a batch that can be decoded."""


class Withheld(NamedTuple):
    """Messages ``first..end``, which cannot be read now: their bytes may be whole elsewhere."""

    first: ConsumeSequence
    end: ConsumeSequence
    problem: StorageError


class Extractor:
    """Reads single messages. May be used from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def messages(
        self, partition: Partition, sequences: Sequence[ConsumeSequence]
    ) -> Iterator[Message]:
        """Yield the messages of ascending sequences; those that cannot be read are left out."""
        found = self.found(partition, sequences)
        return (each for each in found if isinstance(each, Message))

    def found(
        self,
        partition: Partition,
        sequences: Sequence[ConsumeSequence],
        withheld: list[Withheld] | None = None,
    ) -> Iterator[Message | Unreadable]:
        """Yield the messages of ascending sequences, and batches of theirs that do not decode.

        What is not stored any more is left out.

        Args:
            partition: Where they are.
            sequences: Which messages.
            withheld: Where to add what cannot be read; without it, the first problem is raised.

        Raises:
            StorageError: Some cannot be read.
        """
        decoder = _Decoder(partition.name)
        wanted = set(sequences)
        found = 0
        for start, end in _runs(sequences):
            at = start
            while at < end:
                span = self._engine.span(
                    partition, at, max_messages=end - at, max_bytes=_MOST_BYTES, end=end
                )
                for part, records in self._read(partition, span, withheld):
                    for each in decoder.found(records, part.first_sequence, part.end):
                        if isinstance(each, Message) and each.sequence not in wanted:
                            continue
                        yield each
                        found += 1
                        if found % _MESSAGES_AT_ONCE == 0:
                            time.sleep(_PAUSE_S)
                if not span.pieces:
                    break
                at = span.end

    def _read(
        self, partition: Partition, span: Span, withheld: list[Withheld] | None
    ) -> Iterator[tuple[Span, list[Buffer]]]:
        """Yield the records of a span; if some cannot be read, those of each batch by itself."""
        try:
            yield span, self._engine.read(partition, span)  # also of nothing but a hole
        except StorageError:
            if withheld is None:
                raise
        else:
            return
        for part in _parts(span):
            try:
                yield part, self._engine.read(partition, part)
            except StorageError as problem:
                withheld.append(Withheld(part.first_sequence, part.end, problem))

    def wanted(
        self, partition: Partition, first: ConsumeSequence, end: ConsumeSequence, wishes: Filter
    ) -> tuple[ConsumeSequence, list[ConsumeSequence]]:
        """Look for messages that a filter wants; return how far, and which they are.

        So much is looked through at once that it takes a moment.
        """
        if not wishes.kind:
            examined = ConsumeSequence(min(end, first + _MOST_WANTED))
            return examined, [ConsumeSequence(each) for each in range(first, examined)]
        test = TagTest(wishes.any_bits, wishes.all_bits)
        budget = Budget(_MOST_WANTED, _MOST_BYTES, _MOST_ENTRIES, _MOST_READ)
        found = self._engine.search.find(partition, first, test, budget, end=end)
        decoder = _Decoder(partition.name)
        sequences: list[ConsumeSequence] = []
        for each in decoder.found(found.buffers, found.first_sequence, found.end):
            if isinstance(each, Unreadable):
                sequences += map(ConsumeSequence, range(each.first, each.end))
            elif _matches(wishes, each):
                sequences.append(each.sequence)
        # Behind the end of the partition, or of what is left of it, there is nothing to look at.
        is_all = found.examined >= min(end, partition.confirmed) or found.examined <= first
        return end if is_all else found.examined, sequences


def _matches(wishes: Filter, message: Message) -> bool:
    try:
        return wishes.matches(message.tags)
    except InvalidBatchError:
        return True  # its producer packed nonsense: whoever redelivers it says so


def _parts(span: Span) -> Iterator[Span]:
    """Yield each hole and each batch of a span."""
    for hole in span.holes:
        yield Span(ConsumeSequence(hole.first), ConsumeSequence(hole.end), [], (hole,))
    for piece in span.pieces:
        base = piece.entry.first_sequence
        yield Span(ConsumeSequence(base + piece.start), ConsumeSequence(base + piece.end), [piece])


def _runs(
    sequences: Sequence[ConsumeSequence],
) -> Iterator[tuple[ConsumeSequence, ConsumeSequence]]:
    """Yield ranges that cover ascending sequences, and little else."""
    start = before = None
    for sequence in sequences:
        if start is None or before is None:
            start = sequence
        elif sequence - before > _NEAR:
            yield start, ConsumeSequence(before + 1)
            start = sequence
        before = sequence
    if start is not None and before is not None:
        yield start, ConsumeSequence(before + 1)


class _Decoder:
    """Reads messages out of served records.

    A compressed batch is served whole for any of its messages, so the last one is kept.
    """

    def __init__(self, partition: PartitionName) -> None:
        self._partition = partition
        self._last: tuple[tuple[int, int, int], StoredBatch | str] = ((-1, 0, 0), "")

    def found(
        self, records: Iterable[Buffer], first: int, end: int
    ) -> Iterator[Message | Unreadable]:
        """Yield the messages of sequences ``first..end``, and batches that do not decode."""
        data = b"".join(records)
        at = 0
        while at < len(data):
            gathered = read_gathered(data, at) if data.startswith(GATHERED_MAGIC, at) else ""
            if isinstance(gathered, Gathered):
                batch = StoredBatch.gathered(gathered, self._partition)
                yield from (Message(batch, i) for i in range(len(batch)))
                at += gathered.size
                continue
            envelope = read_envelope(data, at)
            if not isinstance(envelope, Envelope):
                return
            content = data[at + ENVELOPE_SIZE : at + envelope.size]
            at += envelope.size
            opened = self._open(envelope, content)
            start = ConsumeSequence(max(first, envelope.first_sequence))
            stop = ConsumeSequence(min(end, envelope.first_sequence + envelope.count))
            if isinstance(opened, StoredBatch):
                before = opened.first_sequence
                yield from (Message(opened, i - before) for i in range(start, stop))
            elif start < stop:
                yield Unreadable(start, stop, envelope.first_sequence, content, opened)

    def _open(self, envelope: Envelope, content: bytes) -> StoredBatch | str:
        """Return a batch, or why it cannot be decoded."""
        # Parts of a batch that is not compressed have the offset of the whole.
        key = (envelope.offset, envelope.first_sequence, envelope.count)
        last, opened = self._last
        if last == key:
            return opened
        try:
            opened = StoredBatch(
                content,
                partition=self._partition,
                first_sequence=envelope.first_sequence,
                stored_at_ms=envelope.stored_at_ms,
            )
            opened.body_starts()  # no message has a body if the parts of one do not fit
        except InvalidBatchError as error:
            opened = str(error)
        self._last = key, opened
        return opened


def withheld_of(
    sequences: Iterable[ConsumeSequence], withheld: Iterable[Withheld]
) -> list[ConsumeSequence]:
    """Return which of some messages are withheld, in ascending order."""
    ranges = sorted((each.first, each.end) for each in withheld)
    found: list[ConsumeSequence] = []
    at = 0
    for sequence in sorted(sequences):
        while at < len(ranges) and ranges[at][1] <= sequence:
            at += 1
        if at < len(ranges) and ranges[at][0] <= sequence:
            found.append(sequence)
    return found


def unreadable_message(message: Message, problem: str) -> Unreadable:
    """Return a message, parts of which cannot be decoded, as a batch of its own."""
    batch, index = message.source()
    first, end = message.sequence, ConsumeSequence(message.sequence + 1)
    return Unreadable(first, end, first, pack_alone(message), problem, batch.id_of(index))


def pack_alone(message: Message) -> bytes:
    """Return a batch of a message alone, not compressed."""
    batch, index = message.source()
    if len(batch) == 1 and batch.header.codec == Codec.NONE:
        return batch.data
    packer = BatchPacker()
    packer.add_encoded(
        message.body,
        key=batch.part(index, _KEYS),
        order_key=batch.part(index, _ORDER_KEYS),
        tags=batch.part(index, _TAGS),
        headers=batch.part(index, _HEADERS),
        expires_at_ms=message.expires_at_ms,
        created_at_ms=message.created_at_ms,
        attempt=message.attempt,
        message_id=batch.id_of(index),
        due_at_ms=message.due_at_ms,
    )
    return packer.encode(
        seed=seed_of(message.partition),
        ids=b"",
        created_at_ms=message.created_at_ms,
        priority=message.priority,
    )


class RepackedBatch(NamedTuple):
    """A batch to be appended, and what it was made of."""

    target: PartitionName
    batch: bytes
    sequences: list[ConsumeSequence]
    """Of the messages in the partition that they were taken from."""
    due_ms: list[int]
    """When each of them is due, if they go to a waiting partition; else empty."""
    batch_first: ConsumeSequence | None = None
    """Where the batch begins that this letter has the bytes of, if it cannot be decoded."""


class _Pile:
    """What goes to one partition with one priority."""

    def __init__(self) -> None:
        self.packer = BatchPacker()
        self.sequences: list[ConsumeSequence] = []
        self.due_ms: list[int] = []
        self.size = 0


class Packing:
    """Collects messages for several partitions into batches of a bearable size."""

    def __init__(self) -> None:
        self._piles: dict[tuple[PartitionName, int], _Pile] = {}
        self._done: list[RepackedBatch] = []

    def add(  # a message, and what changes about it
        self,
        target: PartitionName,
        message: Message,
        *,
        headers: Mapping[str, str],
        attempt: int,
        due_ms: int = 0,
        body: bytes | None = None,
    ) -> None:
        """Add a message as it is, but for what is given.

        Raises:
            InvalidBatchError: Its producer packed nonsense.
        """
        key = (target, message.priority)
        pile = self._piles.get(key) or _Pile()
        batch, index = message.source()
        content = message.body if body is None else body
        extra = pile.packer.add_encoded(
            content,
            key=batch.part(index, _KEYS),
            order_key=batch.part(index, _ORDER_KEYS),
            tags=batch.part(index, _TAGS),
            headers=encode_headers(headers, is_system=True),
            expires_at_ms=message.expires_at_ms,
            created_at_ms=message.created_at_ms,
            attempt=attempt,
            message_id=batch.id_of(index),
            due_at_ms=due_ms,
        )
        self._piles[key] = pile
        pile.sequences.append(message.sequence)
        if due_ms:
            pile.due_ms.append(due_ms)
        pile.size += len(content) + extra
        if pile.size >= _MOST_BYTES:
            del self._piles[key]
            self._finish(key, pile)

    def batches(self) -> list[RepackedBatch]:
        """Return all that was added, packed."""
        for key, pile in self._piles.items():
            self._finish(key, pile)
        self._piles = {}
        return self._done

    def _finish(self, key: tuple[PartitionName, int], pile: _Pile) -> None:
        target, priority = key
        ids = b"\0" * (16 * len(pile.packer))  # each message brings its own
        batch = pile.packer.encode(
            seed=seed_of(target), ids=ids, created_at_ms=0, priority=priority
        )
        self._done.append(RepackedBatch(target, batch, pile.sequences, pile.due_ms))

"""Single messages, taken out of stored batches and packed anew: for retries and dead letters.

This is work for a thread, and there may be much of it. Python lets one thread run at a time, so
whoever works here pauses often: the event loop never waits long for its turn.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pulque.errors import InvalidBatchError
from pulque.model.batch import Codec, Flag, read_header, seed_of
from pulque.model.gathered import GATHERED_MAGIC, Gathered, read_gathered
from pulque.model.groups import Filter
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, encode_headers
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.files import Buffer
from pulque.storage.partitions import Partition
from pulque.storage.search import Budget, TagTest

__all__ = ["Extractor", "Packed", "Packing"]

_KEYS, _ORDER_KEYS, _TAGS = int(Flag.KEYS), int(Flag.ORDER_KEYS), int(Flag.TAGS)
_MOST_BYTES = 1024 * 1024
_NEAR = 16
"""Messages that are not wanted are read along if so few lie between two that are."""
_MESSAGES_AT_ONCE = 16
_MOST_WANTED = 500
_MOST_ENTRIES, _MOST_READ = 65_536, 16 * 1024 * 1024
_PAUSE_S = 0.0001


class Extractor:
    """Reads single messages. May be used from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def messages(
        self, partition: Partition, sequences: Sequence[ConsumeSequence]
    ) -> Iterator[Message]:
        """Yield the messages of ascending sequences; those that cannot be had are left out."""
        decoder = _Decoder(partition.name)
        wanted = set(sequences)
        found = 0
        for start, end in _runs(sequences):
            at = start
            while at < end:
                span = self._engine.span(
                    partition, at, max_messages=end - at, max_bytes=_MOST_BYTES, end=end
                )
                if not span.pieces:
                    break
                records = self._engine.read(partition, span)
                for message in decoder.messages(records, span.first_sequence, span.end):
                    if message.sequence in wanted:
                        yield message
                        found += 1
                        if found % _MESSAGES_AT_ONCE == 0:
                            time.sleep(_PAUSE_S)
                at = span.end

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
        messages = decoder.messages(found.buffers, found.first_sequence, found.end)
        sequences = [each.sequence for each in messages if _matches(wishes, each)]
        # Behind the end of the partition, or of what is left of it, there is nothing to look at.
        is_all = found.examined >= min(end, partition.confirmed) or found.examined <= first
        return end if is_all else found.examined, sequences


def _matches(wishes: Filter, message: Message) -> bool:
    try:
        return wishes.matches(message.tags)
    except InvalidBatchError:
        return True  # its producer packed nonsense: whoever redelivers it says so


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
    """Reads messages out of served records; those that cannot be read are left out.

    A compressed batch is served whole for any of its messages, so the last one is kept.
    """

    def __init__(self, partition: PartitionName) -> None:
        self._partition = partition
        self._last: tuple[int, StoredBatch | None] = (-1, None)

    def messages(self, records: Iterable[Buffer], first: int, end: int) -> Iterator[Message]:
        """Yield the messages of sequences ``first..end``."""
        data = b"".join(records)
        at = 0
        while at < len(data):
            gathered = read_gathered(data, at) if data.startswith(GATHERED_MAGIC, at) else ""
            if isinstance(gathered, Gathered):
                found = StoredBatch.gathered(gathered, self._partition)
                yield from (Message(found, i) for i in range(len(found)))
                at += gathered.size
                continue
            envelope = read_envelope(data, at)
            if not isinstance(envelope, Envelope):
                return
            batch = self._batch(envelope, data[at + ENVELOPE_SIZE : at + envelope.size])
            at += envelope.size
            if batch is not None:
                start = max(first - batch.first_sequence, 0)
                for i in range(start, min(end - batch.first_sequence, len(batch))):
                    yield Message(batch, i)

    def _batch(self, envelope: Envelope, content: bytes) -> StoredBatch | None:
        is_compressed = read_header(content).codec != Codec.NONE
        if is_compressed and self._last[0] == envelope.offset:
            return self._last[1]
        batch: StoredBatch | None = None
        with suppress(InvalidBatchError):
            batch = StoredBatch(
                content,
                partition=self._partition,
                first_sequence=envelope.first_sequence,
                stored_at_ms=envelope.stored_at_ms,
            )
        if is_compressed:
            self._last = envelope.offset, batch
        return batch


class Packed(NamedTuple):
    """A batch to be appended, and what it was made of."""

    target: PartitionName
    batch: bytes
    sequences: list[ConsumeSequence]
    """Of the messages in the partition that they were taken from."""
    due_ms: list[int]
    """When each of them is due, if they go to a waiting partition; else empty."""


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
        self._done: list[Packed] = []

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

    def batches(self) -> list[Packed]:
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
        self._done.append(Packed(target, batch, pile.sequences, pile.due_ms))

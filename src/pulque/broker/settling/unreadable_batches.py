"""Batches that cannot be decoded → dead letters that have their bytes.

A broker opens no records when it stores a batch, so it may hold one whose records do not
decompress, or a message whose headers are no text. Consumers reject those, or are lost with them.
The letter stands for all of their messages that a group must deal with, and names each of them as
its origin, so that a replay makes no second one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

from pulque.broker.settling.message_extraction import RepackedBatch, Unreadable
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.names import Group, PartitionName, dead_partition, level_of, subject_of
from pulque.model.pack import BatchPacker, encode_headers
from pulque.model.positions import ConsumeSequence
from pulque.rules.redelivery import Redelivery
from pulque.rules.retry import (
    DEAD_HEADER,
    FIRST_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    UNREADABLE_BATCH_HEADER,
    UNREADABLE_BODY_HEADER,
    UNREADABLE_COUNT_HEADER,
    UNREADABLE_HEADER,
    UNREADABLE_SIZE_HEADER,
    show_sequences,
)

__all__ = ["UnreadableLetters"]

_MOST_KNOWN = 1024
_MOST_BYTES = 1024 * 1024


class _Key(NamedTuple):
    """A batch that cannot be decoded, for one group."""

    partition: PartitionName
    group: Group
    first: ConsumeSequence


class UnreadableLetters:
    """Makes dead letters of batches. May be used from any thread.

    Args:
        max_body: How many bytes a letter may have.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._known: OrderedDict[_Key, str] = OrderedDict()
        """Which letter has the bytes of a batch. The messages of one batch may be rejected one by
        one: not every letter has to have all the bytes. After a restart one more has."""

    def pack(
        self,
        partition: PartitionName,
        group: Group,
        found: Iterable[Unreadable],
        wanted: Mapping[ConsumeSequence, Redelivery],
        now_ms: int,
    ) -> list[RepackedBatch]:
        """Return the letters to be appended, one for each batch.

        Args:
            partition: Where the batches are stored.
            group: Whose letters they are.
            found: The batches, or parts of them.
            wanted: The messages that the group must deal with.
            now_ms: What time it is.
        """
        parts: dict[ConsumeSequence, list[Unreadable]] = {}
        for each in found:
            parts.setdefault(each.batch_first, []).append(each)
        target = dead_partition(subject_of(partition), group)
        alone: list[RepackedBatch] = []
        together: list[_Letter] = []
        for first, some in parts.items():
            ranges = (range(each.first, each.end) for each in some)
            covered = sorted({ConsumeSequence(n) for one in ranges for n in one if n in wanted})
            if not covered:
                continue
            key = _Key(partition, group, first)
            reason = wanted[covered[0]].reason
            letter = self._letter(key, some[0], covered, reason, now_ms)
            if some[0].message_id:
                together.append(letter)
            else:
                packed = _pack([letter], target, level_of(partition), now_ms)
                alone.append(packed._replace(batch_first=first if letter.body else None))
        piles = _piles(together)
        return alone + [_pack(each, target, level_of(partition), now_ms) for each in piles]

    def written(
        self,
        partition: PartitionName,
        group: Group,
        packed: RepackedBatch,
        sequence: ConsumeSequence,
    ) -> None:
        """Take note that a letter with the bytes of a batch is in the log."""
        if packed.batch_first is not None:
            key = _Key(partition, group, packed.batch_first)
            self._known[key] = f"{packed.target}/{sequence}"
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _letter(
        self,
        key: _Key,
        found: Unreadable,
        covered: list[ConsumeSequence],
        reason: str,
        now_ms: int,
    ) -> "_Letter":
        here = f"{key.partition}/{covered[0]}"
        headers = {
            ORIGIN_HEADER: here,
            FIRST_HEADER: here,
            DEAD_HEADER: f"unreadable: {found.problem}".replace("\0", " "),
            REASON_HEADER: reason.replace("\0", " "),
            UNREADABLE_HEADER: show_sequences(covered),
            UNREADABLE_COUNT_HEADER: str(len(covered)),
            UNREADABLE_BATCH_HEADER: f"{key.partition}/{key.first}",
            UNREADABLE_SIZE_HEADER: str(len(found.raw)),
        }
        body = found.raw[: self._max_body]
        before = self._known.get(key)
        if before is not None:
            headers[UNREADABLE_BODY_HEADER] = before
            body = b""
        drawn = int.from_bytes(blake2b(f"{key} {covered[0]}".encode(), digest_size=8).digest())
        message_id = found.message_id or IdSource(drawn).one(now_ms)
        return _Letter(body, headers, message_id, covered)


class _Letter(NamedTuple):
    body: bytes
    headers: dict[str, str]
    message_id: bytes
    covered: list[ConsumeSequence]


def _piles(letters: Iterable[_Letter]) -> Iterator[list[_Letter]]:
    """Yield letters in piles of a bearable size."""
    pile: list[_Letter] = []
    size = 0
    for letter in letters:
        pile.append(letter)
        size += len(letter.body)
        if size >= _MOST_BYTES:
            yield pile
            pile, size = [], 0
    if pile:
        yield pile


def _pack(
    letters: list[_Letter], target: PartitionName, priority: int, now_ms: int
) -> RepackedBatch:
    packer = BatchPacker()
    for each in letters:
        packer.add_encoded(each.body, headers=encode_headers(each.headers, is_system=True))
    batch = packer.encode(
        seed=seed_of(target),
        ids=b"".join(each.message_id for each in letters),
        created_at_ms=now_ms,
        priority=priority,
    )
    return RepackedBatch(target, batch, [n for each in letters for n in each.covered], [])

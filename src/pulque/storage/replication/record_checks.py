"""Verify records of a log before a follower stores them, and find damaged ones.

Each record costs a constant number of steps, whatever the other bytes.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

from pulque.errors import CorruptionError
from pulque.model.batch import HEADER, BatchHeader, seed_of, verify_crc
from pulque.model.positions import MessageOffset
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, read_envelope
from pulque.storage.directory.layout import ACTIONS, segment_path
from pulque.storage.indexes.index_rebuild import BAD_TABLE
from pulque.storage.logs.action_log import valid_size, walk_actions
from pulque.storage.logs.fact_codec import LARGEST_FACT
from pulque.storage.logs.partitions import Partition, decode_table
from pulque.storage.logs.segment import DamagedBytes, Segment, walk

__all__ = ["BadRange", "MessageCheck", "Whole", "first_bad_action", "whole_actions"]

_FACT_HEAD = Struct("<II")


class Whole(NamedTuple):
    """The complete, intact records in some bytes of the message log."""

    size: int
    seeds: dict[int, int]
    """The CRC seeds of the partitions in their tables, by id."""


class BadRange(NamedTuple):
    """Damaged bytes of the message log."""

    offset: int
    end: int
    """Where the next intact record begins, or the segment ends."""


class MessageCheck:
    """Checks consecutive records of the message log.

    Args:
        forgets: Whether a new segment's table replaces all known partitions; else records of
            earlier segments are checked, too.
    """

    def __init__(self, *, forgets: bool = True) -> None:
        self._seeds: dict[int, int] = {}
        self._forgets = forgets

    def begin(self, partitions: Iterable[Partition]) -> None:
        """Set the partitions that records may belong to."""
        self._seeds = {partition.id: partition.seed for partition in partitions}

    def whole(self, data: bytes, base: int, offset: int) -> Whole:
        """Check bytes at ``offset``, in the segment that begins at ``base``.

        An incomplete record is left out. Tables take effect with ``keep``.

        Raises:
            CorruptionError: A record is damaged.
        """
        seeds: dict[int, int] = {}
        at = 0
        while len(data) - at >= ENVELOPE_SIZE:
            envelope = read_envelope(data, at)
            if isinstance(envelope, str):
                raise CorruptionError(segment_path(base), offset + at, envelope)
            end = at + envelope.size
            if end > len(data) and envelope.offset == offset + at:
                break
            content = data[at + ENVELOPE_SIZE : end]
            problem = self._problem_of(envelope, content, base, offset + at, seeds)
            if problem:
                raise CorruptionError(segment_path(base), offset + at, problem)
            at = end
        return Whole(at, seeds)

    def keep(self, whole: Whole, *, is_new: bool) -> None:
        """Apply the tables; that of a new segment is complete."""
        if is_new and self._forgets:
            self._seeds = {}
        self._seeds.update(whole.seeds)

    def bad_ranges(self, segments: list[Segment], start: int) -> Iterator[BadRange]:
        """Yield the damaged ranges from ``start`` on; before it, only gaps between segments.

        If a segment is missing or short, the range reaches to the end of the log.
        """
        expected = segments[0].base if segments else 0
        tail: BadRange | None = None
        for segment in segments:
            if segment.base != expected or segment.end == segment.base:
                # A torn end of the segment before belongs to what is missing behind it.
                begin = min(segment.base, expected) if tail is None else tail.offset
                yield BadRange(begin, segments[-1].end)
                return
            if tail is not None:
                yield tail
                tail = None
            for bad in self._bad_in(segment, max(start, segment.base)):
                if bad.end < segment.end:
                    yield bad
                else:
                    tail = bad
            expected = segment.end
        if tail is not None:
            yield tail

    def _bad_in(self, segment: Segment, start: int) -> Iterator[BadRange]:
        """Yield the damaged parts of a segment; neighbours are one."""
        bad: BadRange | None = None
        for item in walk(segment, MessageOffset(start)):
            if isinstance(item, DamagedBytes):
                offset, end, is_bad = int(item.offset), int(item.end), True
            else:
                envelope, content = item
                offset, end = int(envelope.offset), envelope.offset + envelope.size
                seeds: dict[int, int] = {}
                is_bad = bool(self._problem_of(envelope, content, segment.base, offset, seeds))
                if seeds and not is_bad:
                    self.keep(Whole(0, seeds), is_new=offset == segment.base)
            if is_bad:
                bad = BadRange(offset if bad is None else bad.offset, end)
            elif bad is not None:
                yield bad
                bad = None
        if bad is not None:
            yield bad

    def _problem_of(
        self, envelope: Envelope, content: bytes, base: int, offset: int, seeds: dict[int, int]
    ) -> str:
        """Return a text if a record is damaged; add a table to ``seeds``."""
        if envelope.offset != offset:
            return f"a record of offset {envelope.offset} lies here"
        if envelope.type is RecordType.PARTITION_TABLE:
            rows = decode_table(content)
            if rows is None:
                return BAD_TABLE
            seeds.update((partition, seed_of(name)) for partition, name, _ in rows)
            return ""
        if offset == base:
            return "the segment does not begin with a partition table"
        seed = seeds.get(envelope.partition, self._seeds.get(envelope.partition))
        if seed is None:
            return f"partition {envelope.partition} is in no table"
        return _problem_of_batch(envelope, content, seed)


def _problem_of_batch(envelope: Envelope, batch: bytes, seed: int) -> str:
    if not verify_crc(batch, seed):
        return "the batch's crc does not match"
    if BatchHeader._make(HEADER.unpack_from(batch)).count != envelope.count:
        return f"the envelope's {envelope.count} messages are not those of the batch"
    return ""


def whole_actions(data: bytes, base: int, offset: int) -> int:
    """Return how many of some bytes of the action log are complete records.

    Raises:
        CorruptionError: A record is damaged.
    """
    at = 0
    while len(data) - at >= _FACT_HEAD.size:
        (size, _) = _FACT_HEAD.unpack_from(data, at)
        if 0 < size <= LARGEST_FACT and at + _FACT_HEAD.size + size > len(data):
            break
        found = valid_size(data, at, offset)
        if found is None:
            path = f"{ACTIONS}/{base:020d}.log"
            raise CorruptionError(path, offset + at, "the fact's size or crc is not right")
        at += found
    return at


def first_bad_action(segments: list[Segment], start: int, known: int) -> int | None:
    """Return the first damaged offset of the action log from ``start`` on.

    A hole with durable records after it is the leader's own: it was copied like that.
    """
    expected = segments[0].base if segments else 0
    for segment in segments:
        if segment.base < expected or segment.base > max(known, expected):
            return min(segment.base, expected)
        expected = segment.end
        if segment.end <= start:
            continue
        data = segment.read(segment.base, segment.end - segment.base)
        for at, _, fact in walk_actions(data, segment.base, max(start - segment.base, 0)):
            if fact is None:
                return segment.base + at
    return None

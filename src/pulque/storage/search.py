"""Looking for messages by their tag bits, without opening records that cannot match.

First the union bits of whole batches are tested, for thousands of index entries at once. What is
left is read run by run, and the tag bits of all messages of a run are tested at once. Bits can
only say that a message may match: whoever reads the record compares the real strings.

A search is bounded: it says how far it looked, and whoever asked goes on from there later.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from pulque.model.batch import HEADER_SIZE, Codec, Flag, verify_crc
from pulque.model.positions import ConsumeSequence
from pulque.model.record import ENVELOPE_SIZE, has_own_crc, read_envelope
from pulque.storage.consume_log import ConsumeLogs, Piece
from pulque.storage.files import Buffer
from pulque.storage.index import Entry, Table
from pulque.storage.listener import Listener
from pulque.storage.message_log import MessageLog
from pulque.storage.partitions import Partition
from pulque.storage.reader import cut_piece, problem_with

__all__ = ["Budget", "Found", "Search", "TagTest"]

Bits = np.ndarray[tuple[int], np.dtype[np.uint64]]
Hits = np.ndarray[tuple[int], np.dtype[np.bool_]]
_ENTRIES_AT_ONCE = 4096
_RUN_BYTES = 512 * 1024
"""Read at once. Reading lets other threads work, so this also says how long they wait."""
_GAP_BYTES = 16 * 1024
"""It is cheaper to read past so many bytes of others than to read twice."""
_WIDEST = 65_536
"""Sequences between the first and the last message that are handed out together."""
_TAG_BITS = np.dtype("<u8")
_HAS_TAGS = int(Flag.TAGS)
_FLAGS_AND_COUNT = Struct("<HxxI")
_WITHIN = np.arange(ENVELOPE_SIZE)
ENVELOPE_TYPE = np.dtype(
    {
        "names": ["size", "offset", "partition", "first_sequence", "count"],
        "formats": ["<u4", "<u8", "<u4", "<u8", "<u4"],
        "offsets": [4, 8, 28, 32, 48],
        "itemsize": ENVELOPE_SIZE,
    }
)
"""Those fields of an envelope that the index repeats."""


class TagTest:
    """Says which tag bits may belong to wanted tags."""

    def __init__(self, any_bits: Sequence[int], all_bits: int) -> None:
        self._any = [np.uint64(bits) for bits in any_bits]
        self._all = np.uint64(all_bits)

    def hits(self, bits: Bits) -> Hits:
        """Say for each whether it may be wanted."""
        found: Hits = (bits & self._all) == self._all
        if self._any:
            one = self._any[0]
            some = (bits & one) == one
            for one in self._any[1:]:
                some |= (bits & one) == one
            found &= some
        return found


class Budget(NamedTuple):
    """How much a search may return, and how much it may do before it says how far it came."""

    messages: int
    """At most so many that may match."""
    size: int
    """About so many bytes of them."""
    entries: int
    """Batches to look at."""
    read: int
    """Bytes to read."""


class Found(NamedTuple):
    """What a search came upon: messages ``first_sequence..end``, of which some may match."""

    first_sequence: ConsumeSequence
    end: ConsumeSequence
    buffers: tuple[Buffer, ...]
    """Only batches that have messages that may match."""
    matched: int
    """How many may match."""
    examined: ConsumeSequence
    """There is nothing else before this one."""

    @property
    def length(self) -> int:
        """How many sequences it covers."""
        return self.end - self.first_sequence


class _Record(NamedTuple):
    """A batch whose columns have to be looked at."""

    entry: Entry
    head: bytes
    batch: bytes
    column: bytes
    """The tag bits of its messages; nothing if none of them has tags."""


class Search:
    """Looks through consume logs. May be used from any thread."""

    def __init__(self, logs: ConsumeLogs, log: MessageLog, listener: Listener) -> None:
        self._logs = logs
        self._log = log
        self._listener = listener

    def find(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        test: TagTest,
        budget: Budget,
        *,
        end: ConsumeSequence | None = None,
        may_block: bool = True,
    ) -> Found:
        """Return confirmed messages from ``sequence`` on, before ``end``, that may match.

        If one is found within the budget, at least one is returned, however large.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
        """
        limit = partition.confirmed if end is None else min(end, partition.confirmed)
        at = ConsumeSequence(min(max(sequence, partition.start), limit))
        harvest = _Harvest(partition, at, limit, budget)
        _, _, entries, size = budget
        while at < limit and entries > 0 and size > 0:
            table = self._logs.table(
                partition.id, at, min(_ENTRIES_AT_ONCE, entries), may_block=may_block
            )
            table = table[table["first_sequence"] < limit]
            if not len(table):
                break
            entries -= len(table)
            candidates = table[np.flatnonzero(test.hits(table["tag_union"]))]
            for run, run_size in _runs(candidates):
                if size <= 0:
                    return harvest.found(ConsumeSequence(int(run[0]["first_sequence"])))
                size -= run_size
                records = self._records(partition, run, may_block=may_block)
                if not harvest.take(records, test):
                    return harvest.found(harvest.stopped_at)
            last = table[-1]
            at = ConsumeSequence(int(last["first_sequence"]) + int(last["count"]))
        return harvest.found(at)

    def _records(self, partition: Partition, run: Table, *, may_block: bool) -> list[_Record]:
        """Return the batches of a run, verified; damaged ones are reported and left out."""
        entries = [Entry._make(fields) for fields in run.tolist()]
        cached = self._log.cache.get
        fresh = [(entry, cached(entry.offset)) for entry in entries]
        if all(found is not None for _, found in fresh):
            return [_Record(e, *found, _column(found[1])) for e, found in fresh if found]
        first = entries[0].offset
        segment = self._log.segment_of(first)
        if segment is None:
            return []  # retention has removed it meanwhile
        size = entries[-1].offset + entries[-1].size - first
        data = segment.read(first, max(min(size, segment.end - first), 0), may_block=may_block)
        records = []
        for entry, is_as_indexed in zip(entries, _as_indexed(data, run).tolist(), strict=True):
            at = entry.offset - first
            head = data[at : at + ENVELOPE_SIZE]
            batch = data[at + ENVELOPE_SIZE : at + entry.size]
            if is_as_indexed and has_own_crc(head) and verify_crc(batch, partition.seed):
                records.append(_Record(entry, head, batch, _column(batch)))
            else:
                piece = Piece(entry, 0, entry.count)
                problem = problem_with(read_envelope(head), batch, piece, partition)
                self._listener.corruption_found(
                    segment.path, entry.offset, entry.size, problem or "the record is damaged"
                )
        return records


class _Harvest:
    """What a search has found so far, and how much room there is for more."""

    def __init__(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        end: ConsumeSequence,
        budget: Budget,
    ) -> None:
        self._partition = partition
        self._sequence = sequence
        self._limit = end
        self._messages = budget.messages
        self._room = budget.size
        self._first = self._end = sequence
        self._buffers: list[Buffer] = []
        self._matched = 0
        self.stopped_at = sequence
        """Where it had no room for more."""

    def found(self, examined: ConsumeSequence) -> Found:
        """Return what was found, if everything before a sequence was looked at."""
        return Found(
            self._first,
            self._end,
            tuple(self._buffers),
            self._matched,
            ConsumeSequence(min(max(examined, self._end), self._limit)),
        )

    def take(self, records: Sequence[_Record], test: TagTest) -> bool:
        """Take in the matches of some batches; say whether there is room for more."""
        bits = np.frombuffer(b"".join([record.column for record in records]), _TAG_BITS)
        hits = np.flatnonzero(test.hits(bits))
        starts = np.cumsum([0] + [len(record.column) // 8 for record in records])
        places = np.searchsorted(hits, starts).tolist()
        found = hits.tolist()
        for i, record in enumerate(records):
            if places[i] < places[i + 1]:
                start = int(starts[i])
                matches = [hit - start for hit in found[places[i] : places[i + 1]]]
                if not self._take_batch(record, matches):
                    return False
        return True

    def _take_batch(self, record: _Record, matches: list[int]) -> bool:
        entry = record.entry
        first = entry.first_sequence
        if first < self._sequence or first + entry.count > self._limit:
            low, high = self._sequence - first, self._limit - first
            matches = [match for match in matches if low <= match < high]
            if not matches:
                return True
        wanted = self._fitting(entry, matches)
        if self._matched and (
            len(wanted) < len(matches) or first + wanted[-1] - self._first >= _WIDEST
        ):
            self.stopped_at = first
            return False
        self._add(record, wanted)
        is_whole = len(wanted) == len(matches)
        self.stopped_at = self._end
        return is_whole and self._messages > 0 and self._room > 0

    def _fitting(self, entry: Entry, matches: list[int]) -> list[int]:
        """Return the matches for which there is room, but one at least."""
        wanted = matches[: max(self._messages, 1)]
        share = self._room * entry.count // entry.size
        if wanted[-1] - wanted[0] >= share:
            wanted = [match for match in wanted if match - wanted[0] < share] or wanted[:1]
        return wanted

    def _add(self, record: _Record, wanted: list[int]) -> None:
        entry = record.entry
        first = entry.first_sequence
        start, stop = wanted[0], wanted[-1] + 1
        is_compressed = record.batch[6] != Codec.NONE
        if is_compressed or (stop - start) * 2 > entry.count:
            buffers: tuple[Buffer, ...] = (record.head, record.batch)
        else:
            piece = Piece(entry, start, stop)
            buffers = cut_piece(self._partition, piece, record.head, record.batch)
        if not self._matched:
            self._first = ConsumeSequence(first + start)
        self._end = ConsumeSequence(first + stop)
        self._buffers += buffers
        self._matched += len(wanted)
        self._messages -= len(wanted)
        self._room -= sum(map(len, buffers))


def _runs(candidates: Table) -> Iterator[tuple[Table, int]]:
    """Yield batches together that can be read at once, and how many bytes that are."""
    begins = candidates["offset"].astype(np.int64)
    ends = begins + candidates["size"]
    gaps = (begins[1:] - ends[:-1] > _GAP_BYTES).tolist()
    start = 0
    for i, end in enumerate(ends.tolist()):
        if i > start and (gaps[i - 1] or end - begins[start] > _RUN_BYTES):
            yield candidates[start:i], int(ends[i - 1] - begins[start])
            start = i
    if len(candidates):
        yield candidates[start:], int(ends[-1] - begins[start])


def _as_indexed(data: bytes, run: Table) -> Hits:
    """Say for each batch of a run whether its envelope says what the index says."""
    at = run["offset"].astype(np.int64) - int(run["offset"][0])
    is_whole: Hits = at + run["size"] <= len(data)
    places = np.where(is_whole, at, 0)
    if len(data) < ENVELOPE_SIZE:
        return np.zeros(len(run), np.bool_)
    rows = np.frombuffer(data, np.uint8)[places[:, None] + _WITHIN].view(ENVELOPE_TYPE)[:, 0]
    for name in ("offset", "size", "partition", "first_sequence", "count"):
        is_whole &= rows[name] == run[name]
    return is_whole


def _column(batch: bytes) -> bytes:
    """Return the tag bits of a verified batch's messages."""
    flags, count = _FLAGS_AND_COUNT.unpack_from(batch, 4)
    if not flags & _HAS_TAGS:
        return b""
    # Only the sizes come before them, see ``pulque.model.batch.COLUMNS``.
    start = HEADER_SIZE + 4 * count
    return batch[start : start + 8 * count]

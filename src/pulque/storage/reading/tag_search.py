"""Search messages by their tag bits, without opening records that cannot match.

First the union bits of whole batches are tested, for thousands of index entries at once. The
remaining batches are read run by run, and the tag bits of all messages of a run are tested
together. Bits only show that a message may match: the client compares the real strings.

A search is bounded: it returns how far it examined the log, and the caller continues from there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pulque.model.positions import ConsumeSequence
from pulque.storage.files import Buffer
from pulque.storage.indexes.consume_log import ConsumeLogs
from pulque.storage.indexes.segment_index import Table
from pulque.storage.logs.message_log import MessageLog
from pulque.storage.logs.partitions import Partition
from pulque.storage.reading.batch_runs import BatchRun, Bits, Marks, Numbers, read_run
from pulque.storage.reading.damaged_batches import Damages, Hole
from pulque.storage.reading.match_gathering import Gathering, Matches, matches_of
from pulque.storage.reading.read_ahead import Feed

__all__ = ["Budget", "TagMatches", "TagSearch", "TagTest"]

_ENTRIES_AT_ONCE = 4096
_WIDEST = 262_144
"""The most sequences between the first and the last message of one answer."""


class TagTest:
    """Tests which tag bits may belong to wanted tags."""

    def __init__(self, any_bits: Sequence[int], all_bits: int) -> None:
        self._any = [np.uint64(bits) for bits in any_bits]
        self._all = np.uint64(all_bits)

    def hits(self, bits: Bits) -> Marks:
        """Return for each whether it may match."""
        found: Marks = (bits & self._all) == self._all
        if self._any:
            one = self._any[0]
            some = (bits & one) == one
            for one in self._any[1:]:
                some |= (bits & one) == one
            found &= some
        return found


class Budget(NamedTuple):
    """How much a search may return, and how much work it may do."""

    messages: int
    """At most so many that may match."""
    size: int
    """About so many bytes of them."""
    entries: int
    """Batches to look at."""
    read: int
    """Bytes to read."""


class TagMatches(NamedTuple):
    """The result of a search: messages ``first_sequence..end``, of which some may match."""

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


class TagSearch:
    """Searches consume logs. May be used from any thread."""

    def __init__(self, logs: ConsumeLogs, log: MessageLog, damages: Damages) -> None:
        self._logs = logs
        self._log = log
        self._feed = Feed(log)
        self._damages = damages

    def find(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        test: TagTest,
        budget: Budget,
        *,
        end: ConsumeSequence | None = None,
        may_block: bool = True,
    ) -> TagMatches:
        """Return confirmed messages from ``sequence`` on, before ``end``, that may match.

        If one is found within the budget, at least one is returned, however large.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            CorruptionError: Some batches are damaged, and other brokers have copies.
        """
        limit = partition.confirmed if end is None else min(end, partition.confirmed)
        at = ConsumeSequence(min(max(sequence, partition.start), limit))
        harvest = _Harvest(partition, at, limit, budget)
        try:
            return self._look(partition, at, limit, test, harvest, budget, may_block=may_block)
        finally:
            if may_block:
                self._damages.save()

    def _look(  # noqa: PLR0913  # where, for what, and how far
        self,
        partition: Partition,
        at: ConsumeSequence,
        limit: ConsumeSequence,
        test: TagTest,
        harvest: "_Harvest",
        budget: Budget,
        *,
        may_block: bool,
    ) -> TagMatches:
        """Search from a sequence on, and return the result."""
        _, _, entries, size = budget
        while at < limit and entries > 0 and size > 0:
            table = self._logs.table(
                partition.id, at, min(_ENTRIES_AT_ONCE, entries), may_block=may_block
            )
            table = table[table["first_sequence"] < limit]
            self._check_holes(partition, at, limit, table, may_block=may_block)
            if not len(table):
                break
            entries -= len(table)
            candidates = table[np.flatnonzero(test.hits(table["tag_union"]))]
            sizes = np.cumsum(candidates["size"], dtype=np.int64)
            fitting = int(np.searchsorted(sizes, size)) + 1
            for loaded in self._feed.load(candidates[:fitting], may_block=may_block):
                run = read_run(loaded, self._damages, partition, may_block=may_block)
                if run is not None and not harvest.take(run, test):
                    return harvest.found(harvest.stopped_at)
            if fitting < len(candidates):
                return harvest.found(ConsumeSequence(int(candidates[fitting]["first_sequence"])))
            size -= int(candidates["size"].sum())
            last = table[-1]
            at = ConsumeSequence(int(last["first_sequence"]) + int(last["count"]))
        return harvest.found(at)

    def _check_holes(
        self,
        partition: Partition,
        at: ConsumeSequence,
        limit: ConsumeSequence,
        table: Table,
        *,
        may_block: bool,
    ) -> None:
        """Report sequences that should be here and that no entry has."""
        firsts = table["first_sequence"].astype(np.int64)
        befores = np.concatenate(([at], firsts[:-1] + table["count"][:-1]))[: len(firsts)]
        holes = [
            Hole(int(befores[index]), int(firsts[index]))
            for index in np.flatnonzero(firsts > befores)
        ]
        if not len(table):
            holes = [Hole(at, limit)]
        for hole in holes:
            self._damages.hole(partition, self._log.open_segment.path, hole, may_block=may_block)

    def close(self) -> None:
        """End the threads that read."""
        self._feed.close()


class _Harvest:
    """The matches of a search so far, and the room for more."""

    def __init__(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        end: ConsumeSequence,
        budget: Budget,
    ) -> None:
        self.partition = partition
        self._sequence = sequence
        self._limit = end
        self._messages = budget.messages
        self._room = budget.size
        self._first = self._end = sequence
        self._gathering = Gathering(partition.seed)
        self._matched = 0
        self.stopped_at = sequence
        """Where it had no room for more."""

    def found(self, examined: ConsumeSequence) -> TagMatches:
        """Return what was found, if everything before a sequence was looked at."""
        return TagMatches(
            self._first,
            self._end,
            self._gathering.buffers(),
            self._matched,
            ConsumeSequence(min(max(examined, self._end), self._limit)),
        )

    def take(self, run: BatchRun, test: TagTest) -> bool:
        """Add the matches of some batches; return whether there is room for more."""
        matches = self._matches(run, test)
        if matches is None:
            return True
        sequences = matches.sequences
        fitting = self._fitting(matches, sequences)
        if fitting:
            self._add(matches.part(0, fitting), sequences)
        # What is not handed out is looked at again, by a filter that may be another one by then;
        # what lies before this run need not be read once more.
        self.stopped_at = ConsumeSequence(max(self._end, run.first_sequence))
        return fitting == len(matches) and self._messages > 0 and self._room > 0

    def _matches(self, run: BatchRun, test: TagTest) -> Matches | None:
        """Return all that may match and lies where it was looked for."""
        bits, edges = run.tag_bits()
        hits = np.flatnonzero(test.hits(bits))
        which = np.searchsorted(edges, hits, "right") - 1
        index = hits - edges[which]
        if run.first_sequence < self._sequence or run.end > self._limit:
            sequences = run.first_sequences[which] + index
            is_ours = (sequences >= self._sequence) & (sequences < self._limit)
            which, index = which[is_ours], index[is_ours]
        return matches_of(run, which, index) if len(which) else None

    def _fitting(self, matches: Matches, sequences: Numbers) -> int:
        """Return for how many there is room: the first one of all always fits."""
        first = self._first if self._matched else int(sequences[0])
        fits = (np.cumsum(matches.costs) <= self._room) & (sequences - first < _WIDEST)
        fitting = min(len(fits) if fits.all() else int(np.argmin(fits)), self._messages)
        return max(fitting, int(not self._matched))

    def _add(self, matches: Matches, sequences: Numbers) -> None:
        if not self._matched:
            self._first = ConsumeSequence(int(sequences[0]))
        matched, before = len(matches), self._gathering.size
        self._end = ConsumeSequence(int(sequences[matched - 1]) + 1)
        self._gathering.add(matches)
        self._matched += matched
        self._messages -= matched
        self._room -= self._gathering.size - before

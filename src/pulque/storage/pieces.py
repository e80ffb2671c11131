"""What is handed out of a run of batches: as little around the matches as pays.

Matches near each other are one piece, which becomes a record of its own. A batch with many pieces
is handed out as it is: to leave out its other messages would cost more than to read past them.
"""

from dataclasses import dataclass, replace

import numpy as np

from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.consume_log import Piece
from pulque.storage.index import Entry
from pulque.storage.partitions import Partition
from pulque.storage.picking import pick
from pulque.storage.reader import cut_piece
from pulque.storage.runs import HEAD_SIZE, Marks, Numbers, Run

__all__ = ["Pieces", "divide"]

_NEAR = 1
"""Matches so far apart are one piece: those that are neighbours."""
_MOST_PIECES = 8
"""Of one batch."""
_FEW = 4
"""So many single messages are faster cut one by one."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of the batches of a run, in order. One that is whole is handed out as its batch."""

    run: Run
    which: Numbers
    """Of which batch."""
    starts: Numbers
    """Its first match, counted in the batch."""
    stops: Numbers
    """After its last match."""
    matched: Numbers
    """How many of its messages match."""
    is_whole: Marks
    index: Numbers
    """All matches, each counted in its batch."""

    def __len__(self) -> int:
        return len(self.which)

    @property
    def first_sequences(self) -> Numbers:
        """The sequence of the first match of each."""
        return self.run.first_sequences[self.which] + self.starts

    @property
    def ends(self) -> Numbers:
        """The sequence after the last match of each."""
        return self.run.first_sequences[self.which] + self.stops

    @property
    def sizes(self) -> Numbers:
        """About how many bytes each has."""
        sizes, counts = self.run.sizes[self.which], self.run.counts[self.which]
        parts = HEAD_SIZE + sizes * (self.stops - self.starts) // counts
        return np.where(self.is_whole, sizes, parts)

    def until(self, end: int) -> "Pieces":
        """Return those before one."""
        return replace(
            self,
            which=self.which[:end],
            starts=self.starts[:end],
            stops=self.stops[:end],
            matched=self.matched[:end],
            is_whole=self.is_whole[:end],
        )

    def part(self, messages: int, room: int) -> "Pieces":
        """Return what fits of the first one: one match at least."""
        batch = int(self.which[0])
        count, size = int(self.run.counts[batch]), int(self.run.sizes[batch])
        matches = self.index[: min(int(self.matched[0]), max(messages, 1))]
        share = max(room * count // size, 1)
        matches = matches[matches - matches[0] < share]
        length = int(matches[-1] - matches[0]) + 1
        is_whole = bool(self.run.is_compressed[batch]) or length * 2 > count
        return replace(
            self.until(1),
            stops=matches[-1:] + 1,
            matched=np.array([len(matches)]),
            is_whole=np.array([is_whole]),
        )

    def records(self, partition: Partition) -> list[bytes]:
        """Return a record for each."""
        is_single = ~self.is_whole & (self.stops - self.starts == 1)
        singles = np.flatnonzero(is_single)
        if len(singles) <= _FEW:
            return [self._record(i, partition) for i in range(len(self))]
        picked = pick(self.run, self.which[singles], self.starts[singles], partition.seed)
        if len(picked) == len(self):
            return picked
        records = iter(picked)
        return [
            next(records) if one else self._record(i, partition)
            for i, one in enumerate(is_single.tolist())
        ]

    def _record(self, i: int, partition: Partition) -> bytes:
        run, batch = self.run, self.which[i]
        entry = Entry._make(run.entries[batch].tolist())
        at = int(run.starts[batch])
        record = run.data[at : at + entry.size]
        if self.is_whole[i]:
            return record
        piece = Piece(entry, int(self.starts[i]), int(self.stops[i]))
        return b"".join(
            cut_piece(partition, piece, record[:ENVELOPE_SIZE], record[ENVELOPE_SIZE:])
        )


def divide(run: Run, which: Numbers, index: Numbers) -> Pieces:
    """Make pieces of matches.

    Args:
        run: Has their batches.
        which: For each match the number of its batch, ascending.
        index: For each match its place in there, ascending.
    """
    is_first = np.ones(len(which), np.bool_)
    is_first[1:] = which[1:] != which[:-1]
    begins_piece = is_first.copy()
    begins_piece[1:] |= index[1:] - index[:-1] > _NEAR
    begins = np.flatnonzero(begins_piece)
    is_whole = _are_dense(run, which[begins], _lengths(index, begins))
    if is_whole.any():
        begins = np.flatnonzero(is_first | (begins_piece & ~is_whole[which]))
    stops = np.append(begins[1:], len(index))
    batches = which[begins]
    return Pieces(
        run,
        batches,
        index[begins],
        index[stops - 1] + 1,
        stops - begins,
        is_whole[batches],
        index,
    )


def _lengths(index: Numbers, begins: Numbers) -> Numbers:
    lasts = np.append(begins[1:], len(index)) - 1
    lengths: Numbers = index[lasts] - index[begins] + 1
    return lengths


def _are_dense(run: Run, which: Numbers, lengths: Numbers) -> Marks:
    """Say for each batch of a run whether its pieces are too many, or nearly all of it."""
    batches = len(run.entries)
    pieces = np.bincount(which, minlength=batches)
    covered = np.bincount(which, lengths, minlength=batches)
    return run.is_compressed | (pieces > _MOST_PIECES) | (covered * 2 > run.counts)

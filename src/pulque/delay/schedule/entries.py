"""Convert batches of the message log to entries of schedule logs, by tick.

A tick is divided into *windows*, and in a busy tick an entry has messages of one window only, so
that messages due in some minutes are read without those due in an hour. Within a window messages
keep their order of arrival: sorting by due time would cost more than everything else, and
readers take messages from many entries in any case.

A rescheduled message comes as a batch of its own, in a partition of the message log
with a prefix; the producer fields of the batch have its old place.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import dropwhile, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pulque.model.batch import Codec, layout_of, read_header, renumber, seed_of
from pulque.model.names import PartitionName
from pulque.storage.files import Buffer
from pulque.storage.message_table import MessageTable, Scratch, columns_before_data

__all__ = [
    "MOVED_PREFIX",
    "MovedNote",
    "ReplayedStep",
    "TickEntry",
    "check_records",
    "place",
    "unmoved",
]

MOVED_PREFIX = "%moved%"
"""The prefix of the message-log partition of rescheduled messages."""

_MOST_MESSAGES = 2000
_MOST_BYTES = 256 * 1024
"""The most bytes of an entry: it is read and checked as a whole for any message in it."""
_WINDOWS = 8
_WORTH_WINDOWS = 256 * 1024
"""Fewer bytes of one tick are not divided into windows."""
_WORTH_KEEPING = 32 * 1024
"""A batch of so many bytes is stored whole if all of it belongs into one entry."""
Numbers = npt.NDArray[Any]


class ReplayedStep(NamedTuple):
    """A batch of the message log."""

    partition: PartitionName
    offset: int
    """Its offset."""
    end: int
    batch: bytes
    dues_ms: tuple[int, int] | None = None
    """The first and the last due time, if known."""


class MovedNote(NamedTuple):
    """The old place of a rescheduled message."""

    tick: int
    place: int


def check_records(batch: bytes) -> None:
    """Check that a compressed batch can be decompressed.

    Raises:
        InvalidBatchError: It cannot be decompressed.
        UsageError: Its compression library is not installed.
    """
    if read_header(batch).codec != Codec.NONE:
        MessageTable.of([batch])


def unmoved(each: ReplayedStep) -> tuple[ReplayedStep, MovedNote | None]:
    """Return the batch of a rescheduled message as if it had been sent, and the old place."""
    if not each.partition.startswith(MOVED_PREFIX):
        return each, None
    partition = PartitionName(each.partition.removeprefix(MOVED_PREFIX))
    header = read_header(each.batch)
    batch = renumber(each.batch, seed_of(partition), 0, 0)
    return each._replace(partition=partition, batch=batch), MovedNote(
        header.producer_sequence, header.producer_id
    )


class TickEntry(NamedTuple):
    """Messages of one partition for one tick."""

    partition: PartitionName
    batch: Sequence[Buffer]
    """The batch in consecutive pieces."""
    first_due_ms: int
    last_due_ms: int
    columns: Mapping[str, Numbers]
    """The columns of a table."""
    start: int
    """The row of the first message in the table."""
    end: int
    """The row after that of the last message."""


def place(
    batches: Iterable[ReplayedStep],
    tick_ms: int,
    covered: Mapping[int, int] | None = None,
    scratch: Scratch | None = None,
) -> dict[int, list[TickEntry]]:
    """Return the messages for each tick.

    Args:
        batches: Batches in the order of the message log.
        tick_ms: The length of a tick.
        covered: By tick, up to where the message log is replayed into it: earlier batches
            are there already.
        scratch: Reusable memory. The result uses it, and the batches.
    """
    by_partition: dict[PartitionName, list[ReplayedStep]] = {}
    for each in batches:
        by_partition.setdefault(each.partition, []).append(each)
    placed: dict[int, list[TickEntry]] = {}
    for partition, found in by_partition.items():
        left = found
        if not covered:
            # Only the first ones: what is due at the same time stays in its order.
            least = 0 if len(found) == 1 else _WORTH_KEEPING
            is_whole = partial(_place_whole, tick_ms=tick_ms, least=least, placed=placed)
            left = list(dropwhile(is_whole, found))
        if left:
            _place_apart(partition, left, tick_ms, covered or {}, placed, scratch)
    return placed


def _place_whole(
    each: ReplayedStep, tick_ms: int, least: int, placed: dict[int, list[TickEntry]]
) -> bool:
    """Place a large batch whole, if all of it belongs into one entry."""
    batch = each.batch
    if len(batch) < least:
        return False
    keys = _Keys(tick_ms, windows=_WINDOWS if len(batch) >= _WORTH_WINDOWS else 1)
    if each.dues_ms is not None and keys.of(each.dues_ms[0]) != keys.of(each.dues_ms[1]):
        return False
    header = read_header(batch)
    count = header.count
    is_large = count > _MOST_MESSAGES or len(batch) > _MOST_BYTES
    if header.codec != Codec.NONE or (is_large and count > 1):
        return False
    at = layout_of(header.flags).column_start("due_at_ms", count)
    dues = np.frombuffer(batch, "<i8", count, at)
    first, last = each.dues_ms or (int(dues.min()), int(dues.max()))
    if keys.of(first) != keys.of(last):
        return False
    _, columns, _ = columns_before_data(batch)
    made = TickEntry(each.partition, (batch,), first, last, columns, 0, count)
    placed.setdefault(first - first % tick_ms, []).append(made)
    return True


def _place_apart(
    partition: PartitionName,
    found: Sequence[ReplayedStep],
    tick_ms: int,
    covered: Mapping[int, int],
    placed: dict[int, list[TickEntry]],
    scratch: Scratch | None,
) -> None:
    """Place single messages of batches into their ticks and windows."""
    table = MessageTable.of([each.batch for each in found], scratch)
    if covered:
        rows = _missing(table.columns["due_at_ms"], found, tick_ms, covered)
        if not len(rows):
            return
        table = table.taken(rows, scratch)
    order, edges = _by_time(table, tick_ms)
    if len(edges) > 2:  # else all belong together as they are
        table = table.taken(order, scratch)
    pieces = [
        piece
        for start, end in pairwise(edges)
        for piece in table.pieces(start, end, most=_MOST_MESSAGES, most_bytes=_MOST_BYTES)
    ]
    dues = table.columns["due_at_ms"]
    starts = [start for start, _ in pieces]
    firsts: list[int] = np.minimum.reduceat(dues, starts).tolist()
    lasts: list[int] = np.maximum.reduceat(dues, starts).tolist()
    seed = seed_of(partition)
    for (start, end), first, last in zip(pieces, firsts, lasts, strict=True):
        batch = table.parts(start, end, seed=seed, has_due=True)
        made = TickEntry(partition, batch, first, last, table.columns, start, end)
        placed.setdefault(first - first % tick_ms, []).append(made)


def _missing(
    dues: Numbers, found: Sequence[ReplayedStep], tick_ms: int, covered: Mapping[int, int]
) -> Numbers:
    """Return the messages that are not in their ticks yet."""
    offsets = np.repeat([each.offset for each in found], [_count(each) for each in found])
    ticks, which = np.unique(dues - dues % tick_ms, return_inverse=True)
    ends = np.array([covered.get(tick, 0) for tick in ticks.tolist()])
    return np.flatnonzero(offsets >= ends[which])


def _by_time(table: MessageTable, tick_ms: int) -> tuple[Numbers, list[int]]:
    """Return a stable order by group, and the bounds of each group.

    Sorting such small numbers is fast.
    """
    dues = table.columns["due_at_ms"]
    first, last = int(dues.min()), int(dues.max())
    ticks = last // tick_ms - first // tick_ms + 1
    is_worth_it = table.data.nbytes >= ticks * _WORTH_WINDOWS
    keys = _Keys(tick_ms, windows=_WINDOWS if is_worth_it else 1)
    numbers = keys.of(dues)
    numbers -= keys.of(first)
    found = numbers.astype(np.min_scalar_type(keys.of(last) - keys.of(first)))
    order = np.argsort(found, kind="stable")
    found = found[order]
    return order, [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist(), len(dues)]


class _Keys:
    """Numbers of windows, in the order of time."""

    def __init__(self, tick_ms: int, *, windows: int) -> None:
        # Every tick of whole minutes can be cut like this.
        self._window_ms = tick_ms if tick_ms % windows else tick_ms // windows

    def of(self, due_ms: Any) -> Any:
        """Return the window number of due times."""
        return due_ms // self._window_ms


def _count(each: ReplayedStep) -> int:
    return read_header(each.batch).count

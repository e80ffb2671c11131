"""Segments of the message log as files, without a broker: what is in them, and where.

A sealed segment has an index file, so that nothing has to be walked; without one the segment is
walked once. Names come from the partition tables inside, which stand where no batch does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pulque.errors import CorruptionError, DataDirectoryError
from pulque.model.names import PartitionName
from pulque.model.positions import MessageOffset
from pulque.model.record import ENVELOPE_SIZE, RecordType, read_envelope
from pulque.pipeline.filesystem import Tree
from pulque.storage.events import SilentListener
from pulque.storage.indexes.index_rebuild import entries_of
from pulque.storage.indexes.segment_index import ENTRY_TYPE, SealedIndex
from pulque.storage.inspection.data_files import refuse_if_locked
from pulque.storage.logs.partitions import decode_table
from pulque.storage.logs.segment import Segment

__all__ = ["SegmentDamage", "SegmentFile", "SegmentMap", "find_segments", "map_segment"]

_MESSAGES = "messages"
_GAP_AT_MOST = 64 * 1024 * 1024


class SegmentFile(NamedTuple):
    """One segment, by the place it lies in."""

    where: str
    """The directory, as given."""
    path: str
    """Below it."""
    base: int


@dataclass(frozen=True, slots=True)
class SegmentDamage:
    """Bytes of a segment that are not what was written."""

    path: str
    offset: int
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """What is in a segment.

    Attributes:
        segment: Which one.
        size: Of its file.
        entries: One for each batch, in order of offset.
        names: Of the partitions that it knows, by id.
        damages: What cannot be read.
    """

    segment: SegmentFile
    size: int
    entries: npt.NDArray[np.void]
    names: dict[int, PartitionName]
    damages: tuple[SegmentDamage, ...]


def find_segments(where: str) -> list[SegmentFile]:
    """Return the segments of a data directory, or of a directory of segments, in order.

    The open segment of a directory that a broker has is left out: nobody but the broker knows
    how much of it is confirmed.

    Raises:
        DataDirectoryError: There are none.
    """
    tree = Tree(where)
    directory = _MESSAGES if _MESSAGES in tree.directories() else ""
    names = [name for name in tree.names(directory) if _base_of(name) is not None]
    found = [
        SegmentFile(where, f"{directory}/{name}" if directory else name, _base_of(name) or 0)
        for name in names
    ]
    found.sort(key=lambda segment: segment.base)
    if not found:
        raise DataDirectoryError(
            f"{where} is neither a data directory of Pulque nor one of segments: there is no "
            "file such as 00000000000000000000.log"
        )
    return found[:-1] if directory and _is_in_use(tree) else found


def _base_of(name: str) -> int | None:
    stem, _, suffix = name.partition(".")
    is_segment = suffix == "log" and len(stem) == 20 and stem.isascii() and stem.isdigit()
    return int(stem) if is_segment else None


def _is_in_use(tree: Tree) -> bool:
    local = tree.local()
    if local is None:
        return False
    try:
        refuse_if_locked(str(local))
    except DataDirectoryError:
        return True
    return False


def map_segment(segment: SegmentFile) -> SegmentMap:
    """Find out what is in a segment.

    Raises:
        CorruptionError: It is not a segment at all, or of a version that is not known.
    """
    tree = Tree(segment.where)
    file = tree.open(segment.path)
    try:
        size = file.size()
        end = segment.base + size
        opened = Segment(segment.path, file, segment.base, end)
        entries = _indexed(tree, segment, end)
        if entries is None:
            walked = entries_of(opened, end, SilentListener())
            entries = np.frombuffer(bytes(walked.entries), ENTRY_TYPE)
        entries = entries[np.argsort(entries["offset"], kind="stable")]
        names: dict[int, PartitionName] = {}
        damages = tuple(_read_gaps(opened, entries, names))
        if not names and (damages or len(entries)):
            reason = damages[0].reason if damages else "there is no partition table"
            raise CorruptionError(segment.path, segment.base, reason)
    finally:
        file.close()
    return SegmentMap(segment, size, entries, names, damages)


def _indexed(tree: Tree, segment: SegmentFile, end: int) -> npt.NDArray[np.void] | None:
    """Return the entries of a segment's index file; None if it has none that can be used."""
    path = f"{segment.path.removesuffix('.log')}.index"
    directory, _, name = path.rpartition("/")
    if name not in tree.names(directory):
        return None
    try:
        index = SealedIndex(tree.open(path), path, MessageOffset(segment.base), MessageOffset(end))
        return index.all_entries()
    except CorruptionError:
        return None  # it is derived: the segment itself says the same


def _read_gaps(
    segment: Segment, entries: npt.NDArray[np.void], names: dict[int, PartitionName]
) -> Iterator[SegmentDamage]:
    """Learn names from the tables that lie between batches; yield what is neither."""
    ends = np.append(segment.base, (entries["offset"] + entries["size"]).astype(np.int64))
    starts = np.append(entries["offset"].astype(np.int64), segment.end)
    for at in np.flatnonzero(ends < starts):
        yield from _read_gap(segment, int(ends[at]), int(starts[at]), names)


def _read_gap(
    segment: Segment, begin: int, end: int, names: dict[int, PartitionName]
) -> Iterator[SegmentDamage]:
    at = begin
    while at < end:
        envelope = read_envelope(segment.read(at, ENVELOPE_SIZE))
        if isinstance(envelope, str) or envelope.offset != at or at + envelope.size > end:
            reason = envelope if isinstance(envelope, str) else "a record lies where none should"
            yield SegmentDamage(segment.path, at, end - at, reason)
            return
        rows = None
        if envelope.type is RecordType.PARTITION_TABLE and envelope.size <= _GAP_AT_MOST:
            content = envelope.size - ENVELOPE_SIZE
            rows = decode_table(segment.read(at + ENVELOPE_SIZE, content))
        if rows is None:
            yield SegmentDamage(segment.path, at, envelope.size, "a table or batch is damaged")
        else:
            names.update((int(row[0]), row[1]) for row in rows)
        at += envelope.size

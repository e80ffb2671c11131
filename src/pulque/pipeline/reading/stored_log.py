"""Reading segments as files: data directories, backups, the raw part of an archive.

A task reads a stretch of one segment, whatever partitions lie in it, from front to end: files are
read in order, and the work of a task does not depend on how many subjects there are.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pulque.errors import CorruptionError, UnknownSubjectError
from pulque.model.batch import HEADER_SIZE, Codec, seed_of, verify_crc
from pulque.model.names import PartitionName, subject_of
from pulque.model.record import ENVELOPE_SIZE, read_envelope
from pulque.pipeline.filesystem import ArrowFile, Tree
from pulque.pipeline.options import At, Place, Selection
from pulque.pipeline.reading.batch_collector import Placer
from pulque.pipeline.reading.batch_decoder import PLACE, BatchPlace
from pulque.pipeline.reading.ranges import Bounds, DataLossError, Range, unknown_subject
from pulque.pipeline.reading.segment_map import (
    SegmentDamage,
    SegmentFile,
    SegmentMap,
    find_segments,
    map_segment,
)
from pulque.storage.indexes.segment_index import ENTRY_TYPE

__all__ = ["SegmentStretch", "StoredLog", "read_stretch", "stretches_of"]

log = logging.getLogger("pulque.pipeline")

_BYTES_AT_ONCE = 4 * 1024 * 1024
_LEAST_ROWS = 10
"""A batch counts as so many messages at least when work is dealt out."""
_CODEC_AT = 6
"""Where a batch's header says how it is compressed."""
_ENVELOPE = np.dtype(
    {
        "names": ["size", "offset", "partition", "first_sequence", "count"],
        "formats": ["<u4", "<u8", "<u4", "<u8", "<u4"],
        "offsets": [4, 8, 28, 32, 48],
        "itemsize": ENVELOPE_SIZE,
    }
)


@dataclass(frozen=True, slots=True)
class SegmentStretch:
    """What one task reads: some batches of a segment.

    All that a task must know comes with it, so that it never holds the index of a whole segment.
    """

    segment: SegmentFile
    entries: bytes
    """Of the batches, as an index has them, in order of offset."""
    names: Mapping[int, PartitionName]
    """Of their partitions, by id."""
    ranges: Mapping[PartitionName, tuple[int, int]]
    """The messages that count, by partition."""
    damages: tuple[SegmentDamage, ...]
    """What cannot be read among them."""


class StoredLog:
    """The segments of a directory.

    Args:
        where: A data directory, or a directory of segments.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._maps: dict[SegmentFile, SegmentMap] = {}
        self._entries: dict[PartitionName, list[npt.NDArray[np.void]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for segments that came or went."""
        present = find_segments(self._where)
        # Sealed ones do not change; the last one may have grown.
        known = {each: found for each, found in self._maps.items() if each in present[:-1]}
        self._maps = {each: known.get(each) or map_segment(each) for each in present}
        self._entries = {}
        for found in self._maps.values():
            self._sort_in(found)

    def close(self) -> None:
        """There is nothing to close between reads."""

    def _sort_in(self, found: SegmentMap) -> None:
        if not len(found.entries):
            return
        order = np.argsort(found.entries["partition"], kind="stable")
        grouped = found.entries[order]
        ids, firsts = np.unique(grouped["partition"], return_index=True)
        for partition_id, part in zip(ids, np.split(grouped, firsts[1:]), strict=True):
            name = found.names.get(int(partition_id))
            if name is not None:
                self._entries.setdefault(name, []).append(part)

    def partitions(
        self, selection: Selection, *, must_be_whole: bool = False
    ) -> list[PartitionName]:
        """Return the partitions that a selection covers, in order; here all are within reach."""
        del must_be_whole
        if selection.partitions:
            return sorted(each for each in selection.partitions if each in self._entries)
        return sorted(filter(selection.covers, self._entries))

    def check_known(self, selection: Selection) -> None:
        """Refuse subjects and assigned partitions that these segments have nothing of.

        Raises:
            UnknownSubjectError: One is not there.
        """
        known = set(map(subject_of, self._entries))
        for subject in selection.named_subjects():
            if subject not in known:
                raise unknown_subject(subject)
        for partition in selection.partitions:
            if partition not in self._entries:
                raise UnknownSubjectError(
                    f"the segments of {self._where} have nothing of partition {partition}; check "
                    "its name, without that of a broker group, or read with failOnDataLoss=false"
                )

    def bounds(self, partition: PartitionName) -> Bounds:
        """Return where a partition begins and ends in these segments."""
        parts = self._entries.get(partition)
        if not parts:
            return Bounds(0, 0)
        last = parts[-1][-1]
        return Bounds(
            int(parts[0][0]["first_sequence"]), int(last["first_sequence"]) + int(last["count"])
        )

    def at_time(self, partition: PartitionName, at: At) -> int | None:
        """Return the first message of a place's instant, if it has one."""
        if at.place is not Place.TIME:
            return None
        for part in self._entries.get(partition, []):
            index = int(np.searchsorted(part["stored_at_ms"], at.at_ms))
            if index < len(part):
                return int(part[index]["first_sequence"])
        return self.bounds(partition).end

    def plan(
        self, ranges: Sequence[Range], *, least: int, most_rows: int, must_be_whole: bool
    ) -> list[SegmentStretch]:
        """Deal the messages of ranges to tasks, each a stretch of one segment.

        Raises:
            DataLossError: Some are in no segment, and they must all be there.
        """
        by_name = {each.partition: (each.first, each.end) for each in ranges if each.length > 0}
        total = sum(end - first for first, end in by_name.values())
        size = max(1, min(most_rows, -(-total // least)))
        found: list[SegmentStretch] = []
        for each in self._maps.values():
            wanted = {name: by_name[name] for name in each.names.values() if name in by_name}
            if wanted:
                found += _cut(each, wanted, size)
        if not any(each.damages for each in found):  # else tasks name what is damaged
            for asked in ranges:
                self._check_whole(asked, must_be_whole=must_be_whole)
        return found

    def _check_whole(self, wanted: Range, *, must_be_whole: bool) -> None:
        """A segment that is missing leaves a gap, at the beginning or anywhere."""
        stored = 0
        for part in self._entries.get(wanted.partition, []):
            firsts = part["first_sequence"].astype(np.int64)
            begins = np.clip(firsts, wanted.first, wanted.end)
            ends = np.clip(firsts + part["count"], wanted.first, wanted.end)
            stored += int((ends - begins).sum())
        if stored < wanted.length:
            found = (
                f"messages {wanted.first} to {wanted.end} of {wanted.partition} were to be read, "
                f"and {stored} of these {wanted.length} are in the segments of {self._where}: "
                "some were removed"
            )
            for damage in (each for some in self._maps.values() for each in some.damages):
                found += f", or lie in what is damaged: {damage.path} at offset {damage.offset}"
                break
            if must_be_whole:
                raise DataLossError(
                    f"{found}; with failOnDataLoss=false the read goes on with what there is"
                )
            log.warning("%s; the read goes on with what there is", found)


def _wanted_entries(
    found: SegmentMap, ranges: Mapping[PartitionName, tuple[int, int]]
) -> npt.NDArray[np.void]:
    """Return the entries of a segment that hold messages of the ranges."""
    entries = found.entries
    firsts = np.zeros(max(found.names, default=0) + 1, np.int64)
    ends = np.zeros_like(firsts)
    for partition_id, name in found.names.items():
        firsts[partition_id], ends[partition_id] = ranges.get(name, (0, 0))
    known = entries["partition"] < len(firsts)
    entries = entries[known]
    ids = entries["partition"]
    begin = entries["first_sequence"].astype(np.int64)
    is_wanted = (begin < ends[ids]) & (begin + entries["count"] > firsts[ids])
    wanted: npt.NDArray[np.void] = entries[is_wanted]
    return wanted


def _cut(
    found: SegmentMap, ranges: Mapping[PartitionName, tuple[int, int]], size: int
) -> list[SegmentStretch]:
    entries = _wanted_entries(found, ranges)
    # A batch is work, and memory, however few messages it has.
    rows = np.cumsum(np.maximum(entries["count"], _LEAST_ROWS), dtype=np.int64)
    return stretches_of(found, ranges, entries, (rows - 1) // max(size, _LEAST_ROWS))


def stretches_of(
    found: SegmentMap,
    ranges: Mapping[PartitionName, tuple[int, int]],
    entries: npt.NDArray[np.void],
    ordinals: npt.NDArray[np.int64],
) -> list[SegmentStretch]:
    """Return stretches of a segment, each of the batches that have the same ordinal."""
    if not len(entries):
        return []
    firsts = np.append(0, np.flatnonzero(np.diff(ordinals)) + 1)
    begins = entries["offset"][firsts].tolist()
    # What is damaged next to the first or the last batch may have been wanted as well.
    everything = found.entries["offset"]
    before = int(np.searchsorted(everything, begins[0])) - 1
    after = int(np.searchsorted(everything, int(entries["offset"][-1]), "right"))
    ends = begins[1:]
    begins[0] = int(everything[before]) if before >= 0 else found.segment.base
    is_last = after == len(everything)
    ends.append(found.segment.base + found.size if is_last else int(everything[after]))
    stretches = []
    for part, begin, end in zip(np.split(entries, firsts[1:]), begins, ends, strict=True):
        names = {each: found.names[each] for each in np.unique(part["partition"]).tolist()}
        wanted = {name: ranges[name] for name in names.values()}
        damages = tuple(each for each in found.damages if begin <= each.offset < end)
        stretches.append(SegmentStretch(found.segment, part.tobytes(), names, wanted, damages))
    return stretches


def read_stretch(
    stretch: SegmentStretch,
    *,
    must_be_whole: bool,
    bytes_at_once: int = _BYTES_AT_ONCE,
    on_damaged: Callable[[npt.NDArray[np.void]], None] = lambda _: None,
) -> Iterator[BatchPlace]:
    """Yield the messages of a stretch, some at a time.

    Args:
        stretch: What to read.
        must_be_whole: Whether a damaged batch fails the read, or is passed over.
        bytes_at_once: About how much is read in one go.
        on_damaged: Called with the entries of batches that are passed over.

    Raises:
        CorruptionError: A batch is damaged, and the stretch must be whole.
    """
    entries = np.frombuffer(stretch.entries, ENTRY_TYPE)
    if must_be_whole:
        for damage in stretch.damages:
            raise CorruptionError(damage.path, damage.offset, damage.reason)
    # A chunk begins with each batch that lies too far behind the begin of the one before.
    places = entries["offset"].astype(np.int64)
    chunks = (places - places[0]) // bytes_at_once
    file = Tree(stretch.segment.where).open(stretch.segment.path)
    try:
        for part in np.split(entries, np.flatnonzero(np.diff(chunks)) + 1):
            chunk = _Chunk(file, stretch, part)
            chunk.check(must_be_whole=must_be_whole)
            if len(chunk.damaged):
                on_damaged(chunk.damaged)
            for placed in chunk.placed(bytes_at_once):
                if len(placed.places) or placed.unreadable:
                    yield placed
    finally:
        file.close()


class _Chunk:
    """Batches that lie near each other, read in one go."""

    def __init__(
        self,
        file: ArrowFile,
        stretch: SegmentStretch,
        entries: npt.NDArray[np.void],
    ) -> None:
        self._path = stretch.segment.path
        self._ranges = stretch.ranges
        self._names = stretch.names
        self._begin = int(entries["offset"][0])
        end = int(entries["offset"][-1]) + int(entries["size"][-1])
        self._data = file.read(end - self._begin, self._begin - stretch.segment.base)
        self._entries = entries
        self.damaged = entries[:0]
        """The batches that are not what was stored."""
        self._is_good = np.ones(len(entries), np.bool_)
        self._starts = entries["offset"].astype(np.int64) - self._begin

    def placed(self, bytes_at_once: int) -> Iterator[BatchPlace]:
        """Yield the good batches, about so many bytes at a time once they are decompressed."""
        entries, starts = self._entries[self._is_good], self._starts[self._is_good]
        bytes_of = np.frombuffer(self._data, np.uint8)
        if (bytes_of[starts + ENVELOPE_SIZE + _CODEC_AT] != Codec.NONE).any():
            yield from self._opened(entries, starts, bytes_at_once)
            return
        ids, ordinals = np.unique(entries["partition"], return_inverse=True)
        names = tuple(self._names[int(partition_id)] for partition_id in ids)
        ranges = np.array([self._ranges[name] for name in names], np.int64).reshape(-1, 2)
        firsts = entries["first_sequence"].astype(np.int64)
        places = np.empty(len(entries), PLACE)
        places["start"] = starts + ENVELOPE_SIZE
        places["name"] = ordinals
        places["begin"] = np.clip(ranges[ordinals, 0] - firsts, 0, entries["count"])
        places["end"] = np.clip(ranges[ordinals, 1] - firsts, 0, entries["count"])
        places["first_sequence"] = firsts
        places["stored_at_ms"] = entries["stored_at_ms"]
        yield BatchPlace(self._data, places, names)

    def _opened(
        self, entries: npt.NDArray[np.void], starts: npt.NDArray[np.int64], bytes_at_once: int
    ) -> Iterator[BatchPlace]:
        """Some batches are compressed: each is opened."""
        placer = Placer()
        for entry, start in zip(entries, starts, strict=True):
            envelope = read_envelope(self._data, int(start))
            assert not isinstance(envelope, str)  # noqa: S101  # checked before
            name = self._names[int(entry["partition"])]
            batch = self._data[start + ENVELOPE_SIZE : start + int(entry["size"])]
            placer.add(batch, envelope, Range(name, *self._ranges[name]))
            if placer.size >= bytes_at_once:
                yield placer.take()
        yield placer.take()

    def check(self, *, must_be_whole: bool) -> None:
        """Find out which batches are what was written.

        Raises:
            CorruptionError: One is not, and all must be.
        """
        entries = self._entries
        is_good = (entries["size"] >= ENVELOPE_SIZE + HEADER_SIZE) & (
            self._starts + entries["size"].astype(np.int64) <= len(self._data)
        )
        length = max(len(self._data) - ENVELOPE_SIZE + 1, 0)
        views = np.ndarray((length,), f"V{ENVELOPE_SIZE}", self._data, strides=(1,))
        found, expected = views[self._starts[is_good]].view(_ENVELOPE), entries[is_good]
        is_good[is_good] = np.logical_and.reduce(
            [found[field] == expected[field] for field in _ENVELOPE.names or ()]
        )
        self._check_crcs(is_good)
        for at in np.flatnonzero(~is_good):
            offset = self._begin + int(self._starts[at])
            if must_be_whole:
                raise CorruptionError(self._path, offset, "the batch is not what was stored")
            log.warning("damaged batch passed over: %s offset=%d", self._path, offset)
        self.damaged = entries[~is_good]
        self._is_good = is_good

    def _check_crcs(self, is_good: npt.NDArray[np.bool_]) -> None:
        """Find those among the good ones that are not."""
        # To the checksum a view is a run of bytes like any other, and it is no copy.
        everything: Any = np.frombuffer(self._data, np.uint8)
        begins = (self._starts + ENVELOPE_SIZE).tolist()
        ends = (self._starts + self._entries["size"]).tolist()
        ids = self._entries["partition"].tolist()
        for at in np.flatnonzero(is_good).tolist():
            batch = everything[begins[at] : ends[at]]
            is_good[at] = verify_crc(batch, seed_of(self._names[ids[at]]))

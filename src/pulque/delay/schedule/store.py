"""The ticks of a delay server on disk: their schedule logs, and their dispatch logs.

Three threads work here, each on one job at a time: one writes schedule logs, one
writes dispatch logs, one searches ticks and removes finished ones. A reader of a tick
uses the size at its start: bytes before that do not change any more.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pulque.delay.schedule.checkpoint import Extent
from pulque.delay.schedule.entries import MovedNote, ReplayedStep, TickEntry, place, unmoved
from pulque.delay.schedule.message_reader import GatheredMessages, gather
from pulque.delay.schedule.tick import Tick
from pulque.delay.schedule.tick_index import Block, RowPlaces, Rows, TickIndex
from pulque.delay.schedule.tick_search import TickSearch
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.message_table import Scratch
from pulque.storage.schedule.dispatch_log import DispatchLog, Intent, Noted
from pulque.storage.schedule.message_id_index import TickDigests
from pulque.storage.schedule.schedule_log import (
    SCHEDULE,
    TickFile,
    encode_entry,
    tick_name,
    tick_named,
)

__all__ = ["ScheduleStore", "Step", "next_sequences", "open_intents"]

_BESIDE = ("dispatch", "index", "index.tmp")
_SCRATCH = 8 * 1024 * 1024
"""The reusable memory of a replay step, enough if it concerns few ticks."""


class Step(NamedTuple):
    """Batches of the message log, converted to entries of their ticks."""

    end: int
    """Up to where the message log is replayed after this step."""
    writes: list[tuple[int, list[Buffer], int]]
    """For each tick the bytes to append, and the number of messages."""
    added: dict[int, Block | None]
    """The same ticks, with the new rows for their index if they have one."""
    moved: list[MovedNote]
    """The old places of rescheduled messages."""


class ScheduleStore:
    """Schedule and dispatch logs of all ticks."""

    def __init__(self, files: FileSystem, listener: Listener, tick_ms: int) -> None:
        self._files = files
        self._listener = listener
        self.tick_ms = tick_ms
        self.ticks: dict[int, Tick] = {}
        self.search = TickSearch(files, listener, self.ticks)
        self.replayed = 0
        """Up to where the message log is replayed."""
        self.damaged = 0
        """The number of schedule and dispatch logs that were missing or cut short at the start,
        and of dispatch logs with damaged records."""
        self.is_torn = False
        """Whether the last replay failed half-way: then no checkpoint may be written."""
        self._stray_notes: dict[int, int] = {}
        """The durable sizes of missing schedule logs, according to their dispatch logs."""
        self._scratch = Scratch(_SCRATCH)
        self._logs_made = 1
        self._notes_made = 1
        self._names_synced = (0, 0)
        files.make_directory(SCHEDULE)
        files.sync_directory("")

    # -- recovery ----------------------------------------------------------------------------

    def recover(self, extent: Extent) -> list[tuple[int, Noted]]:
        """Recover all ticks; return the contents of their dispatch logs."""
        self.replayed = extent.replayed
        extent = self._without_removed(extent)
        noted = self._recover_notes(extent)
        names = self._files.list(SCHEDULE)
        for name in names:
            tick = tick_named(name)
            if tick is not None:
                self._recover_tick(tick, extent, noted.get(tick))
            elif all(tick_named(name, suffix) is None for suffix in _BESIDE):
                path = f"{SCHEDULE}/{name}"
                self._listener.corruption_found(path, 0, 0, "no schedule log is named like this")
        for tick in extent.sizes.keys() - self.ticks.keys():
            known, messages = extent.sizes[tick]
            found = noted.get(tick)
            made = self.ticks[tick] = _noted_tick(Tick(tick, 0, messages, 0, known), found)
            self._lose_end(made, max(known, _durable(found)), "the file is gone")
        for tick in noted.keys() - self.ticks.keys():
            # Its schedule log was removed, as all of it was over.
            self._files.remove(tick_name(tick, "dispatch"))
            self._stray_notes[tick] = noted[tick].durable
        self._remove_strays(names)
        self._sync_notes(extent)
        return [(tick, found) for tick, found in noted.items() if tick in self.ticks]

    def _without_removed(self, extent: Extent) -> Extent:
        """Return the extent of a checkpoint without finished ticks that were removed since.

        If messages came for such a tick after that, its files are new ones.
        """
        removed = set()
        for tick in extent.over:
            file = TickFile(self._files, tick, self._listener)
            is_there = self._files.exists(file.path)
            if not is_there or not 0 < file.first_replayed() <= extent.replayed:
                removed.add(tick)
        sizes = {tick: size for tick, size in extent.sizes.items() if tick not in removed}
        noted = {tick: end for tick, end in extent.noted.items() if tick not in removed}
        return extent._replace(sizes=sizes, noted=noted)

    def tell_made_again(self) -> None:
        """Report schedule logs that were missing, and were rebuilt from the message log."""
        for tick in self._stray_notes.keys() & self.ticks.keys():
            self.damaged += 1
            reason = "the file was gone: what the message log has of it is made again"
            size = self._stray_notes[tick]
            self._listener.corruption_found(tick_name(tick), 0, size, reason)

    def _remove_strays(self, names: list[str]) -> None:
        """Remove hash indexes of removed ticks, and partly written ones."""
        for name in names:
            tick = tick_named(name, "index")
            is_left = tick is not None and tick not in self.ticks
            if is_left or tick_named(name, "index.tmp") is not None:
                self._files.remove(f"{SCHEDULE}/{name}")

    def _recover_notes(self, extent: Extent) -> dict[int, Noted]:
        found: dict[int, Noted] = {}
        for name in self._files.list(SCHEDULE):
            tick = tick_named(name, "dispatch")
            if tick is not None:
                found[tick] = DispatchLog(self._files, tick, self._listener).load()
        for tick, was in extent.noted.items():
            end = found[tick].end if tick in found else 0
            if end < was:
                self.damaged += 1
                reason = "its end is missing" if tick in found else "the file is gone"
                path = tick_name(tick, "dispatch")
                self._listener.corruption_found(path, end, was - end, reason)
            elif tick in found and found[tick].is_damaged:
                self.damaged += 1
        return found

    def _sync_notes(self, extent: Extent) -> None:
        """Sync dispatch logs that were read and may be in the page cache only.

        Else a power cut could lose records that this server relies on from now on.
        """
        unsynced = [t for t in self.ticks.values() if t.noted_end > extent.noted.get(t.tick, 0)]
        self._files.sync_files([tick_name(each.tick, "dispatch") for each in unsynced])
        if unsynced:
            self._sync_names()
        for each in self.ticks.values():
            each.noted_synced = each.noted_end

    def _recover_tick(self, tick: int, extent: Extent, noted: Noted | None) -> None:
        file = TickFile(self._files, tick, self._listener)
        known, messages = extent.sizes.get(tick, (0, 0))
        opened = self._files.open(file.path)
        size = opened.size()
        opened.close()
        if size != known and file.tick_inside() != tick:
            self._set_aside(file)
            return
        made = _noted_tick(Tick(tick, size, messages, 0, known), noted)
        durable = _durable(noted)
        if size > known:
            made.size, made.replayed, more = file.recover(known, durable)
            made.messages += more
        if made.size < known:
            self._lose_end(made, max(known, durable), "the file ends before what was written")
        elif made.size < durable:
            # The message log has what is missing. What was dispatched of it is not known.
            reason = "the file ends before what was on disk: its end is made again"
            self._lose_end(made, durable, reason)
        elif made.size < size:
            TickDigests(self._files, tick, self._listener).remove()  # may know what was cut away
        self.ticks[tick] = made

    def _lose_end(self, made: Tick, end: int, reason: str) -> None:
        """Extend a schedule log that lost its end, or everything, to its former size.

        Else the dispatch log, which identifies messages by offset, would mark new messages
        as dispatched or cancelled.
        """
        self.damaged += 1
        path = tick_name(made.tick)
        self._listener.corruption_found(path, made.size, end - made.size, reason)
        TickDigests(self._files, made.tick, self._listener).remove()
        file = self._files.open(path, create=True)
        file.truncate(end)  # or the next start would find the same missing, and tell it again
        file.close()
        self._logs_made += 1
        made.size = end

    def _set_aside(self, file: TickFile) -> None:
        """Set a renamed file aside."""
        self.damaged += 1
        reason = (
            f"an entry of {tick_name(file.tick_inside())} lies here: the file is kept as "
            f"{file.path}.misnamed; give it its name back and restart"
        )
        self._listener.corruption_found(file.path, 0, 0, reason)
        self._files.rename(file.path, f"{file.path}.misnamed")

    @property
    def is_ahead(self) -> bool:
        """Whether a power cut left the schedule logs ahead of the message log."""
        return any(found.replayed > self.replayed for found in self.ticks.values())

    def forget_ahead(self) -> None:
        """Record that a checkpoint has the entries by which schedule logs are ahead.

        New batches get the same offsets in the message log.
        """
        for found in self.ticks.values():
            found.replayed = min(found.replayed, self.replayed)

    # -- replay ------------------------------------------------------------------------------

    def replay(
        self,
        batches: Iterable[ReplayedStep],
        end: int,
        *,
        was_tick_ms: int = 0,
        wanted: Container[int] = (),
    ) -> Step:
        """Replay batches of the message log into their ticks: ``prepare`` and ``write``."""
        step = self.prepare(batches, end, was_tick_ms=was_tick_ms, wanted=wanted)
        self.write(step)
        return step

    def prepare(
        self,
        batches: Iterable[ReplayedStep],
        end: int,
        *,
        was_tick_ms: int = 0,
        wanted: Container[int] = (),
    ) -> Step:
        """Return the step that replays batches of the message log into their ticks.

        It has to be written before the next step is prepared.

        Args:
            batches: Batches in the order of the message log.
            end: The end of the last one.
            was_tick_ms: In recovery, the length of ticks: some batches may be there already.
            wanted: Ticks that have an index in memory.
        """
        covered: dict[int, int] | None = None
        if was_tick_ms or self.is_torn:
            covered = {
                t.tick: t.replayed for t in self.ticks.values() if t.replayed > self.replayed
            }
        found = [unmoved(each) for each in batches]
        self._scratch.clear()
        placed = place(
            [each for each, _ in found], was_tick_ms or self.tick_ms, covered, self._scratch
        )
        added: dict[int, Block | None] = {}
        writes = []
        for tick, entries in placed.items():
            buffers, offsets = self._encoded(tick, entries, end)
            count = sum(each.end - each.start for each in entries)
            writes.append((tick, buffers, count))
            added[tick] = _block(entries, offsets) if tick in wanted else None
        return Step(end, writes, added, [moved for _, moved in found if moved is not None])

    def write(self, step: Step) -> None:
        """Write a prepared step.

        Raises:
            StorageError: Some entries may be in their ticks; preparing the same batches again
                leaves these out.
        """
        self.is_torn = True
        for tick, buffers, count in step.writes:
            self._append(tick, buffers, count, step.end)
        self.replayed = step.end
        self.is_torn = False

    def _encoded(
        self, tick: int, placed: list[TickEntry], end: int
    ) -> tuple[list[Buffer], list[int]]:
        """Encode entries; return their offsets, and the end of the last one."""
        found = self.ticks.get(tick)
        buffers: list[Buffer] = []
        offsets = [0 if found is None else found.size]
        last = len(placed) - 1
        for i, each in enumerate(placed):
            head, size = encode_entry(
                each.batch,
                each.partition,
                count=each.end - each.start,
                offset=offsets[-1],
                tick=tick,
                replayed=end if i == last else 0,
                dues_ms=(each.first_due_ms, each.last_due_ms),
            )
            buffers.append(head)
            buffers += each.batch
            offsets.append(offsets[-1] + size)
        return buffers, offsets

    def _append(self, tick: int, buffers: list[Buffer], count: int, end: int) -> None:
        found = self.ticks.get(tick)
        is_new = found is None
        if found is None:
            found = Tick(tick)
        found.size = TickFile(self._files, tick, self._listener).append(buffers, found.size)
        if is_new:
            self._logs_made += 1  # not before it is there: another thread syncs names
        found.messages += count
        found.replayed = end
        self.ticks[tick] = found

    # -- reading -----------------------------------------------------------------------------

    def load_index(self, tick: int) -> TickIndex:
        """Return the index of a tick with the states of its messages; empty if it was removed."""
        index = self.read_index(tick)
        if tick in self.ticks:
            self.finish_index(index)
        return index

    def read_index(self, tick: int) -> TickIndex:
        """Return the index of a tick, without the states of its messages."""
        index = TickIndex(tick)
        self.extend_index(index)
        return index

    def finish_index(self, index: TickIndex) -> Noted:
        """Add new entries to an index since it was read, and apply the dispatch log.

        Returns:
            The contents of the tick's dispatch log.
        """
        self.extend_index(index)
        noted = DispatchLog(self._files, index.tick, self._listener).load(is_quiet=True)
        index.apply(noted)
        return noted

    def extend_index(self, index: TickIndex) -> None:
        """Add the new entries of its tick to an index."""
        found = self.ticks.get(index.tick)
        size = 0 if found is None else found.size
        if index.end < size:
            file = TickFile(self._files, index.tick, self._listener)
            index.add(file.entries(index.end, end=size))
            index.end = size  # what is damaged at the end is not told again

    def gather(self, tick: int, places: RowPlaces) -> GatheredMessages:
        """Return messages of one tick and partition. May be called from any thread."""
        return gather(TickFile(self._files, tick, self._listener), places)

    # -- writing down ------------------------------------------------------------------------

    def note(self, records: Mapping[int, bytes], *, is_durable: bool) -> None:
        """Write records to dispatch logs.

        Args:
            records: The records by tick.
            is_durable: Whether they must survive a power cut. The entries that they refer to
                are synced before they are written: a power cut may keep an unsynced write
                and lose an older one.

        Raises:
            StorageError: Some records may be written.
        """
        for tick, data in records.items():
            found = self.ticks[tick]
            if is_durable:
                self._sync(found)
            log = DispatchLog(self._files, tick, self._listener)
            is_new = not found.noted_end
            found.noted_end = log.append(data, found.noted_end)
            if is_new:
                self._notes_made += 1
            if is_durable:
                end = found.noted_end
                log.sync()
                found.noted_synced = end
        if is_durable:
            self._sync_names()

    def extent(self, over: AbstractSet[int], gone: AbstractSet[int]) -> Extent:
        """Return the extent for a checkpoint.

        Args:
            over: Ticks to remove after the next checkpoint.
            gone: Ticks to remove after this one.
        """
        sizes = {t.tick: (t.size, t.messages) for t in self.ticks.values() if t.tick not in gone}
        noted = {
            tick: self.ticks[tick].noted_synced for tick in sizes if self.ticks[tick].noted_synced
        }
        return Extent(self.replayed, self.tick_ms, sizes, noted, over)

    def sync(self, extent: Extent) -> None:
        """Sync everything that a checkpoint covers. May be called from any thread."""
        found = [self.ticks[tick] for tick in extent.sizes if tick in self.ticks]
        grown = [(each, each.size) for each in found if each.synced < each.size]
        self._files.sync_files([tick_name(each.tick) for each, _ in grown])
        for each, size in grown:
            each.synced = max(each.synced, size)
        self._sync_names()

    def remove(self, tick: int) -> None:
        """Remove a finished tick.

        Its schedule log is removed first, so that it never comes back without the dispatch log.
        """
        self.ticks.pop(tick, None)
        for suffix in ("log", "dispatch", "index"):
            path = tick_name(tick, suffix)
            if self._files.exists(path):
                self._files.remove(path)
                self._files.sync_directory(SCHEDULE)

    def _sync(self, found: Tick) -> None:
        size = found.size
        if found.synced < size:
            TickFile(self._files, found.tick, self._listener).sync()
            found.synced = max(found.synced, size)

    def _sync_names(self) -> None:
        made = (self._logs_made, self._notes_made)
        if made != self._names_synced:
            self._files.sync_directory(SCHEDULE)
            self._names_synced = made


def _noted_tick(tick: Tick, noted: Noted | None) -> Tick:
    """Return a tick with the sizes of its dispatch log."""
    if noted is not None:
        tick.noted_end, tick.last_number = noted.end, noted.last_number
    return tick


def _durable(noted: Noted | None) -> int:
    """Return the durable size of a schedule log according to its dispatch log."""
    return 0 if noted is None else noted.durable


def _block(placed: Sequence[TickEntry], offsets: Sequence[int]) -> Block:
    """Return the index rows of entries, given their offsets and the end of the last one."""
    # Mostly they lie one after the other in one table: then nothing need be copied.
    is_in_a_row = all(
        each.columns is after.columns and each.end == after.start
        for each, after in pairwise(placed)
    )

    def column(name: str) -> Rows:
        if is_in_a_row:
            return placed[0].columns[name][placed[0].start : placed[-1].end]
        return np.concatenate([each.columns[name][each.start : each.end] for each in placed])

    return Block(
        list(offsets[:-1]),
        [end - start for start, end in pairwise(offsets)],
        [each.end - each.start for each in placed],
        [each.partition for each in placed],
        column("due_at_ms"),
        column("id"),
        column("size"),
    )


def next_sequences(noted: Iterable[tuple[int, Noted]]) -> dict[tuple[str, str], int]:
    """Return for each broker group and partition the number of the next batch."""
    found: dict[tuple[str, str], int] = {}
    for _, each in noted:
        for intent in each.intents.values():
            key = (intent.broker_group, intent.partition)
            found[key] = max(found.get(key, 0), intent.sequence + 1)
    return found


def open_intents(noted: Noted) -> list[Intent]:
    """Return the batches of unknown outcome, in the order in which they were sent."""
    return [intent for number, intent in sorted(noted.intents.items()) if number not in noted.done]

"""Search ticks that are not in memory, by id, and count their waiting messages.

All of it runs in one thread, which also removes ticks; schedule logs may grow meanwhile.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from pulque.delay.schedule.tick import Tick
from pulque.delay.schedule.tick_index import TickIndex, offset_of
from pulque.errors import StorageFullError
from pulque.model.names import PartitionName
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.message_ids import ID_TYPE
from pulque.storage.message_table import columns_before_data
from pulque.storage.schedule.dispatch_log import DispatchLog, joined_runs
from pulque.storage.schedule.message_id_index import DigestHead, TickDigests
from pulque.storage.schedule.schedule_log import ScheduleEntry, TickFile

__all__ = ["TickSearch"]

_LEAST_UNINDEXED = 16 * 1024
"""A schedule log without more unindexed bytes gets no index."""


class TickSearch:
    """Searches schedule logs by their hash indexes, and writes these.

    Args:
        files: The data directory.
        listener: Is told of damage.
        ticks: All ticks.
    """

    def __init__(self, files: FileSystem, listener: Listener, ticks: Mapping[int, Tick]) -> None:
        self._files = files
        self._listener = listener
        self._ticks = ticks

    def find(self, ticks: Iterable[int], message_id: bytes, *, may_index: bool) -> list[TickIndex]:
        """Return the entries of ticks that have an id, with the states of their messages.

        Args:
            ticks: The ticks to search.
            message_id: Sixteen bytes.
            may_index: Whether to write missing hash indexes. That takes longer than a search for
                one id, and pays off for several.
        """
        present = [tick for tick in ticks if tick in self._ticks]
        found = [self._find(tick, message_id, may_index=may_index) for tick in present]
        return [index for index in found if index.count]

    def _find(self, tick: int, message_id: bytes, *, may_index: bool) -> TickIndex:
        index = TickIndex(tick)
        size = self._ticks[tick].size
        file = TickFile(self._files, tick, self._listener)
        covered = 0
        digests = TickDigests(self._files, tick, self._listener)
        head = self.index_ids(tick) if may_index else digests.head()
        if head is not None:
            places = digests.find(head, message_id)
            if places is not None:
                covered = head.covered
                index.add([entry for entry in file.read(places) if entry is not None])
        if file.may_hold(message_id, covered, size):
            tail = file.entries(covered, end=size)
            index.add([each for each in tail if _has(each, message_id)])
        if index.count:
            index.apply(DispatchLog(self._files, tick, self._listener).load(is_quiet=True))
        return index

    def index_ids(self, tick: int) -> DigestHead | None:
        """Return the hash index of a tick, after updating it if much is missing."""
        found = self._ticks.get(tick)
        if found is None:
            return None
        synced = found.synced
        digests = TickDigests(self._files, tick, self._listener)
        head = digests.head()
        found.indexed = 0 if head is None else head.covered
        if self.wants_index(found):
            file = TickFile(self._files, tick, self._listener)
            try:
                digests.extend(head, file.entries(found.indexed, end=synced), synced)
            except StorageFullError:
                return head
            head = digests.head()
            found.indexed = 0 if head is None else head.covered
        return head

    @staticmethod
    def wants_index(found: Tick) -> bool:
        """Return whether much of a tick is missing from its hash index.

        Only synced entries are indexed: after a power cut, others may get other places.
        """
        return found.synced - found.indexed > max(_LEAST_UNINDEXED, found.indexed // 8)

    def waiting(self, tick: int) -> dict[PartitionName, int] | None:
        """Return the number of waiting messages of a tick per partition.

        None if some are or were being sent: then only a full index has the numbers.
        """
        noted = DispatchLog(self._files, tick, self._listener).load(is_quiet=True)
        if tick not in self._ticks or noted.intents:
            return None
        head = self.index_ids(tick)
        size, covered = self._ticks[tick].size, head.covered if head is not None else 0
        rows: list[tuple[int, PartitionName, int]] = []
        if head is not None:
            columns = (head.offsets.tolist(), head.owners.tolist(), head.counts.tolist())
            rows = [(at, head.names[owner], n) for at, owner, n in zip(*columns, strict=True)]
        tail = TickFile(self._files, tick, self._listener).entries(covered, end=size)
        rows += [(entry.offset, entry.partition, entry.count) for entry in tail]
        found: dict[PartitionName, int] = {}
        for _, partition, count in rows:
            found[partition] = found.get(partition, 0) + count
        gone = {
            place + i
            for place, length in joined_runs([*noted.cancelled, *noted.moved]).tolist()
            for i in range(length)
        }
        if gone:
            owners = {offset: partition for offset, partition, _ in rows}
            for place in gone:
                owner = owners.get(offset_of(place))
                if owner is not None:
                    found[owner] -= 1
        return found


def _has(entry: ScheduleEntry, message_id: bytes) -> bool:
    ids = columns_before_data(entry.batch)[1]["id"]
    return bool((ids == np.frombuffer(message_id, ID_TYPE)).all(axis=1).any())

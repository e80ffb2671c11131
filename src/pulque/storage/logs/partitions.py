"""The partitions of the storage engine, and the table at the beginning of each segment.

A segment of the message log begins with a table of all partitions that existed by then; a
partition made later appends a table of one. So a segment can be read without any other file,
and numbering never restarts: the table says which sequence comes next.
"""

from collections.abc import Callable, Iterable
from struct import Struct, error

import google_crc32c

from pulque.model.batch import seed_of
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.storage.directory.layout import LARGEST

__all__ = ["Partition", "Partitions", "TableRow", "decode_table", "encode_table"]

TableRow = tuple[PartitionId, PartitionName, ConsumeSequence]
"""Id, name and next sequence."""

_CRC = Struct("<I")
_COUNT = Struct("<I")
_ROW = Struct("<IQH")
_STATE = Struct("<QQ")
_STATE_KEY = Struct("<1sI")


class Partition:
    """One partition: a name, and where its messages begin and end."""

    __slots__ = ("confirmed", "end", "id", "name", "seed", "start")

    def __init__(
        self, partition_id: PartitionId, name: PartitionName, end: ConsumeSequence
    ) -> None:
        self.id = partition_id
        self.name = name
        self.seed = seed_of(name)
        self.start = ConsumeSequence(0)
        """The oldest message that is stored."""
        self.end = end
        """The sequence of the next message to be appended."""
        self.confirmed = end
        """Messages before it are confirmed: they may be pulled."""

    def __repr__(self) -> str:
        return f"<Partition {self.id} {self.name} {self.start}..{self.confirmed}..{self.end}>"


class Partitions:
    """All partitions, by name and by id."""

    def __init__(self) -> None:
        self.by_name: dict[str, Partition] = {}
        self.by_id: dict[PartitionId, Partition] = {}
        self.changed: set[PartitionId] = set()
        """Those that differ from the last checkpoint."""
        self._next_id = 1
        self._added: Callable[[Partition], object] | None = None

    def name_of(self, partition: PartitionId) -> PartitionName | None:
        """Return the name of a partition, if it exists."""
        found = self.by_id.get(partition)
        return None if found is None else found.name

    def watch(self, added: Callable[[Partition], object]) -> None:
        """Register ``added`` to be called with every partition that is added from now on."""
        self._added = added

    def make(self, name: PartitionName) -> Partition:
        """Return a new partition that is not in the tables yet."""
        return Partition(PartitionId(self._next_id), name, ConsumeSequence(0))

    def put(self, partition: Partition) -> None:
        """Add a partition."""
        self.by_name[partition.name] = partition
        self.by_id[partition.id] = partition
        self._next_id = max(self._next_id, partition.id + 1)
        self.changed.add(partition.id)
        if self._added is not None:
            self._added(partition)

    def take_rows(self, rows: list[TableRow]) -> None:
        """Apply a table; a known partition's end never moves back."""
        for partition_id, name, next_sequence in rows:
            known = self.by_id.get(partition_id)
            if known is None:
                known = Partition(partition_id, name, next_sequence)
                known.start = next_sequence
                self.put(known)
            if known.end < next_sequence:
                known.end = next_sequence
                self.changed.add(partition_id)

    def rows(self) -> list[TableRow]:
        """Return the table of all partitions."""
        return [(p.id, p.name, p.end) for p in self.by_id.values()]

    def encode_changed(self) -> dict[bytes, bytes]:
        """Return the changed partitions for a checkpoint, and reset the record of changes."""
        changes = {}
        for partition_id in self.changed:
            partition = self.by_id[partition_id]
            head = _STATE.pack(partition.start, partition.end)
            changes[_STATE_KEY.pack(b"p", partition_id)] = head + partition.name.encode()
        self.changed = set()
        return changes

    def raise_starts(self, starts: Iterable[tuple[PartitionId, ConsumeSequence]]) -> None:
        """Record that messages before these sequences were removed."""
        for partition_id, sequence in starts:
            partition = self.by_id.get(partition_id)
            if partition is not None and partition.start < sequence:
                partition.start = min(sequence, partition.end)
                partition.confirmed = max(partition.confirmed, partition.start)
                self.changed.add(partition_id)

    def load(self, state: dict[bytes, bytes]) -> None:
        """Take in what a checkpoint holds.

        Raises:
            ValueError: The bytes are invalid.
        """
        for key, value in state.items():
            if key[:1] == b"p" and len(key) == _STATE_KEY.size:
                if len(value) < _STATE.size:
                    raise ValueError(f"a partition of {len(value)} bytes")
                partition_id = PartitionId(_STATE_KEY.unpack(key)[1])
                start, end = _STATE.unpack_from(value)
                if end > LARGEST:
                    raise ValueError(f"a partition that ends at sequence {end}")
                name = PartitionName(value[_STATE.size :].decode())
                partition = Partition(partition_id, name, end)
                partition.start = start
                self.put(partition)
        self.changed = set()


def encode_table(rows: list[TableRow]) -> bytes:
    """Return a table of (id, name, next sequence)."""
    parts = [_COUNT.pack(len(rows))]
    for partition_id, name, next_sequence in rows:
        encoded = name.encode()
        parts.append(_ROW.pack(partition_id, next_sequence, len(encoded)))
        parts.append(encoded)
    payload = b"".join(parts)
    return _CRC.pack(google_crc32c.value(payload)) + payload


def decode_table(data: bytes) -> list[TableRow] | None:
    """Return the rows of a table, or None if it is damaged."""
    if len(data) < 8 or google_crc32c.value(data[4:]) != _CRC.unpack_from(data)[0]:
        return None
    (count,) = _COUNT.unpack_from(data, 4)
    rows = []
    at = 8
    try:
        for _ in range(count):
            partition_id, next_sequence, size = _ROW.unpack_from(data, at)
            at += _ROW.size
            name = PartitionName(data[at : at + size].decode())
            if next_sequence > LARGEST:
                return None
            rows.append((partition_id, name, next_sequence))
            at += size
    except (error, UnicodeDecodeError):
        return None
    return rows

"""Rows into Parquet files, one for each part of a table, with little memory.

Rows of a part wait until they make a good row group, or until all parts together hold too much.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pulque.errors import StorageError
from pulque.pipeline.lake.file_writer import WritableTree
from pulque.pipeline.lake.table import TableFile, TableKind

__all__ = ["Part", "PartWriter", "WrittenRows"]

Part = tuple[str, ...]
"""The values of the columns that a table is partitioned by, as text."""

_ROW_GROUP_BYTES = 32 * 1024 * 1024
_MOST_BYTES = 256 * 1024 * 1024
_ROWS_AT_ONCE = 65_536
_REPEATED = ("subject", "partition", "tags", "stored_at", "attempt", "priority", "broker")
"""Columns of few values; for the others a dictionary is only work."""
_LOOKED_UP = ("message_id", "key")
_FALSE_POSITIVES = 0.01
_WITH_BOUNDS = ("message_id", "sequence", "created_at", "stored_at", "broker", "segment", "at")


class PartWriter:
    """Writes rows to new files of a table, which nobody reads before they are committed.

    Args:
        tree: The lake.
        kind: The table.
        name: How the names of files begin; the rest is drawn, so that two runs never meet.
    """

    def __init__(self, tree: WritableTree, kind: TableKind, name: str) -> None:
        self._tree = tree
        self._kind = kind
        self._name = f"{name}-{secrets.token_hex(6)}.parquet"
        self._files: dict[Part, _OpenFile] = {}

    def add(self, part: Part, batch: pa.RecordBatch) -> None:
        """Take in rows.

        Raises:
            StorageError: They cannot be written.
        """
        file = self._files.get(part)
        if file is None:
            values = zip(self._kind.partitioned_by, part, strict=True)
            directory = "/".join(f"{name}={value}" for name, value in values)
            path = f"{self._kind.name}/{directory}/{self._name}"
            file = self._files[part] = _OpenFile(self._tree, path, self._kind.file_schema)
        file.add(batch)
        if file.waiting_bytes >= _ROW_GROUP_BYTES:
            file.flush()
        elif sum(each.waiting_bytes for each in self._files.values()) >= _MOST_BYTES:
            max(self._files.values(), key=lambda each: each.waiting_bytes).flush()

    def finish(self) -> list[tuple[Part, str]]:
        """Write what waits; return the parts and the paths of their files in the lake.

        Raises:
            StorageError: They cannot be written.
        """
        for file in self._files.values():
            file.close()
        return [(part, file.path) for part, file in self._files.items()]

    def abandon(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            file.abandon()


class _OpenFile:
    """One file that is being written."""

    def __init__(self, tree: WritableTree, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.waiting_bytes = 0
        self._tree = tree
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._stream: pa.NativeFile | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self.waiting_bytes += batch.nbytes

    def flush(self) -> None:
        """Write what waits as one row group."""
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self.waiting_bytes = [], 0
        if self._stream is None:
            self._stream = self._tree.open_new(self.path)
        try:
            if self._writer is None:
                self._writer = self._opened(table.num_rows)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self._tree.where}/{self.path}: {error}") from error

    def close(self) -> None:
        if self._waiting:
            self.flush()
        if self._writer is None or self._stream is None:
            return
        try:
            self._writer.close()
            self._stream.close()
            self._tree.sync(self.path)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self._tree.where}/{self.path}: {error}") from error

    def abandon(self) -> None:
        for each in (self._writer, self._stream):
            try:
                if each is not None:
                    each.close()
            except (OSError, pa.ArrowException):
                pass  # it goes anyway
        self._tree.remove(self.path)

    def _opened(self, rows: int) -> pq.ParquetWriter:
        names = self._schema.names
        looked_up = [name for name in _LOOKED_UP if name in names]
        return pq.ParquetWriter(
            self._stream,
            self._schema,
            compression="zstd",
            use_dictionary=[name for name in _REPEATED if name in names],
            bloom_filter_options={
                name: {"ndv": max(rows, 1), "fpp": _FALSE_POSITIVES} for name in looked_up
            },
            write_page_checksum=True,
            write_page_index=True,
        )


class WrittenRows:
    """A file of a table, read again.

    Args:
        tree: The lake.
        kind: The table.
        part: Which part of it.
        path: In the lake.

    Raises:
        StorageError: It cannot be read.
    """

    def __init__(self, tree: WritableTree, kind: TableKind, part: Part, path: str) -> None:
        self._where = f"{tree.where}/{path}"
        self._size = tree.size(path) or 0
        self._part = tuple(zip(kind.partitioned_by, part, strict=True))
        self._path = path.removeprefix(f"{kind.name}/")
        try:
            self._file = pq.ParquetFile(tree.stream(path), page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self._where}: {error}") from error

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows; every page is compared with its checksum."""
        try:
            yield from self._file.iter_batches(_ROWS_AT_ONCE)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self._where}: {error}") from error

    def described(self) -> TableFile:
        """Say what it is to the table."""
        found = self._file.metadata
        lowest: dict[str, Any] = {}
        highest: dict[str, Any] = {}
        for name, bounds in _bounds(found).items():
            if all(each is not None for each in bounds):
                lowest[name] = min(low for low, _ in bounds)
                highest[name] = max(high for _, high in bounds)
        return TableFile(self._path, self._size, found.num_rows, self._part, lowest, highest)


def _bounds(found: pq.FileMetaData) -> dict[str, Sequence[Any]]:
    """Return the least and greatest value in each row group, by column."""
    columns = {found.schema.column(at).path: at for at in range(found.num_columns)}
    bounds: dict[str, Sequence[Any]] = {}
    for name in _WITH_BOUNDS:
        if name in columns:
            groups = [
                found.row_group(at).column(columns[name]) for at in range(found.num_row_groups)
            ]
            known = [group.statistics for group in groups]
            bounds[name] = [
                (each.min, each.max) if each is not None and each.has_min_max else None
                for each in known
            ]
    return bounds

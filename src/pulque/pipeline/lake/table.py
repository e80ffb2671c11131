"""A lake: what was archived, as a table that other engines read as it is.

::

    <lake>/messages/_delta_log/…            what there is: the truth
                   /day=…/bucket=…/….parquet  messages by the day they were stored on
          /quarantine/…                     batches that nobody can decode, with their bytes
          /raw/<broker>/<base>.log          the segments themselves, whole

The table is a Delta Lake table. Its log names the files that count: a file that it does not name
is not there, for any reader. What is added to the log carries the name of its segment as an
*application transaction*, so that a segment is added once, whoever tries and however often.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import google_crc32c
import pyarrow as pa

from pulque.errors import StorageError, UsageError
from pulque.pipeline.columns import INSTANT, SCHEMA
from pulque.pipeline.lake.file_writer import WritableTree

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "BUCKETS",
    "MESSAGES",
    "QUARANTINE",
    "Table",
    "TableFile",
    "TableKind",
    "bucket_of",
    "frame",
    "statistic",
    "view",
]

BUCKETS = 16
_VERSION_KEY = "pulque.schema"
_COMMIT_TRIES = 5
_IN_LOG = re.compile(r"\d{20}\.(json|checkpoint\b.*\.parquet)$|_last_checkpoint$")


@dataclass(frozen=True, slots=True)
class TableKind:
    """One of the tables that a lake may have.

    Attributes:
        name: Its directory in the lake.
        schema: Its columns; those it is partitioned by come last, and are in no file.
        partitioned_by: The names of those.
        version: Of the schema. Columns that are added leave it as it is.
    """

    name: str
    schema: pa.Schema
    partitioned_by: tuple[str, ...]
    version: int

    @property
    def file_schema(self) -> pa.Schema:
        """The columns that files have."""
        return pa.schema([f for f in self.schema if f.name not in self.partitioned_by])


MESSAGES = TableKind(
    "messages",
    pa.schema(
        [
            *SCHEMA,
            ("broker", pa.string()),
            ("segment", pa.int64()),
            ("day", pa.date32()),
            ("bucket", pa.int32()),
        ]
    ),
    ("day", "bucket"),
    1,
)


QUARANTINE = TableKind(
    "quarantine",
    pa.schema(
        [
            ("subject", pa.string()),
            ("partition", pa.string()),
            ("first_sequence", pa.int64()),
            ("count", pa.int64()),
            ("stored_at", INSTANT),
            ("reason", pa.string()),
            ("raw", pa.binary()),
            ("offset", pa.int64()),
            ("broker", pa.string()),
            ("segment", pa.int64()),
            ("day", pa.date32()),
        ]
    ),
    ("day",),
    1,
)
"""Batches of archived segments that cannot be decoded, byte for byte."""


def bucket_of(subject: str) -> int:
    """Return the bucket that a subject's messages are in."""
    return int(google_crc32c.value(subject.encode())) % BUCKETS


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with rows, as it is told to the table.

    Attributes:
        path: In the table's directory.
        size: In bytes.
        rows: How many it has.
        partition: The values of the columns that the table is partitioned by, as text.
        lowest: The least value of some columns.
        highest: The greatest.
    """

    path: str
    size: int
    rows: int
    partition: tuple[tuple[str, str], ...]
    lowest: Mapping[str, Any]
    highest: Mapping[str, Any]

    def statistics(self) -> str:
        """Return what readers use to pass it over."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {name: statistic(value) for name, value in self.lowest.items()},
                "maxValues": {name: statistic(value) for name, value in self.highest.items()},
            }
        )


def statistic(value: Any) -> Any:
    """Return a value of a column as statistics of a Delta table write it."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    return value


class Table:
    """One table of a lake.

    Args:
        where: The lake, a path or a URL.
        kind: Which table.

    Raises:
        UsageError: There is no such place, or no table can be there.
    """

    def __init__(self, where: str, kind: TableKind = MESSAGES) -> None:
        self.kind = kind
        self.tree = WritableTree(where)
        self.uri = self.tree.uri(kind.name)
        is_local = self.tree.local() is not None
        if is_local and (unquote(self.uri) != self.uri or "\\" in self.uri):
            raise UsageError(
                f"the path of a lake is {where!r}; neither a percent sign before two hexadecimal "
                "digits nor a backslash is allowed, as Delta tables take them for something else"
            )

    def exists(self) -> bool:
        """Return whether anything was ever archived there.

        What a run left that died while it made the table, under a name for the time being, is
        nothing yet.
        """
        return any(map(_IN_LOG.match, self.tree.names(f"{self.kind.name}/_delta_log")))

    def open(self) -> "DeltaTable":
        """Return the table as it is now.

        Raises:
            UsageError: There is none, or not one that this version understands.
            StorageError: It cannot be read.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if not self.exists():
            raise UsageError(
                f"there is no table {self.kind.name} in {self.tree.where}: "
                "pulque pipeline archive makes it"
            )
        try:
            table = DeltaTable(self.uri)
        except (DeltaError, OSError) as error:
            raise StorageError(f"{self.uri}: {error}") from error
        _check_version(self.uri, self.kind, table.metadata().configuration)
        return table

    def create(self) -> "DeltaTable":
        """Return the table as it is now; an empty one is made if there is none.

        Raises:
            StorageError: It cannot be made.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if self.exists():
            return self.open()
        try:
            DeltaTable.create(
                self.uri,
                self.kind.schema,
                mode="ignore",
                partition_by=list(self.kind.partitioned_by),
                name=self.kind.name,
                configuration={_VERSION_KEY: str(self.kind.version)},
                raise_if_key_not_exists=False,
            )
        except (DeltaError, OSError) as error:
            if not self.exists():  # else somebody else made it meanwhile
                raise StorageError(f"{self.uri}: {error}") from error
        self._sync_log(-1)
        return self.open()

    def has(self, transaction: str) -> bool:
        """Say whether a transaction of this name was committed."""
        return self.exists() and self.open().transaction_version(transaction) is not None

    def commit(self, files: Sequence[TableFile], transaction: str) -> bool:
        """Let files count, all together, once for each transaction.

        Returns:
            Whether they count now; if not, somebody else committed the transaction before.

        Raises:
            StorageError: They do not count.
        """
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import CommitProperties, Transaction

        properties = CommitProperties(app_transactions=[Transaction(transaction, 1)])
        tries_left = _COMMIT_TRIES
        while True:
            table = self.create()
            if table.transaction_version(transaction) is not None:
                return False
            tries_left -= 1
            try:
                table.create_write_transaction(
                    [_add_action(each) for each in files],
                    "append",
                    self.kind.schema,
                    list(self.kind.partitioned_by),
                    commit_properties=properties,
                )
            except (DeltaError, OSError) as error:
                # Who came first, or whether we did after all, is what the log says.
                if self.has(transaction):
                    return bool(files) and self._names(files[0])
                # Two runs that make the table at once both write its metadata.
                if not isinstance(error, CommitFailedError) or not tries_left:
                    raise StorageError(f"{self.uri}: {error}") from error
            else:
                self._sync_log(table.version())
                return True

    def _names(self, file: TableFile) -> bool:
        return any(each.endswith(file.path) for each in self.open().file_uris())

    def _sync_log(self, since: int) -> None:
        log = f"{self.kind.name}/_delta_log"
        for name in self.tree.names(log):
            version, _, suffix = name.partition(".")
            if suffix == "json" and version.isdigit() and int(version) > since:
                self.tree.sync(f"{log}/{name}")


def _add_action(file: TableFile) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=dict(file.partition),
        modification_time=int(datetime.now().astimezone().timestamp() * 1000),
        data_change=True,
        stats=file.statistics(),
    )


def _check_version(uri: str, kind: TableKind, found: Mapping[str, str | None]) -> None:
    version = found.get(_VERSION_KEY)
    if version is None or not version.isdigit():
        raise UsageError(f"{uri} is a Delta table, but not one that Pulque made")
    if int(version) > kind.version:
        raise UsageError(
            f"{uri} has version {version} of its schema, and this Pulque knows {kind.version}: "
            "use the version that wrote it, or a later one"
        )


def view(spark: "SparkSession", where: str, name: str = "messages") -> "DataFrame":
    """Register what is archived as a view of Spark SQL, without Delta's jars.

    It shows the table as it is now; ask again for what was archived later.

    Args:
        spark: The session.
        where: The lake.
        name: Of the view.
    """
    found = frame(spark, where, MESSAGES)
    found.createOrReplaceTempView(name)
    return found


def frame(spark: "SparkSession", where: str, kind: TableKind) -> "DataFrame":
    """Return a table as it is now; columns that were added later are null in older rows.

    Raises:
        UsageError: There is none.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    table = Table(where, kind)
    schema = from_arrow_schema(table.kind.schema)
    # ``file_uris`` writes a space or an umlaut of the lake's path as %20, Spark as it is.
    paths = pa.table(table.open().get_add_actions(flatten=True)).column("path").to_pylist()
    files = [_for_spark(table.tree.uri(f"{kind.name}/{each}")) for each in paths]
    reader = spark.read.schema(schema).option("basePath", _for_spark(table.uri))
    return reader.parquet(*files) if files else spark.createDataFrame([], schema)


def _for_spark(uri: str) -> str:
    return uri.replace("s3://", "s3a://", 1)

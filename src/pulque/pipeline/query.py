"""Questions to the archive that need no Spark: by id, key, subject, time, header.

The table's log says which files can hold an answer: by day, by the subject's bucket, by the range
of ids and times in each. In those, DuckDB reads only the row groups whose statistics and bloom
filters do not exclude it. Where DuckDB has no way to the files, Arrow reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pulque.errors import UsageError
from pulque.pipeline.columns import ALL_COLUMNS
from pulque.pipeline.lake.table import MESSAGES, QUARANTINE, Table, bucket_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["Question", "ask", "candidates", "quarantined", "scan"]

_SHOWN = (*ALL_COLUMNS, "broker", "segment")
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Question:
    """Which messages are wanted; all conditions must hold.

    Attributes:
        id: The message's.
        key: Its key.
        subject: A subject, or a prefix such as ``order.*``.
        begin: Stored at this instant or later.
        end: Stored before this instant.
        headers: Headers it must have, with their values.
        limit: At most so many, the oldest first.
    """

    id: str | None = None
    key: str | None = None
    subject: str | None = None
    begin: datetime | None = None
    end: datetime | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    limit: int = 100

    def __post_init__(self) -> None:
        if self.id is not None and not _is_id(self.id):
            raise UsageError(f"{self.id!r} is not a message id: 32 hexadecimal digits are")
        if self.limit < 1:
            raise UsageError(f"a limit of {self.limit}; at least 1 is needed")

    @property
    def prefix(self) -> str | None:
        """What subjects begin with, if a pattern is asked for."""
        if self.subject is None or not self.subject.endswith("*"):
            return None
        return self.subject[:-1]


def _is_id(text: str) -> bool:
    return len(text) == _ID_DIGITS and all(digit in "0123456789abcdef" for digit in text)


def ask(lake: str, question: Question) -> list[dict[str, Any]]:
    """Return the messages that a question is about, by the time they were stored.

    Raises:
        UsageError: There is no archive.
    """
    table = Table(lake, MESSAGES)
    files = candidates(table.open(), question)
    if not files:
        return []
    if table.tree.local() is not None:
        rows = _ask_duckdb([table.tree.uri(f"{MESSAGES.name}/{path}") for path in files], question)
    else:
        rows = _ask_arrow(table, files, question)
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def quarantined(lake: str, question: Question) -> int:
    """Return how many messages cannot be decoded, of the subjects and the time asked about."""
    import pyarrow.dataset as ds

    table = Table(lake, QUARANTINE)
    if not table.exists():
        return 0
    paths = pa.table(table.open().get_add_actions(flatten=True)).column("path").to_pylist()
    rows = ds.dataset(
        [table.tree.inner(f"{QUARANTINE.name}/{path}") for path in paths],
        schema=QUARANTINE.file_schema,
        format="parquet",
        filesystem=table.tree.file_system,
    )
    wanted = _in_arrow(replace(question, id=None, key=None))
    counts = rows.to_table(columns=["count"], filter=wanted).column("count")
    return int(pc.sum(counts).as_py() or 0)


def candidates(table: "DeltaTable", question: Question) -> list[str]:
    """Return the files that can hold an answer, by what the table's log says of them."""
    files = pa.table(table.get_add_actions(flatten=True))
    for condition in _conditions_on_files(question, set(files.column_names)):
        files = files.filter(condition)
    paths: list[str] = files.column("path").to_pylist()
    return sorted(paths)


def _conditions_on_files(question: Question, known: set[str]) -> Iterator[pc.Expression]:
    def unless_unknown(name: str, condition: pc.Expression) -> pc.Expression:
        return condition | pc.field(name).is_null()

    if question.id is not None and {"min.message_id", "max.message_id"} <= known:
        yield unless_unknown("min.message_id", pc.field("min.message_id") <= question.id)
        yield unless_unknown("max.message_id", pc.field("max.message_id") >= question.id)
    if question.subject is not None and question.prefix is None:
        yield pc.field("partition.bucket") == bucket_of(question.subject)
    if question.begin is not None:
        yield pc.field("partition.day") >= question.begin.astimezone(UTC).date()
    if question.end is not None:
        last = question.end.astimezone(UTC) - timedelta(microseconds=1)
        yield pc.field("partition.day") <= last.date()


# ── DuckDB ─────────────────────────────────────────────────────────────────────────────────


def _ask_duckdb(files: Sequence[str], question: Question) -> pa.Table:
    import duckdb

    conditions: list[str] = []
    values: list[Any] = [list(files)]
    for text, *given in _in_sql(question):
        conditions.append(text)
        values += given
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    query = (
        f"SELECT {', '.join(_SHOWN)} FROM read_parquet(?, hive_partitioning = false) {where} "  # noqa: S608  # names are ours, values are bound
        "ORDER BY stored_at, partition, sequence LIMIT ?"
    )
    with duckdb.connect() as connection:
        asked = connection.sql(query, params=[*values, question.limit])
        found: pa.Table = asked.to_arrow_table()
    # Instants come in the zone of this machine.
    return found.cast(pa.schema([MESSAGES.schema.field(name) for name in _SHOWN]))


def _in_sql(question: Question) -> Iterator[tuple[Any, ...]]:
    if question.id is not None:
        yield "message_id = ?", question.id
    if question.key is not None:
        yield "key = ?", question.key
    if question.prefix is not None:
        yield "starts_with(subject, ?)", question.prefix
    elif question.subject is not None:
        yield "subject = ?", question.subject
    if question.begin is not None:
        yield "stored_at >= ?", question.begin
    if question.end is not None:
        yield "stored_at < ?", question.end
    for name, value in question.headers.items():
        yield "headers[?] = ?", name, value


# ── Arrow ──────────────────────────────────────────────────────────────────────────────────


def scan(table: Table, files: Sequence[str], question: Question) -> Iterator[pa.Table]:
    """Yield the messages that a question is about, some at a time, file by file; no limit."""
    import pyarrow.dataset as ds

    everything = ds.dataset(
        [table.tree.inner(f"{MESSAGES.name}/{path}") for path in files],
        schema=MESSAGES.file_schema,
        format="parquet",
        filesystem=table.tree.file_system,
    )
    for batch in everything.to_batches(columns=list(_SHOWN), filter=_in_arrow(question)):
        rows = _with_headers(pa.table(batch), question.headers)
        if rows.num_rows:
            yield rows


def _ask_arrow(table: Table, files: Sequence[str], question: Question) -> pa.Table:
    found = list(scan(table, files, question))
    schema = pa.schema([MESSAGES.file_schema.field(name) for name in _SHOWN])
    rows = pa.concat_tables(found) if found else schema.empty_table()
    order = [(name, "ascending") for name in ("stored_at", "partition", "sequence")]
    return rows.sort_by(order).slice(0, question.limit)


def _in_arrow(question: Question) -> pc.Expression | None:
    conditions = []
    if question.id is not None:
        conditions.append(pc.field("message_id") == question.id)
    if question.key is not None:
        conditions.append(pc.field("key") == question.key)
    if question.prefix is not None:
        conditions.append(pc.starts_with(pc.field("subject"), question.prefix))
    elif question.subject is not None:
        conditions.append(pc.field("subject") == question.subject)
    if question.begin is not None:
        conditions.append(pc.field("stored_at") >= question.begin)
    if question.end is not None:
        conditions.append(pc.field("stored_at") < question.end)
    whole: pc.Expression | None = None
    for each in conditions:
        whole = each if whole is None else whole & each
    return whole


def _with_headers(rows: pa.Table, headers: Mapping[str, str]) -> pa.Table:
    for name, value in headers.items():
        found = pc.map_lookup(rows.column("headers"), name, "first")
        rows = rows.filter(pc.fill_null(pc.equal(found, value), False))
    return rows

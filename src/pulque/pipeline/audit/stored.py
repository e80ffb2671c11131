"""Audit, first half: what was sent is stored, each message once.

Three accounts are compared. The log's own, from the copies of its segments: which batches there
are, of whom, with which sequences, and what is in them (``pulque.pipeline.audit.content``). The
table's: which sequences and ids it has, and what is in its rows. And, if given, the senders':
receipts. Sequences are compared as bits, 64 to a number, so that a comparison of all messages
moves about a byte for each, and is exact.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pulque.errors import UsageError
from pulque.pipeline.audit.content import ContentSide, mark
from pulque.pipeline.audit.tasks import BATCHES, HOUR_US, read_log
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.lake.table import MESSAGES, QUARANTINE, Table, frame
from pulque.pipeline.reading.segment_map import find_segments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["MOST_BREAKS", "Scope", "StoredSide"]

MOST_BREAKS = 1000
"""So many of each kind are named; all are counted."""
_WORDS = f"""
    SELECT broker, partition, subject, segment, hour, sequence >> 6 AS word,
           bit_or(shiftleft(1L, CAST(sequence & 63 AS INT))) AS bits, bit_xor({mark()}) AS mark,
           count(*) AS rows, min(sequence) AS first, max(sequence) AS last
    FROM {{messages}}
    GROUP BY broker, partition, subject, segment, hour, sequence >> 6
"""
_EXPECTED = """
    SELECT broker, partition, word, bit_or(
        shiftrightunsigned(-1L, 64 - CAST(least(end - word * 64, 64) AS INT))
        & ~if(first <= word * 64, 0L,
              shiftrightunsigned(-1L, 64 - CAST(first - word * 64 AS INT)))) AS bits
    FROM (SELECT *, explode(sequence(first >> 6, (end - 1) >> 6)) AS word FROM {ranges})
    GROUP BY broker, partition, word
"""
_READABLE = """
    SELECT e.broker, e.partition, e.word, e.bits & ~coalesce(u.bits, 0L) AS bits
    FROM {expected} e LEFT JOIN {unreadable} u
    ON e.broker = u.broker AND e.partition = u.partition AND e.word = u.word
"""
"""What the table of messages must have: all but the batches that are quarantined."""
_COMPARED = """
    SELECT coalesce(e.broker, f.broker) AS broker, coalesce(e.partition, f.partition) AS partition,
           coalesce(e.word, f.word) AS word,
           coalesce(e.bits, 0L) & ~coalesce(f.bits, 0L) AS missing,
           coalesce(f.bits, 0L) & ~coalesce(e.bits, 0L) AS foreign,
           coalesce(f.rows - f.distinct_rows, 0L) AS doubled
    FROM {expected} e FULL OUTER JOIN (
        SELECT broker, partition, word, bit_or(bits) AS bits, sum(rows) AS rows,
               CAST(bit_count(bit_or(bits)) AS LONG) AS distinct_rows
        FROM {words} GROUP BY broker, partition, word) f
    ON e.broker = f.broker AND e.partition = f.partition AND e.word = f.word
"""
_OF_EXPIRY = re.compile(r"day < '(\d{4}-\d\d-\d\d)'")
"""What ``upkeep.expire`` deletes, as the table's log has it."""
_HOURS_PER_DAY = 24
_BITS = """
    SELECT broker, partition, '{flaw}' AS flaw, word * 64 + bit AS sequence
    FROM (SELECT *, explode(sequence(0, 63)) AS bit FROM {{compared}} WHERE {column} != 0)
    WHERE ({column} & shiftleft(1L, bit)) != 0
"""


def _since(day: object) -> str:
    """Return a condition on hours in SQL."""
    return f"hour >= unix_date(date'{day}') * {_HOURS_PER_DAY}"


@dataclass(frozen=True, slots=True)
class Scope:
    """What an audit is about; None for everything.

    Attributes:
        subject: A subject, or a prefix such as ``order.*``.
        group: A group.
    """

    subject: str | None = None
    group: str | None = None

    def condition(self, column: str = "subject") -> str:
        """Return it as a condition on subjects in SQL."""
        if self.subject is None:
            return "true"
        text = self.subject.replace("\\", "\\\\").replace("'", "\\'")
        if text.endswith("*"):
            return f"startswith({column}, '{text[:-1]}')"
        return f"{column} = '{text}'"

    def covers(self, subject: str) -> bool:
        """Return whether a subject is part of it."""
        if self.subject is None:
            return True
        if self.subject.endswith("*"):
            return subject.startswith(self.subject[:-1])
        return subject == self.subject


class StoredSide:
    """What the log, the table and senders say of what is stored.

    Args:
        spark: The session.
        lake: Where it is.
        scope: Which subjects.

    Raises:
        UsageError: There is no archive.
    """

    def __init__(self, spark: "SparkSession", lake: str, scope: Scope) -> None:
        self._spark = spark
        self._lake = lake
        self._scope = scope
        self._table = Table(lake, MESSAGES)
        self.messages = (
            frame(spark, lake, MESSAGES)
            .where(scope.condition())
            .selectExpr("*", f"unix_micros(stored_at) DIV {HOUR_US} AS hour")
        )

    @cached_property
    def words(self) -> "DataFrame":
        """The sequences of the table, 64 to a row."""
        return self._spark.sql(_WORDS, messages=self.messages).localCheckpoint()

    @cached_property
    def quarantined(self) -> "DataFrame":
        """The batches that are in the lake, and that nobody can decode."""
        schema = "broker string, partition string, subject string, segment long, hour long"
        if not Table(self._lake, QUARANTINE).exists():
            return self._spark.createDataFrame([], f"{schema}, first long, end long")
        found = frame(self._spark, self._lake, QUARANTINE).where(self._scope.condition())
        return found.selectExpr(
            *("broker", "partition", "subject", "segment"),
            f"unix_micros(stored_at) DIV {HOUR_US} AS hour",
            *("first_sequence AS first", "first_sequence + count AS end"),
        ).localCheckpoint()

    @cached_property
    def places(self) -> "DataFrame":
        """Where messages are stored: the sequences of each partition, segment and hour.

        Those count that nobody can decode: groups are handed them as well.
        """
        return self._spark.sql(
            """SELECT broker, partition, subject, segment, hour, min(first) AS first,
                      max(last) + 1 AS end, sum(rows) AS rows
               FROM (SELECT broker, partition, subject, segment, hour, first, last, rows
                     FROM {words} UNION ALL
                     SELECT broker, partition, subject, segment, hour, first, end - 1, end - first
                     FROM {quarantined})
               GROUP BY broker, partition, subject, segment, hour""",
            words=self.words,
            quarantined=self.quarantined,
        ).localCheckpoint()

    @cached_property
    def segments(self) -> list[dict[str, Any]]:
        """The copies of segments in the lake."""
        tree = self._table.tree
        found: list[dict[str, Any]] = []
        for broker in tree.directories("raw") if "raw" in tree.directories() else []:
            where = f"{tree.where}/raw/{broker}"
            if not any(name.endswith(".log") for name in Tree(where).names()):
                continue
            found += [
                {
                    "where": where,
                    "path": each.path,
                    "base": each.base,
                    "broker": broker,
                    "size": tree.size(f"raw/{broker}/{each.path}") or 0,
                }
                for each in find_segments(where)
            ]
        return found

    @cached_property
    def _batches(self) -> "DataFrame":
        """The batches of the copies of segments, and which copies cannot be read."""
        from pyspark.sql.pandas.types import from_arrow_schema

        schema = "where string, path string, base long, broker string, size long"
        rows = self._spark.createDataFrame(self.segments, schema)
        spread = rows.repartition(max(len(self.segments), 1))
        batches = spread.mapInArrow(read_log, from_arrow_schema(BATCHES))
        subject = "regexp_extract(partition, '^(?:%[a-z]+%)?([^%#]+)', 1)"
        found = batches.selectExpr("*", f"{subject} AS subject")
        wanted = f"damage IS NOT NULL OR ({self._scope.condition()})"
        return found.where(wanted).localCheckpoint()

    @cached_property
    def log(self) -> "DataFrame":
        """The batches of the log, as the copies of its segments tell."""
        return self._batches.where("damage IS NULL").where(self._kept()).localCheckpoint()

    def _kept(self) -> str:
        """Return which batches must be in the table: not those of days that expired."""
        history = self._table.open().history()
        deletes = [each for each in history if each.get("operation") == "DELETE"]
        told = [str(each.get("operationParameters", {}).get("predicate")) for each in deletes]
        days = [found[1] for found in map(_OF_EXPIRY.match, told) if found]
        is_cut = min((each.get("version", 0) for each in history), default=0) > 0
        if not is_cut and len(days) == len(deletes):
            return _since(max(days)) if days else "true"
        # Nobody says what expired: of each broker all that is older than what it has left.
        everything = frame(self._spark, self._lake, MESSAGES)
        rows = everything.groupBy("broker").agg({"day": "min"}).collect()
        parts = [f"(broker = '{row[0]}' AND {_since(row[1])})" for row in rows]
        return " OR ".join(parts) or "false"

    # -- what is wrong -----------------------------------------------------------------------

    def damaged_copies(self) -> Iterator[dict[str, Any]]:
        """Yield the copies of segments that cannot be read."""
        for row in (
            self._batches.where("damage IS NOT NULL").orderBy("broker", "segment").collect()
        ):
            yield {"flaw": "copy_damaged", "broker": row.broker, "note": row.damage}

    def holes_between_segments(self) -> Iterator[dict[str, Any]]:
        """Yield where a copy of a segment is missing between two others."""
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            end = before["base"] + before["size"]
            if before["broker"] == after["broker"] and end != after["base"]:
                note = f"the log has no copy from {end} to {after['base']}"
                yield {"flaw": "segment_missing", "broker": before["broker"], "note": note}

    @cached_property
    def _compared(self) -> "DataFrame":
        known = ["broker", "partition", "first", "end"]
        log = self.log.select(known)
        # Where the table goes back further than the copies do, it must at least have no gaps.
        older = self._spark.sql(
            """SELECT p.broker, p.partition, p.first, least(p.end, coalesce(l.first, p.end)) AS end
               FROM (SELECT broker, partition, min(first) AS first, max(end) AS end
                     FROM {places} GROUP BY broker, partition) p
               LEFT JOIN (SELECT broker, partition, min(first) AS first FROM {log}
                          GROUP BY broker, partition) l
               ON p.broker = l.broker AND p.partition = l.partition
               WHERE p.first < coalesce(l.first, p.end)""",
            places=self.places,
            log=log,
        )
        # The same holds where a copy cannot be read.
        unread = self._spark.sql(
            """SELECT broker, partition, first, end FROM {places}
               LEFT SEMI JOIN (SELECT broker, segment FROM {batches} WHERE damage IS NOT NULL)
               USING (broker, segment)""",
            places=self.places,
            batches=self._batches,
        )
        ranges = log.unionByName(older).unionByName(unread)
        expected = self._spark.sql(
            _READABLE,
            expected=self._spark.sql(_EXPECTED, ranges=ranges),
            unreadable=self._spark.sql(_EXPECTED, ranges=self.quarantined.select(known)),
        )
        compared = self._spark.sql(_COMPARED, expected=expected, words=self.words)
        return compared.where("missing != 0 OR foreign != 0 OR doubled != 0").localCheckpoint()

    def sequences(self) -> "DataFrame":
        """Return messages that are missing, that the log does not have, that are there twice."""
        parts = [
            self._spark.sql(
                _BITS.format(flaw=flaw, column=column), compared=self._compared
            ).selectExpr("*", "CAST(NULL AS STRING) AS message_id", "1L AS count")
            for flaw, column in (("not_stored", "missing"), ("not_in_log", "foreign"))
        ]
        doubled = self._spark.sql(
            """SELECT m.broker, m.partition, 'stored_twice' AS flaw, m.sequence,
                      min(m.message_id) AS message_id, 1L AS count
               FROM {messages} m LEFT SEMI JOIN (SELECT * FROM {compared} WHERE doubled != 0) c
               ON m.broker = c.broker AND m.partition = c.partition AND m.sequence >> 6 = c.word
               GROUP BY m.broker, m.partition, m.sequence HAVING count(*) > 1""",
            messages=self.messages,
            compared=self._compared,
        )
        return parts[0].unionByName(parts[1]).unionByName(doubled)

    def rewritten(self) -> "DataFrame | None":
        """Return messages whose rows are not what the log has, or cannot be compared, if any."""
        content = ContentSide(
            self._spark, self._scope, self.segments, messages=self.messages, words=self.words
        )
        return content.different()

    def uncompared(self) -> int:
        """Return how many rows the table has of which no copy of the log is there."""
        row = self._spark.sql(
            """SELECT coalesce(sum(rows), 0) FROM {places} p
               LEFT ANTI JOIN (SELECT DISTINCT broker, segment FROM {log}) l
               ON p.broker = l.broker AND p.segment = l.segment""",
            places=self.places,
            log=self.log,
        ).first()
        return 0 if row is None else int(row[0])

    def doubled_ids(self) -> "DataFrame":
        """Return messages that were stored twice under one id."""
        fresh = self.messages.where("NOT startswith(partition, '%')")
        return self._spark.sql(
            """SELECT m.broker, m.partition, 'id_twice' AS flaw, m.sequence, m.message_id,
                      1L AS count
               FROM {fresh} m JOIN (
                   SELECT message_id FROM {fresh} WHERE xxhash64(message_id) IN (
                       SELECT h FROM (SELECT xxhash64(message_id) AS h, count(*) AS n FROM {fresh}
                                      GROUP BY xxhash64(message_id)) WHERE n > 1)
                   GROUP BY message_id
                   HAVING count(DISTINCT broker, partition, sequence) > 1) d
               ON m.message_id = d.message_id""",
            fresh=fresh,
        )

    def doubled_batches(self) -> "DataFrame":
        """Return batches that a producer sent once and that are stored twice."""
        return self._spark.sql(
            """SELECT broker, partition, 'batch_twice' AS flaw, max(first) AS sequence,
                      CAST(NULL AS STRING) AS message_id,
                      max_by(end, first) - max(first) AS count
               FROM {log} WHERE producer != 0
               GROUP BY broker, partition, producer, incarnation, number HAVING count(*) > 1""",
            log=self.log,
        )

    def gaps_of_producers(self) -> tuple[int, int]:
        """Return how many batches are not in the log that producers numbered, and of how many.

        A delay server that was killed goes on at the next multiple of 2^32: that is no gap.
        """
        row = self._spark.sql(
            """SELECT coalesce(sum(missing), 0), count(DISTINCT producer, incarnation) FROM (
                   SELECT producer, incarnation,
                          max(number) - min(number) + 1 - count(DISTINCT number) AS missing
                   FROM {log} WHERE producer != 0
                   GROUP BY broker, partition, producer, incarnation, shiftright(number, 32))
               WHERE missing > 0""",
            log=self.log,
        ).first()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def unstored_receipts(self, path: str) -> "DataFrame":
        """Return what senders have receipts of that is not stored.

        What lies behind all that is archived of its partition is not archived yet, and left out.

        Raises:
            UsageError: There is no such file, or it has no receipts.
        """
        if not Tree(path.rpartition("/")[0] or ".").names().count(path.rpartition("/")[2]):
            raise UsageError(f"--receipts {path}: there is no such file")
        schema = "id string, partition string, sequence long"
        given = self._spark.read.schema(schema).json(path).where("id IS NOT NULL")
        if given.isEmpty():
            raise UsageError(f"--receipts {path}: no line of it is JSON with an id")
        subject = "regexp_extract(partition, '^([^%#]+)', 1)"
        wanted = given.where(f"partition IS NULL OR {self._scope.condition(subject)}")
        return self._spark.sql(
            """SELECT '' AS broker, coalesce(r.partition, '') AS partition,
                      'receipt_unstored' AS flaw, coalesce(r.sequence, -1L) AS sequence,
                      r.id AS message_id, 1L AS count
               FROM {receipts} r
               LEFT ANTI JOIN {messages} m ON r.id = m.message_id
               LEFT ANTI JOIN {quarantined} q
               ON r.partition = q.partition AND r.sequence >= q.first AND r.sequence < q.end
               LEFT ANTI JOIN (SELECT partition, max(end) AS end FROM {places}
                               GROUP BY partition) p
               ON r.partition = p.partition AND r.sequence >= p.end
               WHERE r.partition IS NULL OR r.partition IN (SELECT partition FROM {places})""",
            receipts=wanted,
            messages=self.messages,
            quarantined=self.quarantined,
            places=self.places,
        )

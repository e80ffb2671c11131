"""The report: how much, how fast, what failed, who is slow; from the tables of a lake, by Spark.

Everything large stays in Spark; what comes back are the first rows of each list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pulque.pipeline.audit.stored import Scope
from pulque.pipeline.lake.consumer_facts import CONSUMPTION
from pulque.pipeline.lake.table import MESSAGES, Table, frame
from pulque.pipeline.report.deliveries import ends_of, pieces_of
from pulque.pipeline.report.figures import (
    ConsumerFigures,
    Day,
    Failures,
    Hour,
    KeyFigures,
    Latency,
    Redeliveries,
    Report,
    SubjectFigures,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["MOST_DAYS", "MOST_HOURS", "TOP", "report"]

TOP = 20
"""So many subjects, groups, consumers, reasons and keys are named."""
MOST_HOURS = 336
MOST_DAYS = 366
_NAMED_SUBJECTS = 5
"""So many subjects have hours of their own; the others are added up."""
_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S

_HOURS = f"""
    SELECT subject, unix_seconds(stored_at) DIV {_HOUR_S} AS hour, count(*) AS messages,
           coalesce(sum(octet_length(body)), 0L) AS size
    FROM {{messages}} WHERE NOT startswith(partition, '%') GROUP BY 1, 2
"""
_SUBJECTS = f"""
    SELECT subject, sum(messages) AS messages, sum(size) AS size, count(*) AS hours,
           max_by(hour, messages) AS busiest, max(messages) AS busiest_messages
    FROM {{hours}} GROUP BY subject ORDER BY messages DESC, subject LIMIT {TOP}
"""
_BY_HOUR = f"""
    SELECT named.subject, hours.hour, sum(hours.messages) AS messages, sum(hours.size) AS size
    FROM {{hours}} hours LEFT JOIN (
        SELECT subject FROM {{hours}} GROUP BY subject
        ORDER BY sum(messages) DESC, subject LIMIT {_NAMED_SUBJECTS}) named
    ON hours.subject = named.subject
    WHERE hours.hour > (SELECT max(hour) FROM {{hours}}) - {MOST_HOURS}
    GROUP BY 1, 2 ORDER BY hour, subject NULLS LAST
"""
_BY_DAY = f"""
    SELECT hour DIV 24 AS day, sum(messages) AS messages, sum(size) AS size
    FROM {{hours}} GROUP BY 1 ORDER BY day DESC LIMIT {MOST_DAYS}
"""
_ROUNDED = """
    SELECT *, round(ms / step) * step AS rounded
    FROM (SELECT *, pow(10, greatest(floor(log10(ms)) - 2, 0)) AS step
          FROM (SELECT * EXCEPT (ms), greatest(ms, 0L) AS ms FROM {measured}))
"""
"""To three digits, so that the different values are few, however many messages there are."""
_PERCENTILES = f"""
    SELECT {{by}}, sum(messages) AS messages, max(longest) AS longest,
           percentile(rounded, array(0.5D, 0.9D, 0.99D), messages) AS at
    FROM (SELECT {{by}}, rounded, sum(messages) AS messages, max(ms) AS longest
          FROM ({_ROUNDED}) GROUP BY {{by}}, rounded)
    GROUP BY {{by}}
"""
_CONSUMERS = f"""
    SELECT group, consumer, coalesce(h.messages, 0L) AS settled, h.at, h.longest,
           coalesce(u.messages, 0L) AS unsettled
    FROM {{handling}} h FULL OUTER JOIN (
        SELECT group, consumer, sum(messages) AS messages FROM {{unsettled}}
        GROUP BY group, consumer) u USING (group, consumer)
    ORDER BY h.at[2] DESC NULLS LAST, unsettled DESC, group, consumer LIMIT {TOP}
"""
_FAILURES = f"""
    SELECT subject, group, kind AS what, left(coalesce(reason, ''), 200) AS reason,
           sum(if(kind = 'nacked', count, 1L)) AS times
    FROM {{facts}} WHERE kind IN ('nacked', 'lost') AND group IS NOT NULL
    GROUP BY 1, 2, 3, 4 ORDER BY times DESC, subject, group, what, reason LIMIT {TOP}
"""
_REDELIVERIES = f"""
    SELECT subject, group, count_if(kind = 'retry') AS redelivered, count_if(kind = 'dead') AS dead
    FROM (SELECT subject, regexp_extract(partition, '^%([a-z]+)%', 1) AS kind,
                 regexp_extract(partition, '^%[a-z]+%[^%]+%(.*)$', 1) AS group
          FROM {{messages}} WHERE startswith(partition, '%'))
    WHERE kind IN ('retry', 'dead') AND {{of_group}}
    GROUP BY subject, group ORDER BY redelivered + dead DESC, subject, group LIMIT {TOP}
"""
_KEYS = f"""
    SELECT k.subject, k.key, k.messages, k.messages / t.messages AS share
    FROM (SELECT subject, key, count(*) AS messages FROM {{messages}}
          WHERE key IS NOT NULL AND NOT startswith(partition, '%')
          GROUP BY subject, key HAVING count(*) > 1
          ORDER BY messages DESC, subject, key LIMIT {TOP}) k
    JOIN (SELECT subject, sum(messages) AS messages FROM {{hours}} GROUP BY subject) t
    ON k.subject = t.subject
    ORDER BY k.messages DESC, k.subject, k.key
"""


def report(
    spark: "SparkSession",
    lake: str,
    scope: Scope | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Report:
    """Compute a report.

    Args:
        spark: The session.
        lake: A path or a URL.
        scope: Which subjects, and which group.
        since: Leave out what was stored, settled or failed before this instant.
        until: Leave out what was stored, settled or failed at this instant or later.

    Raises:
        UsageError: There is no archive.
    """
    return _Reporter(spark, lake, scope or Scope(), _Period(since, until)).report()


@dataclass(frozen=True, slots=True)
class _Period:
    since: datetime | None
    until: datetime | None

    def condition(self, millis: str) -> str:
        """Return it as a condition on an instant in milliseconds."""
        since = f"{millis} >= {_millis(self.since)}" if self.since else "true"
        until = f"{millis} < {_millis(self.until)}" if self.until else "true"
        return f"{since} AND {until}"

    def days(self) -> str:
        """Return what may be told by the days that a table is partitioned by."""
        since = f"day >= DATE'{_day(self.since)}'" if self.since else "true"
        until = f"day <= DATE'{_day(self.until)}'" if self.until else "true"
        return f"{since} AND {until}"

    def __str__(self) -> str:
        since = f" from {_shown(self.since)}" if self.since else ""
        until = f" until {_shown(self.until)}" if self.until else ""
        return since + until


class _Reporter:
    def __init__(self, spark: "SparkSession", lake: str, scope: Scope, period: _Period) -> None:
        self._spark = spark
        self._lake = lake
        self._scope = scope
        self._period = period
        self._stored = frame(spark, lake, MESSAGES).where(scope.condition())
        self._messages = self._stored.where(period.days()).where(
            period.condition("unix_millis(stored_at)")
        )
        self._of_group = "true"
        if scope.group is not None:
            text = scope.group.replace("\\", "\\\\").replace("'", "\\'")
            self._of_group = f"group = '{text}'"
        self._has_facts = Table(lake, CONSUMPTION).exists()

    def report(self) -> Report:
        subjects = list(self._subjects())
        total = self._hours.selectExpr("sum(messages) AS messages", "sum(size) AS size").first()
        found: dict[str, Any] = {
            "messages": (total and total.messages) or 0,
            "size": (total and total.size) or 0,
            "subjects": subjects,
            "hours": list(self._by_hour()),
            "days": list(self._by_day()),
            "keys": list(self._keys()),
            "redeliveries": list(self._redeliveries()),
        }
        if self._has_facts:
            found |= self._of_facts()
        notes = list(self._notes(found))
        return Report(self._lake, self._about(), **found, notes=notes)

    def _of_facts(self) -> dict[str, Any]:
        settled = self._settled.selectExpr("sum(messages) AS messages").first()
        return {
            "settled": (settled and settled.messages) or 0,
            "handling": list(self._latencies(self._handled)),
            "end_to_end": list(self._latencies(self._ended)),
            "consumers": list(self._consumers()),
            "failures": list(self._failures()),
        }

    def _about(self) -> str:
        subject = f"subject {self._scope.subject}" if self._scope.subject else "all subjects"
        group = f"group {self._scope.group}" if self._scope.group else "all groups"
        return f"{subject}, {group}{self._period}"

    # -- what was stored ---------------------------------------------------------------------

    @cached_property
    def _hours(self) -> "DataFrame":
        return self._spark.sql(_HOURS, messages=self._messages).localCheckpoint()

    def _subjects(self) -> Iterator[SubjectFigures]:
        for row in self._spark.sql(_SUBJECTS, hours=self._hours).collect():
            sums = (row.messages, row.size, row.hours)
            yield SubjectFigures(
                row.subject, *sums, _instant(row.busiest * _HOUR_S), row.busiest_messages
            )

    def _by_hour(self) -> Iterator[Hour]:
        for row in self._spark.sql(_BY_HOUR, hours=self._hours).collect():
            yield Hour(row.subject, _instant(row.hour * _HOUR_S), row.messages, row.size)

    def _by_day(self) -> Iterator[Day]:
        for row in reversed(self._spark.sql(_BY_DAY, hours=self._hours).collect()):
            yield Day(_instant(row.day * _DAY_S).date(), row.messages, row.size)

    def _keys(self) -> Iterator[KeyFigures]:
        found = self._spark.sql(_KEYS, messages=self._messages, hours=self._hours)
        for row in found.collect():
            yield KeyFigures(row.subject, row.key, row.messages, row.share)

    def _redeliveries(self) -> Iterator[Redeliveries]:
        text = _REDELIVERIES.replace("{of_group}", self._of_group)
        for row in self._spark.sql(text, messages=self._messages).collect():
            yield Redeliveries(row.subject, row.group, row.redelivered, row.dead)

    # -- what consumers did ------------------------------------------------------------------

    @cached_property
    def _facts(self) -> "DataFrame":
        facts = frame(self._spark, self._lake, CONSUMPTION)
        return facts.where(self._scope.condition()).where(self._of_group)

    @cached_property
    def _pieces(self) -> "DataFrame":
        return pieces_of(self._spark, self._facts).localCheckpoint()

    @cached_property
    def _settled(self) -> "DataFrame":
        pieces = self._pieces.where("settled_at IS NOT NULL")
        return pieces.where(self._period.condition("settled_at"))

    @property
    def _handled(self) -> "DataFrame":
        handed = self._settled.where("is_handed")
        return handed.selectExpr("*", "settled_at - handed_at AS ms")

    @cached_property
    def _ended(self) -> "DataFrame":
        # What was settled in the period may have been stored long before it.
        ended = ends_of(self._spark, self._settled, self._stored)
        return ended.groupBy("subject", "group", "ms").sum("messages").selectExpr(
            "subject", "group", "ms", "`sum(messages)` AS messages"
        ).localCheckpoint()  # fmt: skip

    def _percentiles(self, measured: "DataFrame", by: str) -> "DataFrame":
        return self._spark.sql(_PERCENTILES.replace("{by}", by), measured=measured)

    def _latencies(self, measured: "DataFrame") -> Iterator[Latency]:
        found = self._percentiles(measured, "subject, group")
        largest = found.orderBy("messages", "subject", "group", ascending=[False, True, True])
        for row in largest.limit(TOP).collect():
            p50, p90, p99 = row.at
            who = (row.subject, row.group)
            yield Latency(*who, row.messages, p50, p90, p99, float(row.longest))

    def _consumers(self) -> Iterator[ConsumerFigures]:
        handed = self._pieces.where("is_handed AND settled_at IS NULL")
        rows = self._spark.sql(
            _CONSUMERS,
            handling=self._percentiles(self._handled, "group, consumer"),
            unsettled=handed.where(self._period.condition("handed_at")),
        ).collect()
        for row in rows:
            p50, _, p99 = row.at or (None, None, None)
            longest = None if row.longest is None else float(row.longest)
            sums = (row.settled, row.unsettled)
            yield ConsumerFigures(row.group, row.consumer, *sums, p50, p99, longest)

    def _failures(self) -> Iterator[Failures]:
        facts = self._facts.where(self._period.condition("unix_millis(at)"))
        for row in self._spark.sql(_FAILURES, facts=facts).collect():
            yield Failures(row.subject, row.group, row.what, row.reason, row.times)

    # -- what one should know ----------------------------------------------------------------

    def _notes(self, found: dict[str, Any]) -> Iterator[str]:
        if not self._has_facts:
            yield "there is no table consumption: what consumers did is not known"
            return
        if not found["settled"]:
            yield "nothing was settled yet, as far as facts are archived"
            return
        unpulled = self._settled.where("NOT is_handed").selectExpr("sum(messages)").first()
        if unpulled and unpulled[0]:
            yield (
                f"{unpulled[0]} settled deliveries are not measured: when they were handed out is "
                "not archived"
            )
        early = self._ended.where("ms < 0").selectExpr("sum(messages)").first()
        if early and early[0]:
            yield (
                f"{early[0]} messages were settled before they were created, by the clocks of "
                "their producers: they count as 0 ms"
            )


def _millis(at: datetime | None) -> int:
    return round(at.timestamp() * 1000) if at else 0


def _day(at: datetime | None) -> date:
    return (at or datetime.now(UTC)).astimezone(UTC).date()


def _shown(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if at else ""


def _instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

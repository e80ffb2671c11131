"""Audit, second half: what is stored is settled, dead or waiting, for each group.

The ledger tells what became of the messages of a partition for a group. What failed goes on in
the group's own partitions: each record there names the one that it follows, and where the message
was stored first. Here each failure gets its follower, and each message the state of its last one.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from pulque.pipeline.audit.stored import Scope, StoredSide
from pulque.pipeline.audit.tasks import FATES, fates_of
from pulque.pipeline.lake.consumer_facts import CONSUMPTION
from pulque.pipeline.lake.table import Table, frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["GroupsSide"]

_PATIENCE_US = 60_000_000
"""So long after a failure its follower may be missing, by the time of what was stored later."""
_KINDS = """('opened', 'passed', 'pulled', 'settled', 'nacked', 'lost', 'left', 'reset',
             'locked', 'unlocked', 'given_up')"""
_RANK = "CASE kind WHEN 'nacked' THEN 0 WHEN 'settled' THEN 1 ELSE 2 END"
_FACT = """broker, partition, group, 3 AS phase, offset, kind, unix_micros(at) AS at, consumer,
           first_pull, first_sequence, count, matched, start"""
_EMPTY = "CAST(NULL AS STRING) AS consumer"
_INPUT = f"""
    SELECT broker, partition, group, 0 AS phase, 0L AS offset, 'begin' AS kind, 0L AS at, {_EMPTY},
           0L AS first_pull, 0L AS first_sequence, 0L AS count, 0L AS matched,
           CAST(is_whole AS LONG) AS start
    FROM {{keys}} LEFT JOIN {{brokers}} USING (broker)
    UNION ALL
    SELECT broker, partition, group, 1, first, 'place', hour, {_EMPTY}, segment, first,
           end - first, 0L, 0L
    FROM {{keys}} JOIN {{places}} USING (broker, partition)
    UNION ALL
    SELECT broker, partition, group, 2, offset, 'turn', 0L, {_EMPTY}, 0L, first_sequence, 0L, 0L,
           0L
    FROM (SELECT *, lag(first_sequence + coalesce(count, 0)) OVER (
                        PARTITION BY broker, partition, group ORDER BY offset) AS position
          FROM {{facts}} WHERE kind IN ('opened', 'passed', 'pulled', 'reset'))
    WHERE kind = 'reset' OR (kind = 'pulled' AND first_sequence < position)
    UNION ALL
    SELECT {_FACT} FROM {{facts}} WHERE kind IN {_KINDS}
"""
_RECORDS = """
    SELECT broker, partition, sequence, message_id, unix_micros(stored_at) AS at,
           regexp_extract(partition, '^%([a-z]+)%', 1) AS kind,
           regexp_extract(partition, '^%[a-z]+%[^%]+%(.*)$', 1) AS group,
           regexp_extract(headers['pulque.origin'], '^(.*)/([0-9]+)$', 1) AS origin,
           origin_sequence,
           regexp_extract(headers['pulque.first'], '^(.*)/([0-9]+)$', 1) AS root,
           if(headers['pulque.unreadable'] IS NOT NULL, origin_sequence,
              try_cast(regexp_extract(headers['pulque.first'], '^(.*)/([0-9]+)$', 2) AS LONG))
               AS root_sequence
    FROM {messages} LATERAL VIEW OUTER explode(
        if(headers['pulque.unreadable'] IS NULL,
           array(try_cast(regexp_extract(headers['pulque.origin'], '^(.*)/([0-9]+)$', 2) AS LONG)),
           flatten(transform(split(headers['pulque.unreadable'], ','), run -> sequence(
               CAST(split(run, '-')[0] AS LONG), CAST(element_at(split(run, '-'), -1) AS LONG))))))
        AS origin_sequence
    WHERE startswith(partition, '%') AND headers['pulque.origin'] IS NOT NULL
"""
"""A letter that has a batch which nobody can decode follows each message that it stands for."""
_FOLLOWED = """
    SELECT broker, group, origin AS partition, origin_sequence AS sequence, count(*) AS followers,
           min(at) AS followed_at, min(message_id) AS message_id
    FROM {records} WHERE origin_sequence IS NOT NULL AND NOT startswith(origin, '@')
    GROUP BY broker, group, origin, origin_sequence
"""
"""What a broker took over from another one follows a record that is not of its own log."""
_FAILURES = """
    SELECT broker, group, partition, sequence, count(*) AS failures, max(at) AS failed_at,
           bool_or(is_filtered) AS is_filtered, bool_or(is_current) AS is_current,
           max(hour) AS hour
    FROM (SELECT *, explode(sequence(first, end - 1)) AS sequence FROM {fates}
          WHERE kind = 'span' AND state = 'failed')
    GROUP BY broker, group, partition, sequence
"""
_FOLLOWING = """
    SELECT coalesce(f.broker, n.broker) AS broker, coalesce(f.group, n.group) AS group,
           coalesce(f.partition, n.partition) AS partition,
           coalesce(f.sequence, n.sequence) AS sequence, n.message_id,
           coalesce(f.failures, 0L) AS failures, coalesce(n.followers, 0L) AS followers,
           f.failed_at, n.followed_at, f.is_filtered, f.is_current, f.hour
    FROM {failures} f FULL OUTER JOIN {followed} n
    ON f.broker = n.broker AND f.group = n.group AND f.partition = n.partition
       AND f.sequence = n.sequence
"""
_LEAVES = """
    SELECT r.broker, r.group, r.root, r.root_sequence,
           CASE WHEN r.kind = 'wait' THEN 'retry'
                WHEN r.kind = 'dead' THEN if(p.partition IS NULL, 'dead', 'purged')
                WHEN s.state = 'failed' THEN 'retry'
                ELSE coalesce(s.state, 'new') END AS state
    FROM {records} r
    LEFT ANTI JOIN {followed} n
    ON r.broker = n.broker AND r.group = n.group AND r.partition = n.partition
       AND r.sequence = n.sequence
    LEFT JOIN (SELECT *, explode(sequence(first, end - 1)) AS sequence FROM {fates}
               WHERE kind = 'span' AND is_current AND startswith(partition, '%')) s
    ON r.broker = s.broker AND r.partition = s.partition AND r.sequence = s.sequence
    LEFT JOIN {purged} p
    ON r.broker = p.broker AND r.partition = p.partition AND r.sequence >= p.first
       AND r.sequence < p.end
"""
_ORDER = """CASE state WHEN 'retry' THEN 0 WHEN 'held' THEN 1 WHEN 'new' THEN 2 WHEN 'dead' THEN 3
            WHEN 'unknown' THEN 4 WHEN 'settled' THEN 5 ELSE 6 END"""


class GroupsSide:
    """What became of messages, for each group.

    Args:
        spark: The session.
        lake: Where it is.
        scope: Which subjects and which group.
        stored: What is stored.
    """

    def __init__(self, spark: "SparkSession", lake: str, scope: Scope, stored: StoredSide) -> None:
        self._spark = spark
        self._stored = stored
        self.has_facts = Table(lake, CONSUMPTION).exists()
        if not self.has_facts:
            return
        self.everything = frame(spark, lake, CONSUMPTION)
        self.facts = self.everything.where(scope.condition())
        self._of_group = "true"
        if scope.group is not None:
            text = scope.group.replace("\\", "\\\\").replace("'", "\\'")
            self._of_group = f"group = '{text}'"
            self.facts = self.facts.where(f"{self._of_group} OR group IS NULL")

    @cached_property
    def brokers(self) -> "DataFrame":
        """Of each broker: how far its logs are archived, and whether all facts are there."""
        return self._spark.sql(
            """SELECT broker, f.is_whole, f.facts_from, f.facts_to, m.messages_to
               FROM (SELECT broker, min(segment) = 0 AS is_whole,
                            min(unix_micros(at)) AS facts_from,
                            max(unix_micros(at)) AS facts_to
                     FROM {facts} GROUP BY broker) f
               LEFT JOIN (SELECT broker, max(unix_micros(stored_at)) AS messages_to
                          FROM {messages} GROUP BY broker) m USING (broker)""",
            facts=self.everything,
            messages=self._stored.messages,
        ).localCheckpoint()

    @cached_property
    def _keys(self) -> "DataFrame":
        """All partitions that groups consume from, or have not come to yet."""
        return self._spark.sql(
            f"""WITH told AS (SELECT DISTINCT broker, partition, subject, group FROM {{facts}}
                              WHERE kind IN {_KINDS} AND partition IS NOT NULL)
                SELECT broker, partition, group FROM told
                UNION
                SELECT p.broker, p.partition, t.group
                FROM (SELECT DISTINCT broker, subject, group FROM told) t
                JOIN (SELECT DISTINCT broker, partition, subject FROM {{places}}) p
                ON p.broker = t.broker AND p.subject = t.subject
                WHERE NOT startswith(p.partition, '%')
                UNION
                SELECT broker, partition, group
                FROM (SELECT DISTINCT broker, partition,
                             regexp_extract(partition, '^%retry%[^%]+%(.*)$', 1) AS group
                      FROM {{places}} WHERE startswith(partition, '%retry%'))
                WHERE {self._of_group}""",
            facts=self.facts,
            places=self._stored.places,
        )

    @cached_property
    def fates(self) -> "DataFrame":
        """What became of messages, as the facts of each group and partition tell."""
        from pyspark.sql.pandas.types import from_arrow_schema

        rows = self._spark.sql(
            _INPUT,
            keys=self._keys,
            brokers=self.brokers,
            places=self._stored.places,
            facts=self.facts,
        )
        key = ("broker", "partition", "group")
        rows = rows.selectExpr("*", f"{_RANK} AS rank").repartition(*key)
        rows = rows.sortWithinPartitions(*key, "phase", "offset", "rank", "first_pull")
        return rows.mapInArrow(fates_of, from_arrow_schema(FATES)).localCheckpoint()

    @cached_property
    def _records(self) -> "DataFrame":
        found = self._spark.sql(_RECORDS, messages=self._stored.messages)
        return found.where(self._of_group).localCheckpoint()

    @cached_property
    def _followed(self) -> "DataFrame":
        return self._spark.sql(_FOLLOWED, records=self._records).localCheckpoint()

    @cached_property
    def _following(self) -> "DataFrame":
        """Each failure with its followers, and each record that follows something."""
        failures = self._spark.sql(_FAILURES, fates=self.fates)
        return self._spark.sql(
            _FOLLOWING, failures=failures, followed=self._followed
        ).localCheckpoint()

    @cached_property
    def _unfollowed(self) -> "DataFrame":
        """Failures that nothing follows, and why that may be."""
        return self._spark.sql(
            f"""SELECT f.*, m.message_id AS id,
                       CASE WHEN m.headers['pulque.once'] IS NOT NULL THEN 'dropped'
                            WHEN f.is_filtered THEN 'filtered'
                            WHEN b.messages_to - f.failed_at < {_PATIENCE_US} THEN 'retry'
                       END AS reason
                FROM (SELECT * FROM {{following}} WHERE followers < failures) f
                JOIN {{messages}} m
                ON f.broker = m.broker AND f.partition = m.partition AND f.sequence = m.sequence
                LEFT JOIN {{brokers}} b ON f.broker = b.broker""",
            following=self._following,
            messages=self._stored.messages,
            brokers=self.brokers,
        ).localCheckpoint()

    def states(self) -> "DataFrame":
        """Return how many messages of each subject, group and hour are in which state."""
        purged = self.everything.where("kind = 'purged'").selectExpr(
            "broker", "partition", "first_sequence AS first", "first_sequence + count AS end"
        )
        leaves = self._spark.sql(
            _LEAVES,
            records=self._records,
            followed=self._followed,
            fates=self.fates,
            purged=purged,
        )
        last = self._spark.sql(
            f"""SELECT broker, group, root, root_sequence, min_by(state, {_ORDER}) AS state
                FROM {{leaves}} GROUP BY broker, group, root, root_sequence""",
            leaves=leaves,
        )
        failed = self._spark.sql(
            """SELECT f.partition, f.group, f.hour,
                      coalesce(if(f.followers = 0, u.reason, l.state), 'unknown') AS state,
                      1L AS messages
               FROM {following} f
               LEFT JOIN {last} l
               ON f.broker = l.broker AND f.group = l.group AND f.partition = l.root
                  AND f.sequence = l.root_sequence
               LEFT JOIN {unfollowed} u
               ON f.broker = u.broker AND f.group = u.group AND f.partition = u.partition
                  AND f.sequence = u.sequence
               WHERE f.failures > 0 AND f.is_current AND NOT startswith(f.partition, '%')""",
            following=self._following,
            last=last,
            unfollowed=self._unfollowed,
        )
        counted = self.fates.where("kind = 'count'").selectExpr(
            "partition", "group", "hour", "state", "end AS messages"
        )
        return self._spark.sql(
            """SELECT regexp_extract(partition, '^([^%#]+)', 1) AS subject, group, hour, state,
                      sum(messages) AS messages
               FROM {all} GROUP BY 1, 2, 3, 4""",
            all=counted.unionByName(failed),
        )

    # -- what is wrong -----------------------------------------------------------------------

    def contradictions(self) -> "DataFrame":
        """Return where facts contradict each other."""
        return self.fates.where("kind = 'break'").selectExpr(
            "broker",
            "partition",
            "group",
            "state AS flaw",
            "first AS sequence",
            "end - first AS count",
            "CAST(NULL AS STRING) AS message_id",
            "consumer",
            "are_pulls",
        )

    def astray(self) -> "DataFrame":
        """Return failures that nothing follows, and followers of what did not fail."""
        missing = self._unfollowed.where("reason IS NULL").selectExpr(
            "broker", "partition", "group", "'retry_missing' AS flaw", "sequence", "1L AS count",
            "id AS message_id", "CAST(NULL AS STRING) AS consumer", "false AS are_pulls",
        )  # fmt: skip
        surplus = self._spark.sql(
            """SELECT f.broker, f.partition, f.group,
                      if(failures = 0 AND followers = 1, 'retried_unfailed', 'retried_twice')
                          AS flaw,
                      sequence, 1L AS count, message_id, CAST(NULL AS STRING) AS consumer,
                      false AS are_pulls
               FROM {following} f JOIN {brokers} b ON f.broker = b.broker
               WHERE followers > if(startswith(partition, '%wait%')
                                    OR startswith(partition, '%dead%'), 1L, failures)
                 AND followed_at <= facts_to AND (is_whole OR followed_at >= facts_from)""",
            following=self._following,
            brokers=self.brokers,
        )
        return missing.unionByName(surplus)

    def holes(self) -> "DataFrame":
        """Return segments of the log of facts that are missing, or have lost rows."""
        return self._spark.sql(
            """WITH counted AS (
                   SELECT broker, segment, count_if(kind != 'sealed') AS rows,
                          max(if(kind = 'sealed', count, NULL)) AS expected,
                          max(if(kind = 'sealed', offset, NULL)) AS end
                   FROM {facts} GROUP BY broker, segment),
               joined AS (
                   SELECT *, lag(end) OVER (PARTITION BY broker ORDER BY segment) AS before
                   FROM counted)
               SELECT broker, 'facts_missing' AS flaw,
                      CASE WHEN expected IS NULL THEN concat('segment ', segment,
                               ' of the action log has lost its last row')
                           WHEN rows != expected THEN concat('segment ', segment,
                               ' of the action log has ', rows, ' rows of ', expected)
                           ELSE concat('the action log is missing from ', before, ' to ', segment)
                      END AS note
               FROM joined
               WHERE expected IS NULL OR rows != expected
                     OR (before IS NOT NULL AND before != segment)""",
            facts=self.everything,
        )

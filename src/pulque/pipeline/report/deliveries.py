"""Deliveries with their ends, for a report: which messages, when handed out, when settled.

A pull tells of a range of deliveries of one consumer, and so does a settle; the two need not be
the same. Where either begins or ends is a border, and between two borders all deliveries have the
same pull and the same settle: a *piece*. Pieces come from sorting the borders, so that the cost is
that of the facts, however many messages they tell of.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ends_of", "pieces_of"]

_KEY = "broker, partition, subject, group, consumer"
_FACTS = f"""
    SELECT {_KEY}, kind, offset, unix_millis(at) AS at, first_pull, first_pull + count AS end_pull,
           first_sequence, matched,
           last_value(if(kind = 'pulled', first_pull + count, NULL)) IGNORE NULLS OVER (
               PARTITION BY {_KEY} ORDER BY offset, kind
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS pulled_to
    FROM {{facts}}
    WHERE kind IN ('pulled', 'settled', 'nacked') AND consumer IS NOT NULL AND count > 0
"""
_TURNS = f"""
    SELECT *, count_if(kind = 'pulled' AND first_pull < pulled_to) OVER (
        PARTITION BY {_KEY} ORDER BY offset, kind
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS turn
    FROM {{facts}}
"""
"""A reset or a recovery counts deliveries anew: what has one number twice is told apart."""
_BORDERS = f"""
    SELECT {_KEY}, turn, border, max(handed) AS handed, max(settled) AS settled,
           max(nacked_to) AS nacked_to
    FROM (
        SELECT {_KEY}, turn, first_pull AS border,
               if(kind = 'pulled', struct(end_pull AS end, at,
                   first_sequence - first_pull AS shift,
                   coalesce(matched, 1L) AS matched), NULL) AS handed,
               if(kind = 'settled', struct(end_pull AS end, at), NULL) AS settled,
               if(kind = 'nacked', end_pull, NULL) AS nacked_to
        FROM {{facts}}
        UNION ALL
        SELECT {_KEY}, turn, end_pull, NULL, NULL, NULL FROM {{facts}})
    GROUP BY {_KEY}, turn, border
"""
_PIECES = f"""
    SELECT broker, partition, subject, group, consumer, next - border AS messages,
           border + handed.shift AS first, next + handed.shift AS end,
           handed.at AS handed_at, if(settled.end > border, settled.at, NULL) AS settled_at,
           coalesce(nacked_to > border, false) AS is_nacked,
           coalesce(handed.end > border, false) AS is_handed, handed.matched
    FROM (
        SELECT {_KEY}, border,
               lead(border) OVER (PARTITION BY {_KEY}, turn ORDER BY border) AS next,
               last_value(handed) IGNORE NULLS OVER so_far AS handed,
               last_value(settled) IGNORE NULLS OVER so_far AS settled,
               last_value(nacked_to) IGNORE NULLS OVER so_far AS nacked_to
        FROM {{borders}}
        WINDOW so_far AS (PARTITION BY {_KEY}, turn ORDER BY border
                          ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW))
    WHERE next IS NOT NULL
      AND (coalesce(handed.end > border, false) OR coalesce(settled.end > border, false))
"""
_ENDS = """
    SELECT p.subject, p.group, p.settled_at - unix_millis(m.created_at) AS ms, 1L AS messages
    FROM (SELECT *, explode(sequence(first >> 6, (end - 1) >> 6)) AS word FROM {pieces}
          WHERE is_handed AND NOT is_nacked) p
    JOIN (SELECT broker, partition, sequence, sequence >> 6 AS word, created_at FROM {messages}) m
    ON p.broker = m.broker AND p.partition = m.partition AND p.word = m.word
       AND m.sequence >= p.first AND m.sequence < p.end
"""
"""Ranges meet messages 64 at a time: an equal join, and never a range against all messages."""


def pieces_of(spark: "SparkSession", facts: "DataFrame") -> "DataFrame":
    """Return ranges of deliveries that were handed out together and, if so, settled together.

    Columns: ``first``, ``end`` (sequences), ``messages``, ``handed_at``, ``settled_at`` (null if
    not settled), ``is_nacked``, ``is_handed`` (false if no pull tells of them). What a filter
    passed over as a whole is left out.
    """
    turns = spark.sql(_TURNS, facts=spark.sql(_FACTS, facts=facts))
    borders = spark.sql(_BORDERS, facts=turns)
    pieces = spark.sql(_PIECES, borders=borders)
    return pieces.where("NOT is_handed OR matched > 0").drop("matched")


def ends_of(spark: "SparkSession", pieces: "DataFrame", messages: "DataFrame") -> "DataFrame":
    """Return for each message that was acked how long it took since it was created."""
    return spark.sql(_ENDS, pieces=pieces, messages=messages)

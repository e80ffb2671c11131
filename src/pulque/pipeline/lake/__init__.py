"""The tables of a lake: Delta log, Parquet files, replay, compaction, expiry."""

from pulque.pipeline.lake.table import view

__all__ = ["view"]

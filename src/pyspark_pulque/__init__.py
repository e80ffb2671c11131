"""Lets Spark find the data source by its name alone: ``spark.read.format("pulque")``.

Spark imports every module whose name begins with ``pyspark_`` and looks for ``DefaultSource``.
"""

from pulque.pipeline.data_source.source import PulqueDataSource as DefaultSource

__all__ = ["DefaultSource"]

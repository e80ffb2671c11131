"""A Spark session with settings that work: loopback only, this Python, UTC, no web page."""

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

__all__ = ["spark_session"]

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Instants are written as every other reader expects them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_LOOPBACK = "127.0.0.1"


def spark_session(
    runs_on: str = "local[*]",
    *,
    name: str = "pulque",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session; the one that runs already, if there is one.

    Args:
        runs_on: Spark's master: ``local[*]``, ``spark://host:port``, ``yarn``, ``k8s://…``.
        name: What it is called.
        settings: Anything else of Spark's, which wins over ours.
    """
    # Workers take the Python on the path otherwise, which knows nothing of this one's packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = dict(_SETTINGS)
    if runs_on.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        chosen |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    builder = SparkSession.builder.master(runs_on).appName(name)
    for key, value in {**chosen, **(settings or {})}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session

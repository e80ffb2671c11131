"""A Spark session with settings that work: loopback only, this Python, UTC, no web page."""

import os
import sys
import warnings
from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

__all__ = ["spark_session"]

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Instants are written as every other reader expects them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_ADDRESSES = (
    "spark.driver.host",
    "spark.driver.bindAddress",
    "spark.connect.grpc.binding.address",
)
_LOOPBACK = "127.0.0.1"


_REMOTE = "sc://"


def spark_session(
    runs_on: str = "local[*]",
    *,
    name: str = "pulque",
    settings: Mapping[str, str] | None = None,
    log_level: str = "ERROR",
) -> SparkSession:
    """Return a session; the one that runs already, if there is one.

    Args:
        runs_on: Spark's master: ``local[*]``, ``spark://host:port``, ``yarn``, ``k8s://…``; or a
            server of Spark Connect, ``sc://host:port``. ``$SPARK_REMOTE`` wins over a master.
        name: What it is called.
        settings: Anything else of Spark's, which wins over ours.
        log_level: From which level on Spark logs; a server of Spark Connect has its own.
    """
    if is_remote() and (running := SparkSession.getActiveSession()) is not None:
        return running
    remote = runs_on if runs_on.startswith(_REMOTE) else os.environ.get("SPARK_REMOTE")
    # Workers take the Python on the path otherwise, which knows nothing of this one's packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = dict(_SETTINGS)
    if (remote or runs_on).startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        chosen |= dict.fromkeys(_ADDRESSES, _LOOPBACK)
    builder = (
        SparkSession.builder.remote(remote) if remote else SparkSession.builder.master(runs_on)
    )
    for key, value in {**chosen, **(settings or {})}.items():
        builder = builder.config(key, value)
    with warnings.catch_warnings():
        # Of settings that only a server that is being started takes; a session tries them again.
        warnings.filterwarnings("ignore", message="Failed to set")
        session: SparkSession = builder.appName(name).getOrCreate()
    if not is_remote():  # else there is no context here
        session.sparkContext.setLogLevel(log_level)
    return session

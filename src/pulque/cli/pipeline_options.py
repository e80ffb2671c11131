"""What the commands of ``pulque pipeline`` share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "BeginOption",
    "EndOption",
    "HeaderOption",
    "IdOption",
    "KeyOption",
    "LakeOption",
    "SinceOption",
    "SparkOption",
    "SubjectOption",
    "UntilOption",
    "parse_header",
    "parse_instant",
    "pipeline_extra",
    "start_spark",
]

_EXTRA = {"deltalake", "duckdb", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}

LakeOption = Annotated[
    str,
    typer.Option(
        "--lake",
        envvar="PULQUE_LAKE",
        metavar="URL",
        help="Where the archive is: a directory, or s3://…",
        show_default=False,
    ),
]
SparkOption = Annotated[
    str,
    typer.Option("--master", metavar="URL", help="Where Spark runs: local[*], spark://…, yarn."),
]
IdOption = Annotated[
    str | None, typer.Option("--id", metavar="ID", help="Of this id: 32 hexadecimal digits.")
]
KeyOption = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Of this key.")]
SubjectOption = Annotated[
    str | None,
    typer.Option("--subject", metavar="S", help="Of this subject; order.* is a prefix."),
]
BeginOption = Annotated[
    str | None, typer.Option("--from", metavar="T", help="Stored at this instant or later.")
]
EndOption = Annotated[
    str | None, typer.Option("--to", metavar="T", help="Stored before this instant.")
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="K=V", help="With this header. May be repeated."),
]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="T", help="Only hours from this instant on.")
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="T", help="Only hours before this instant.")
]


@contextmanager
def pipeline_extra() -> Iterator[None]:
    """Say what to install if it is not there.

    Raises:
        ConfigError: Something is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ConfigError(
            f"this command needs {error.name}: pip install 'pulque[pipeline]'"
        ) from None


def start_spark(runs_on: str) -> "SparkSession":
    """Start Spark, or join the session that runs.

    Raises:
        ConfigError: It does not start.
    """
    from pyspark.errors import PySparkException

    from pulque.pipeline.session import spark_session

    # Spark's own 200 partitions of each shuffle are meant for clusters.
    partitions = {"spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2))}
    try:
        return spark_session(runs_on, settings=partitions if runs_on.startswith("local") else {})
    except PySparkException as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"Spark did not start: {line} (is Java 17 installed?)") from None


def parse_instant(text: str | None, option: str) -> datetime | None:
    """Read an instant: ISO 8601, in UTC unless it says otherwise, or milliseconds since 1970.

    Raises:
        UsageError: It is neither.
    """
    if text is None:
        return None
    try:
        if text.isascii() and text.isdigit() and len(text) > 8:
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option} {text!r} is no instant: 2026-11-16, 2026-11-16T12:30:00 and milliseconds "
            "since 1970 are"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def parse_header(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``.

    Raises:
        UsageError: It is not that.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--header {text!r}: NAME=VALUE is needed")
    return name, value

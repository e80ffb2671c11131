"""What the commands of ``pulque pipeline`` share."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.durations import before_now
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
    "VerboseOption",
    "parse_header",
    "parse_instant",
    "pipeline_extra",
    "start_spark",
]

_EXTRA = {
    "deltalake", "duckdb", "jinja2", "matplotlib", "numpy", "pandas", "py4j", "pyarrow", "pyspark",
}  # fmt: skip

_STDERR = 2

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
    typer.Option(
        "--master", metavar="URL", help="Where Spark runs: local[*], spark://…, yarn, sc://…"
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show Spark's own log, on stderr.")
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


def start_spark(runs_on: str, *, is_verbose: bool = False) -> "SparkSession":
    """Start Spark, or join the session that runs.

    Args:
        runs_on: Spark's master, or a server of Spark Connect.
        is_verbose: Whether what Spark logs goes to stderr, or nowhere.

    Raises:
        ConfigError: It does not start.
    """
    from pyspark.errors import PySparkException

    from pulque.pipeline.session import spark_session

    # Spark's own 200 partitions of each shuffle are meant for clusters.
    partitions = {"spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2))}
    settings = partitions if runs_on.startswith("local") else {}
    try:
        with nullcontext() if is_verbose else _quiet_children():
            return spark_session(
                runs_on, settings=settings, log_level="WARN" if is_verbose else "ERROR"
            )
    except PySparkException as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"Spark did not start: {line} (is Java 17 installed? --verbose shows Spark's log)"
        ) from None


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Let the processes that are started meanwhile write nothing to stderr.

    Java warns on its own stderr before it has read any setting of how much to log.
    """
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


def parse_instant(text: str | None, option: str) -> datetime | None:
    """Read an instant: ISO 8601 (UTC if no zone is given), milliseconds since 1970, or ``2h`` ago.

    Raises:
        UsageError: It is none of them.
    """
    if text is None:
        return None
    if (ago := before_now(text)) is not None:
        return ago
    try:
        if text.isascii() and text.isdigit() and len(text) > 8:
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option} {text!r}: allowed are 2026-11-16, 2026-11-16T12:30:00, milliseconds since "
            "1970, and 2h for 2 hours ago"
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

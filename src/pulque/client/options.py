"""What an application may choose when it connects, sends and receives, and what it gets else."""

import os
from typing import Literal

from pulque.client.batches import WINDOW
from pulque.client.dispatch import SendOptions
from pulque.client.identity import Identity, state_folder
from pulque.client.incoming import IncomingCore, PullOptions
from pulque.errors import UsageError
from pulque.model.batch import MAX_COUNT, Codec
from pulque.model.compression import compress
from pulque.model.names import parse_group, parse_subject, retry_partition
from pulque.wire.requests import EARLIEST, LATEST, Acks

__all__ = [
    "AcksName",
    "CompressionName",
    "StartName",
    "acks_of",
    "check_timeout",
    "consumer_core",
    "send_options",
    "start_of",
]

AcksName = Literal["disk", "memory"]
CompressionName = Literal["lz4", "zstd"]
StartName = Literal["earliest", "latest"]

DEFAULT_TIMEOUT = 30.0
_ACKS = {"disk": Acks.DISK, "memory": Acks.MEMORY}
_CODECS = {None: Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_STARTS = {"earliest": EARLIEST, "latest": LATEST}
_LARGEST_BATCH = 8 * 1024 * 1024
"""Half of what a broker takes, see ``OutgoingCore``."""


def acks_of(name: str) -> Acks:
    """Return how durable a send must be, as a request says it."""
    if name not in _ACKS:
        raise UsageError(f'acks is {name!r}; "disk" and "memory" are allowed')
    return _ACKS[name]


def start_of(start: str | int) -> int:
    """Return where a new group starts, as a request says it."""
    if isinstance(start, int) and start >= 0:
        return start
    if isinstance(start, str) and start in _STARTS:
        return _STARTS[start]
    raise UsageError(f'start is {start!r}; "earliest", "latest" or a sequence are allowed')


def check_timeout(seconds: float) -> float:
    """Return a limit of time that makes sense."""
    if not 0 < seconds < 1_000_000:
        raise UsageError(f"timeout is {seconds!r}; more than 0 and at most a million seconds")
    return float(seconds)


def send_options(  # noqa: PLR0913  # the arguments of Client.producer
    *,
    acks: str,
    linger: float,
    max_batch: int,
    max_batch_bytes: int,
    max_in_flight: int,
    max_buffered_bytes: int,
    timeout: float,
    compression: str | None,
) -> SendOptions:
    """Check what a producer was told."""
    _check("linger", linger, 0, 60)
    _check("max_batch", max_batch, 1, MAX_COUNT)
    _check("max_batch_bytes", max_batch_bytes, 1, _LARGEST_BATCH)
    _check("max_in_flight", max_in_flight, 1, WINDOW)
    _check("max_buffered_bytes", max_buffered_bytes, 1, 2**40)
    if compression not in _CODECS:
        raise UsageError(f'compression is {compression!r}; None, "lz4" and "zstd" are allowed')
    codec = _CODECS[compression]
    compress(b"", codec)  # says now, not later, that the package is missing
    return SendOptions(
        acks=acks_of(acks),
        linger=linger,
        max_batch=max_batch,
        max_batch_bytes=max_batch_bytes,
        max_in_flight=max_in_flight,
        max_buffered_bytes=max_buffered_bytes,
        timeout=check_timeout(timeout),
        codec=codec,
    )


def consumer_core(  # noqa: PLR0913  # the arguments of Client.consumer
    subject: str,
    group: str,
    *,
    consumer_id: str | None,
    application: str,
    state_dir: str | os.PathLike[str] | None,
    start: str | int,
    max_messages: int,
    max_bytes: int,
    max_held: int | None,
) -> tuple[IncomingCore, Identity]:
    """Check what a consumer was told, and find out who it is.

    The core knows the retry partition of the group; those of the subject have to be added.
    """
    parsed_subject, parsed_group = parse_subject(subject), parse_group(group)
    _check("max_messages", max_messages, 1, 1_000_000)
    _check("max_bytes", max_bytes, 1, _LARGEST_BATCH)
    if max_held is not None:
        _check("max_held", max_held, 1, 1_000_000_000)
    start_at = start_of(start)
    if consumer_id is not None:
        identity = Identity.given(consumer_id)
    else:
        folder = state_folder(state_dir, os.environ)
        identity = Identity.take(folder, application=application, group=group, subject=subject)
    options = PullOptions(
        group=parsed_group,
        consumer=identity.consumer,
        incarnation=identity.incarnation,
        start_at=start_at,
        max_messages=max_messages,
        max_bytes=max_bytes,
        max_held=max_held or 4 * max_messages,
    )
    core = IncomingCore(options)
    core.subscribe([retry_partition(parsed_subject, parsed_group)])
    return core, identity


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError(f"{name} is {value!r}; {least} to {most} are allowed")

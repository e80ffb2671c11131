"""What an application may choose when it connects, sends and receives, and what it gets else."""

import os
import time
from collections.abc import Iterable
from typing import Literal

from pulque.client.arguments.checks import (
    check_choice,
    check_flag,
    check_number,
    check_path,
    check_timeout,
    check_whole,
    check_words,
)
from pulque.client.options.consumer_plan import ConsumerPlan
from pulque.client.options.group_options import (
    WINDOW_LENGTH,
    RetryPolicy,
    StartAt,
    mode_of,
    ordered_options,
    retry_of,
    start_of,
)
from pulque.client.persistence.consumer_identity import ConsumerIdentity, state_folder
from pulque.client.persistence.message_spool import SendSpool, read_boot
from pulque.client.persistence.spool_directory import Folder
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.broker_health import LATENCY_TABLE, LatencyRow
from pulque.client.sending.outgoing_batch import WINDOW
from pulque.client.sending.producer_options import SendOptions
from pulque.errors import UsageError
from pulque.model.batch import MAX_COUNT, Codec
from pulque.model.compression import compress
from pulque.model.groups import Mode, tag_filter
from pulque.model.names import (
    broadcast_group,
    parse_group,
    parse_pattern,
)
from pulque.wire.requests import Acks

__all__ = [
    "AcksName",
    "CompressionName",
    "acks_of",
    "consumer_plan",
    "latency_table",
    "open_spool",
    "send_options",
]

AcksName = Literal["disk", "memory", "replica"]
CompressionName = Literal["lz4", "zstd"]

DEFAULT_TIMEOUT = 30.0
_ACKS = {"disk": Acks.DISK, "memory": Acks.MEMORY, "replica": Acks.REPLICA}
_CODECS = {None: Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_LONGEST_LATENCY = 1_000_000
_LARGEST_BATCH = 8 * 1024 * 1024
"""Half of what a broker takes, see ``OutgoingCore``."""


def acks_of(name: str) -> Acks:
    """Return how durable a send must be, as a request says it.

    Raises:
        UsageError: There is no such name.
    """
    check_choice("acks", name, _ACKS)
    return _ACKS[name]


def latency_table(rows: Iterable[tuple[float, float]] | None) -> tuple[LatencyRow, ...]:
    """Return what is done about slow answers."""
    if rows is None:
        return LATENCY_TABLE
    try:
        found = tuple(LatencyRow(*row) for row in rows)
    except TypeError:
        raise UsageError(
            f"latency is {rows!r}; pairs of seconds are allowed, as [(0.55, 3), (1, 60)]"
        ) from None
    for row in found:
        for each in row:
            check_number("a number in latency", each, 0, _LONGEST_LATENCY)
    return found


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
    check_number("linger", linger, 0, 60)
    check_whole("max_batch", max_batch, 1, MAX_COUNT)
    check_whole("max_batch_bytes", max_batch_bytes, 1, _LARGEST_BATCH)
    check_whole("max_in_flight", max_in_flight, 1, WINDOW)
    check_whole("max_buffered_bytes", max_buffered_bytes, 1, 2**40)
    check_choice("compression", compression, _CODECS)
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


def open_spool(
    folder: str | os.PathLike[str] | None, limit: int, *, is_synced: bool
) -> SendSpool | None:
    """Open the spool of a producer, if it is to have one."""
    if folder is None:
        return None
    check_path("spool", folder)
    check_whole("spool_limit", limit, 1, 2**40)
    check_flag("spool_sync", is_synced)
    return SendSpool(
        Folder(folder),
        limit=limit,
        is_synced=is_synced,
        now_ms=lambda: time.time_ns() // 1_000_000,
        boot=read_boot(),
    )


def consumer_plan(  # noqa: PLR0913  # the arguments of Client.consumer
    subject: str,
    group: str | None,
    *,
    mode: str | None,
    broadcast: bool | None,
    ordered: bool,
    blocks: str,
    tags: Iterable[str],
    all_tags: Iterable[str],
    retry: RetryPolicy | None,
    consumer_id: str | None,
    application: str,
    state_dir: str | os.PathLike[str] | None,
    start: StartAt,
    max_messages: int,
    max_bytes: int,
    max_held: int | None,
) -> ConsumerPlan:
    """Check what a consumer was told, and find out who it is."""
    pattern = parse_pattern(subject)
    check_flag("ordered", ordered)
    check_flag("broadcast", broadcast, may_be_none=True)
    check_words("tags", tags)
    check_words("all_tags", all_tags)
    if group == "":
        raise UsageError("group is ''; a name is allowed, or None for a broadcast consumer")
    found_mode = mode_of(mode, group, broadcast=broadcast, ordered=ordered)
    wanted = ordered_options(subject, found_mode, blocks, retry)
    name = "" if found_mode is Mode.BROADCAST else parse_group(group or "")
    check_whole("max_messages", max_messages, 1, 1_000_000)
    check_whole("max_bytes", max_bytes, 1, _LARGEST_BATCH)
    if max_held is not None:
        check_whole("max_held", max_held, 1, 1_000_000_000)
    wishes = (found_mode, tag_filter(tags, all_tags), start_of(start), retry_of(retry))
    folder = state_folder(state_dir, os.environ)
    if consumer_id is not None:
        identity = ConsumerIdentity.given(consumer_id, folder, group=name, subject=subject)
    else:
        identity = ConsumerIdentity.take(
            folder, application=application, group=name, subject=subject
        )
    effective = parse_group(name) if name else broadcast_group(identity.consumer)
    options = PullOptions(
        pattern,
        effective,
        identity.consumer,
        identity.incarnation,
        max_messages,
        max_bytes,
        max_held or (4 * max_messages if wanted is None else WINDOW_LENGTH),
        *wishes,
        least_share=1 if max_held or wanted is not None else 2 * max_messages,
    )
    return ConsumerPlan(options, identity, wanted)

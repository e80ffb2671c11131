"""Settings as the parts of a broker want them: plain values."""

from datetime import timedelta

from pulque.broker.config import BrokerSettings, parse_delays
from pulque.broker.housekeeping import Rhythm
from pulque.broker.state import PullLimits, SendLimits
from pulque.model.positions import Epoch
from pulque.net.server import ConnectionLimits
from pulque.rules.retry import RetryRules
from pulque.storage.options import StorageOptions
from pulque.wire.frame import MAX_PAYLOAD

__all__ = [
    "READERS",
    "connection_limits",
    "in_ms",
    "longest_delay_ms",
    "pull_limits",
    "retry_policy",
    "rhythm_of",
    "send_limits",
    "storage_options",
]

READERS = 4
"""Threads that wait for the disk."""
_MOST_BALLAST = 4 * 1024 * 1024


def storage_options(
    settings: BrokerSettings, epoch: Epoch, *, is_replicated: bool
) -> StorageOptions:
    """Return what the storage engine is told."""
    storage = settings.storage
    return StorageOptions(
        segment_bytes=storage.segment_size,
        segment_batches=storage.segment_batches,
        segment_age_ms=in_ms(storage.segment_age),
        action_segment_bytes=storage.action_segment_size,
        tail_cache_bytes=storage.tail_cache,
        reserve_bytes=storage.reserve,
        ballast_bytes=min(storage.reserve // 4, _MOST_BALLAST),
        keeps_for_archive=storage.archive,
        epoch=epoch,
        is_replicated=is_replicated,
    )


def send_limits(settings: BrokerSettings) -> SendLimits:
    """Return what one send may ask for."""
    limits = settings.limits
    return SendLimits(
        limits.max_batch, limits.max_message, limits.max_in_flight, limits.open_records
    )


def pull_limits(settings: BrokerSettings) -> PullLimits:
    """Return what one pull may ask for."""
    limits = settings.limits
    return PullLimits(
        limits.max_pull_messages,
        limits.max_pull_bytes,
        limits.max_held,
        settings.consumption.low_priority_share,
        # One is left for checkpoints, indexes, retries and reads without a group.
        READERS - 1,
    )


def retry_policy(settings: BrokerSettings) -> RetryRules:
    """Return what becomes of messages that fail, unless their group says otherwise."""
    retry, longest = settings.retry, longest_delay_ms(settings)
    delays_ms = tuple(min(in_ms(delay), longest) for delay in parse_delays(retry.delays))
    return RetryRules(delays_ms, retry.jitter_percent / 100, retry.attempts)


def longest_delay_ms(settings: BrokerSettings) -> int:
    """No message may wait for so long that it is deleted meanwhile."""
    return min(in_ms(settings.retry.longest_delay), in_ms(settings.storage.retention) // 2)


def rhythm_of(settings: BrokerSettings) -> Rhythm:
    """Return how often a broker keeps house."""
    storage = settings.storage
    return Rhythm(
        checkpoint_records=storage.checkpoint_records,
        checkpoint_ms=in_ms(storage.checkpoint_interval),
        lease_check_ms=in_ms(settings.consumption.lease_check),
        retention_ms=in_ms(storage.retention),
        retention_bytes=storage.retention_size,
    )


def connection_limits(settings: BrokerSettings) -> ConnectionLimits:
    """Return what one client may cost."""
    limits = settings.limits
    return ConnectionLimits(
        max_connections=limits.max_connections,
        max_payload=MAX_PAYLOAD,
        send_buffer=limits.send_buffer + limits.max_pull_bytes,
        handshake_ms=in_ms(limits.handshake_timeout),
        frame_ms=in_ms(limits.frame_timeout),
        idle_ms=in_ms(limits.idle_timeout),
    )


def in_ms(duration: timedelta) -> int:
    """Return a duration in milliseconds."""
    return int(duration.total_seconds() * 1000)

"""The consequence of a failed message: another attempt, or a dead letter.

The policy of a group sets the back-off before each attempt and the number of attempts. It is
deterministic: the jitter that spreads the retries of a thousand messages that failed together
is computed from their ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

from pulque.model.actions import EXPIRED, NO_RETRY
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.rules.consumption import Redelivery

__all__ = [
    "DEAD_HEADER",
    "DEFAULT_DELAYS_MS",
    "DUE_HEADER",
    "FAILED_HEADER",
    "FIRST_HEADER",
    "ORIGIN_HEADER",
    "REASON_HEADER",
    "UNREADABLE_BATCH_HEADER",
    "UNREADABLE_BODY_HEADER",
    "UNREADABLE_COUNT_HEADER",
    "UNREADABLE_HEADER",
    "UNREADABLE_SIZE_HEADER",
    "DeadLetter",
    "Decision",
    "FailedDelivery",
    "RetryLater",
    "RetryNow",
    "RetryRules",
    "decide",
    "is_expired",
    "parse_position",
    "parse_sequences",
    "show_sequences",
]

ORIGIN_HEADER = "pulque.origin"
"""The record that this one follows: partition and sequence. Identifies a retry in the log."""
FIRST_HEADER = "pulque.first"
"""Where the message was stored first: partition and sequence."""
REASON_HEADER = "pulque.reason"
"""Why the last attempt failed."""
FAILED_HEADER = "pulque.failed."
"""Followed by the number of an attempt: when and why it failed."""
DUE_HEADER = "pulque.due"
"""When a message that waited was due, in milliseconds since 1970."""
DEAD_HEADER = "pulque.dead"
"""Why a message is not delivered any more."""
UNREADABLE_HEADER = "pulque.unreadable"
"""On a dead letter whose body is a batch that cannot be decoded: the sequences of the messages
that it stands for, in the partition of its origin."""
UNREADABLE_COUNT_HEADER = "pulque.unreadable.count"
"""The number of these messages."""
UNREADABLE_BATCH_HEADER = "pulque.unreadable.batch"
"""Where the batch begins: partition and sequence."""
UNREADABLE_SIZE_HEADER = "pulque.unreadable.size"
"""The size of the batch in bytes; a body that would be too large is cut."""
UNREADABLE_BODY_HEADER = "pulque.unreadable.body"
"""The dead letter that has the bytes, if this one is not the first of its batch."""

_SECOND = 1000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE
_MAX_ATTEMPT = 0xFFFF
_CRC_RANGE = 2**32

DEFAULT_DELAYS_MS = (
    *(1 * _SECOND, 3 * _SECOND, 10 * _SECOND, 30 * _SECOND),
    *(1 * _MINUTE, 2 * _MINUTE, 3 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE),
    *(20 * _MINUTE, 30 * _MINUTE, 1 * _HOUR, 90 * _MINUTE, 2 * _HOUR),
)
"""The back-off after the first failed attempt, after the second, and so on."""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How often a group retries, with which back-off."""

    delays_ms: tuple[int, ...] = DEFAULT_DELAYS_MS
    """After the first failed attempt, after the second …; the last one for all others."""
    jitter: float = 0.1
    """Each delay is lengthened by up to this fraction, so that retries spread out."""
    max_attempts: int = 16
    """The number of attempts, the first one included."""

    def delay_ms(self, attempt: int, message_id: bytes) -> int:
        """Return the back-off after a failed attempt."""
        if not self.delays_ms:
            return 0
        delay = self.delays_ms[min(attempt, len(self.delays_ms)) - 1]
        drawn = int(google_crc32c.value(message_id + attempt.to_bytes(2, "little"))) / _CRC_RANGE
        return delay + int(delay * self.jitter * drawn)


class FailedDelivery(NamedTuple):
    """The failed attempt."""

    attempt: int
    message_id: bytes
    expires_at_ms: int
    """When the message expires; 0 for never."""


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Deliver the message again at once, with this attempt number."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Keep the message until it is due, then deliver it with this attempt number."""

    attempt: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Do not deliver the message any more; keep it with the reason."""

    reason: str


Decision = RetryNow | RetryLater | DeadLetter


def decide(
    redelivery: Redelivery, failed: FailedDelivery, policy: RetryRules, now_ms: int
) -> Decision:
    """Return the consequence of a failed attempt, or of a message that was handed back.

    A delay that the consumer asked for overrides the policy, and so does its reject;
    the number of attempts and the expiry always apply. Times count from
    the failure, not from now: a broker that was down in between does not add to them.
    """
    attempt = failed.attempt
    if redelivery.is_failure:
        if redelivery.delay_ms == NO_RETRY:
            return DeadLetter(EXPIRED if redelivery.reason == EXPIRED else "rejected")
        if attempt >= min(policy.max_attempts, _MAX_ATTEMPT):
            return DeadLetter(f"{attempt} attempts failed")
        delay_ms = (
            redelivery.delay_ms
            if redelivery.delay_ms >= 0
            else policy.delay_ms(attempt, failed.message_id)
        )
        attempt += 1
    else:
        delay_ms = 0
    due_ms = redelivery.at_ms + delay_ms if delay_ms else now_ms
    if is_expired(failed.expires_at_ms, max(due_ms, now_ms)):
        return DeadLetter(EXPIRED)
    return RetryLater(attempt, due_ms) if due_ms > now_ms else RetryNow(attempt)


def is_expired(expires_at_ms: int, at_ms: int) -> bool:
    """Return whether a message has expired at an instant."""
    return bool(expires_at_ms) and at_ms >= expires_at_ms


def parse_position(text: str) -> tuple[PartitionName, ConsumeSequence] | None:
    """Return the partition and sequence that a header names, or None if it names none."""
    name, _, sequence = text.rpartition("/")
    if not name or not (sequence.isascii() and sequence.isdigit()):
        return None
    return PartitionName(name), ConsumeSequence(int(sequence))


def show_sequences(sequences: Iterable[int]) -> str:
    """Format ascending sequences: ``3-5,9``."""
    runs: list[list[int]] = []
    for each in sequences:
        if runs and each == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], each]
        else:
            runs.append([each])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_sequences(text: str) -> list[ConsumeSequence]:
    """Parse the text of ``show_sequences``."""
    runs = (
        (first, last or first) for first, _, last in (r.partition("-") for r in text.split(","))
    )
    return [ConsumeSequence(n) for first, last in runs for n in range(int(first), int(last) + 1)]

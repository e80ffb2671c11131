"""What becomes of a message that a consumer could not process: another attempt, or the end.

The policy of a group says how long to wait before each attempt and how many there are. There is
no chance in it: what spreads the retries of a thousand messages that failed together is drawn
from their ids.
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
    "Failed",
    "RetryAt",
    "RetryNow",
    "RetryPolicy",
    "decide",
    "is_expired",
    "parse_position",
    "parse_sequences",
    "show_sequences",
]

ORIGIN_HEADER = "pulque.origin"
"""Which record this one follows: partition and sequence. Names a retry in the log."""
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
"""How many messages those are."""
UNREADABLE_BATCH_HEADER = "pulque.unreadable.batch"
"""Where the batch begins: partition and sequence."""
UNREADABLE_SIZE_HEADER = "pulque.unreadable.size"
"""How many bytes the batch has; the body has only the first of them if they are too many."""
UNREADABLE_BODY_HEADER = "pulque.unreadable.body"
"""Which dead letter has the bytes, if this one is not the first of its batch."""

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
"""How long to wait after the first failed attempt, after the second, and so on."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a group tries, and how long it waits in between."""

    delays_ms: tuple[int, ...] = DEFAULT_DELAYS_MS
    """After the first failed attempt, after the second …; the last one counts for all further."""
    jitter: float = 0.1
    """A delay gets longer by up to this fraction of it, so that not all come at once."""
    max_attempts: int = 16
    """How many attempts there are, the first one included."""

    def delay_ms(self, attempt: int, message_id: bytes) -> int:
        """Return how long to wait after an attempt failed."""
        if not self.delays_ms:
            return 0
        delay = self.delays_ms[min(attempt, len(self.delays_ms)) - 1]
        drawn = int(google_crc32c.value(message_id + attempt.to_bytes(2, "little"))) / _CRC_RANGE
        return delay + int(delay * self.jitter * drawn)


class Failed(NamedTuple):
    """What there is to know of the attempt that failed."""

    attempt: int
    message_id: bytes
    expires_at_ms: int
    """When the message is not worth delivering any more; 0 for never."""


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Deliver the message again at once, with this attempt number."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Let the message wait until it is due, then deliver it with this attempt number."""

    attempt: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Do not deliver the message any more; keep it with the reason."""

    reason: str


Decision = RetryNow | RetryAt | DeadLetter


def decide(redelivery: Redelivery, failed: Failed, policy: RetryPolicy, now_ms: int) -> Decision:
    """Return what follows a failed attempt, or a message that was handed back.

    A delay that the consumer asked for wins over the policy, and so does its wish that there be
    no other attempt; the number of attempts and the expiry hold in any case. Times count from
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
    return RetryAt(attempt, due_ms) if due_ms > now_ms else RetryNow(attempt)


def is_expired(expires_at_ms: int, at_ms: int) -> bool:
    """Say whether a message is not worth delivering at an instant."""
    return bool(expires_at_ms) and at_ms >= expires_at_ms


def parse_position(text: str) -> tuple[PartitionName, ConsumeSequence] | None:
    """Return the partition and sequence that a header names, or None if it names none."""
    name, _, sequence = text.rpartition("/")
    if not name or not (sequence.isascii() and sequence.isdigit()):
        return None
    return PartitionName(name), ConsumeSequence(int(sequence))


def show_sequences(sequences: Iterable[int]) -> str:
    """Return ascending sequences as text: ``3-5,9``."""
    runs: list[list[int]] = []
    for each in sequences:
        if runs and each == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], each]
        else:
            runs.append([each])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_sequences(text: str) -> list[ConsumeSequence]:
    """Return the sequences that ``show_sequences`` wrote."""
    runs = (
        (first, last or first) for first, _, last in (r.partition("-") for r in text.split(","))
    )
    return [ConsumeSequence(n) for first, last in runs for n in range(int(first), int(last) + 1)]

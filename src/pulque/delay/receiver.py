"""Receive delayed messages: check, deduplicate, append, confirm, answer.

As in a broker, each batch is handled by itself. Overdue messages are due at once.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from pulque.clock import Clock
from pulque.delay.schedule.entries import MOVED_PREFIX
from pulque.delay.schedule.replay import Replayer
from pulque.errors import (
    ErrorCode,
    InvalidBatchError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    UnsupportedError,
    UsageError,
)
from pulque.model.batch import BatchHeader, layout_of, read_header, seal, seed_of
from pulque.model.names import (
    PartitionName,
    is_retry,
    level_of,
    owner_of,
    parse_partition,
)
from pulque.model.positions import ConsumeSequence
from pulque.rules.dedup import Dedup
from pulque.serving.batches import SendLimits, check_batch, check_headers
from pulque.serving.commit import Committer
from pulque.serving.outcomes import Waiter, outcome_of, put_again, tell
from pulque.serving.receiver import BatchReceiver
from pulque.storage.engine import Engine
from pulque.storage.logs.message_log import Appended
from pulque.storage.message_table import MessageTable
from pulque.wire.responses import Outcome

__all__ = ["DelayReceiver", "DueLimits"]

_TIMES = np.dtype("<i8")
_SLACK_MS = 60_000
"""How far a producer's clock may be ahead of ours."""


@dataclass(frozen=True, slots=True)
class DueLimits:
    """Limits of due times, and of the number of subjects."""

    longest_delay_ms: int
    tick_ms: int
    max_partitions: int


class DelayReceiver(BatchReceiver):
    """Stores what producers send, until it is due."""

    def __init__(  # noqa: PLR0913  # what it needs, and nothing else
        self,
        engine: Engine,
        dedup: Dedup,
        committer: Committer,
        replayer: Replayer,
        *,
        clock: Clock,
        limits: SendLimits,
        due: DueLimits,
    ) -> None:
        super().__init__(committer, batches_per_step=1)  # a compressed one is opened
        self._engine = engine
        self._dedup = dedup
        self.replayer = replayer
        self._clock = clock
        self._limits = limits
        self._due = due

    def _take_in(
        self, name: str, batch: bytes, waiter: Waiter, index: int, *, wants_disk: bool
    ) -> None:
        """Store one batch, or return the error."""
        try:
            self._store(name, batch, waiter, index, wants_disk=wants_disk)
        except PulqueError as error:
            self._refuse(waiter, index, error)

    def move(self, partition: PartitionName, batch: bytes, waiter: Waiter) -> None:
        """Store a rescheduled message.

        Raises:
            StorageError: The message cannot be stored.
        """
        name = PartitionName(f"{MOVED_PREFIX}{partition}")
        now_ms = self._clock.now_ms()
        found = self._engine.create_partition(name, now_ms)
        appended = self._engine.append(
            found, batch, read_header(batch), now_ms=now_ms, wants_disk=True
        )
        self._submit(appended, waiter, 0)
        self._committer.schedule()

    def _store(
        self, name: str, batch: bytes, waiter: Waiter, index: int, *, wants_disk: bool
    ) -> None:
        self._check_load()
        found = self._engine.partition(name)
        if found is None:
            self._check_partition(name)
        header = check_batch(batch, seed_of(name), self._limits, is_delayed=True)
        if name[0] != "%":  # what a consumer defers has the headers of its attempts
            check_headers(batch, header, self._limits)
        if header.priority != level_of(PartitionName(name)):
            raise InvalidBatchError(
                f"a batch of priority {header.priority} for {name}, whose messages have priority "
                f"{level_of(PartitionName(name))}: other priorities have partitions of their own"
            )
        if header.codec:
            _check_records(batch)
        now_ms = self._clock.now_ms()
        batch, dues_ms = self._checked_due(batch, header, name, now_ms)
        if found is None:
            found = self._engine.create_partition(PartitionName(name), now_ms)
        stored = self._dedup.find(found.id, header)
        if stored is not None:
            self._answer_again(found.id, stored, waiter, index, wants_disk=wants_disk)
            return
        self._engine.promise_room(self.replayer.waiting_bytes + len(batch))
        appended = self._engine.append(found, batch, header, now_ms=now_ms, wants_disk=wants_disk)
        appended.remark = dues_ms
        first = appended.entry.first_sequence
        self._dedup.stored(found.id, header, first, now_ms)
        self._unconfirmed[found.id, first] = appended
        self._submit(appended, waiter, index)

    def _submit(self, appended: Appended, waiter: Waiter, index: int) -> None:
        appended.waiting.append((waiter, index))
        self.replayer.put(appended)
        self._committer.submit(appended, self._done)

    def _check_load(self) -> None:
        waiting = self._committer.waiting_bytes + self.replayer.waiting_bytes
        if waiting > self._limits.max_waiting:
            raise OverloadedError(
                f"{waiting} bytes wait for the disk or to be put into the schedule; "
                f"at most {self._limits.max_waiting} are allowed"
            )

    def _check_partition(self, name: str) -> None:
        partition = parse_partition(name)
        if owner_of(partition) is not None and not is_retry(partition):
            raise NotAllowedError(f"partition {name} belongs to a group: nothing is sent there")
        if len(self._engine.partitions.by_id) >= self._due.max_partitions:
            raise NotAllowedError(
                f"messages are delayed for {self._due.max_partitions} subjects already, and "
                f"{name} would be one more: raise limits.max_partitions, or use fewer subjects"
            )

    def _checked_due(
        self, batch: bytes, header: BatchHeader, name: str, now_ms: int
    ) -> tuple[bytes, tuple[int, int]]:
        """Check the due times of a batch, and raise long overdue ones to now.

        Returns:
            The batch, and the first and the last due time.

        Raises:
            InvalidRequestError: A message is due too far in the future.
        """
        at = layout_of(header.flags).column_start("due_at_ms", header.count)
        dues = np.frombuffer(batch, _TIMES, header.count, at)
        first, last = int(dues.min()), int(dues.max())
        if last > now_ms + self._due.longest_delay_ms + _SLACK_MS:
            raise InvalidRequestError(
                f"a message is due at {last} ms, {(last - now_ms) // 1000} s ahead; at most "
                f"{self._due.longest_delay_ms // 1000} s are allowed"
            )
        if first >= now_ms - self._due.tick_ms:
            return batch, (first, last)
        clamped = np.maximum(dues, now_ms).astype("<i8").tobytes()
        rest = batch[4:at] + clamped + batch[at + len(clamped) :]
        return seal(rest, seed_of(name)), (now_ms, max(last, now_ms))

    def _done(self, appended: Appended, error: PulqueError | None) -> None:
        entry = appended.entry
        key = (entry.partition, entry.first_sequence)
        if self._unconfirmed.get(key) is appended:
            del self._unconfirmed[key]
        answer = partial(tell, appended.waiting, outcome_of(appended, error))
        if error is None:
            self.messages += entry.count
            self.batches += 1
            self.replayer.pace(answer)
        else:
            self.refused += 1
            self.replayer.drop(appended)
            self._dedup.take_back(entry.partition, read_header(appended.batch))
            answer()
        self.replayer.wake()

    def _answer_again(
        self,
        partition: int,
        first: ConsumeSequence,
        waiter: Waiter,
        index: int,
        *,
        wants_disk: bool,
    ) -> None:
        """Answer a batch that is stored, once it is as durable as this send wants it."""
        if self._joins(partition, first, waiter, index, wants_disk=wants_disk):
            return
        put_again(
            waiter,
            index,
            Outcome(ErrorCode.NONE, is_duplicate=True, first_sequence=first, stored_at_ms=0),
            self._committer.sync_facts if wants_disk else None,
        )


def _check_records(batch: bytes) -> None:
    """Check that a compressed batch can be scheduled, and delivered, later.

    Raises:
        RejectedError: It cannot be decompressed, or its codec is not installed here; or brokers
            would refuse its messages, which are delivered uncompressed.
    """
    try:
        MessageTable.of([batch]).check_parts()
    except UsageError as error:
        raise UnsupportedError(f"the batch is compressed, and here {error}") from None

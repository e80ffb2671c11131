"""Due → the group's retry partition.

What waits lies in a waiting partition, with its due time in a column, and in the schedule that
is derived from it. When its time has come it is appended to the group's retry partition, in
batches, and the record names where it waited: so a replay releases only what the log does not
have yet. How much waits, and for whom, makes no difference to what is due.
"""

import asyncio
from contextlib import suppress

from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.settling.message_extraction import (
    Extractor,
    Packing,
    RepackedBatch,
    Unreadable,
    Withheld,
    withheld_of,
)
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import InvalidBatchError
from pulque.model.names import (
    dead_partition,
    is_dead,
    level_of,
    owner_of,
    retry_partition,
    subject_of,
)
from pulque.model.positions import ConsumeSequence
from pulque.rules.retry import DEAD_HEADER, DUE_HEADER, ORIGIN_HEADER, is_expired
from pulque.rules.schedule import Due
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.partitions import Partition

__all__ = ["Releaser"]

_MOST_MESSAGES = 500
_LONGEST_SLEEP_S = 0.05
"""So often the clock is looked at while anything waits: somebody may have set it."""
_TRY_AGAIN_MS = 5000
"""So long messages wait that cannot be read."""


class Releaser:
    """Lets go what has waited long enough. Partitions take turns."""

    def __init__(self, state: BrokerState, around: Surroundings, appender: Appender) -> None:
        self._engine = state.engine
        self._schedule = state.schedule
        self._extractor = Extractor(state.engine)
        self._appender = appender
        self._clock = around.clock
        self._executor = around.executor
        self._warn = around.warn
        self._has_work = asyncio.Event()
        self.released = 0
        self.expired = 0

    def wake(self) -> None:
        """Take note that something waits."""
        self._has_work.set()

    async def run(self) -> None:
        """Release what is due until cancelled."""
        while True:
            due = self._schedule.due(self._clock.now_ms(), _MOST_MESSAGES)
            if due is None:
                await self._sleep()
            else:
                await self._release(due)

    async def _sleep(self) -> None:
        self._has_work.clear()
        next_ms = self._schedule.next_due_ms()
        if next_ms is None:
            await self._has_work.wait()
            return
        left_s = max(next_ms - self._clock.now_ms(), 1) / 1000
        await asyncio.sleep(min(left_s, _LONGEST_SLEEP_S))

    async def _release(self, due: Due) -> None:
        partition = self._engine.partitions.by_id[due.partition]
        # Before anything is read: what is not confirmed yet cannot be read, and is not missing.
        sequences = [each for each in due.sequences if each < partition.confirmed]
        if not sequences:
            await asyncio.sleep(_LONGEST_SLEEP_S)
            return
        loop = asyncio.get_running_loop()
        batches, missing, withheld = await loop.run_in_executor(
            self._executor, self._pack, partition, sequences
        )
        for packed in batches:
            await self._append(due, packed)
        if missing:
            self._warn("redelivery_impossible", partition=partition.name, sequences=missing[:10])
            self._schedule.remove(due.partition, due.due_ms, missing)
        if withheld:
            self._warn(
                "redelivery_delayed",
                partition=partition.name,
                messages=len(withheld_of(sequences, withheld)),
                reason=str(withheld[0].problem),
            )
            # Nobody waits for them: only another broker may be able to read them.
            until_ms = self._clock.now_ms() + _TRY_AGAIN_MS
            self._schedule.postpone(due, until_ms)

    async def _append(self, due: Due, packed: RepackedBatch) -> None:
        def written(_: Appended) -> None:
            self._schedule.remove(due.partition, due.due_ms, packed.sequences)
            if is_dead(packed.target):
                self.expired += len(packed.sequences)
            else:
                self.released += len(packed.sequences)

        await self._appender.append(packed.target, packed.batch, written)

    def _pack(
        self, partition: Partition, sequences: list[ConsumeSequence]
    ) -> tuple[list[RepackedBatch], list[ConsumeSequence], list[Withheld]]:
        """Return batches to be appended, what is not stored any more, and what cannot be read."""
        group, subject = owner_of(partition.name), subject_of(partition.name)
        if group is None:
            return [], sequences, []
        packing = Packing()
        missing = set(sequences)
        withheld: list[Withheld] = []
        for message in self._extractor.found(partition, sequences, withheld):
            if isinstance(message, Unreadable):
                continue
            with suppress(InvalidBatchError):
                headers = message.headers
                headers[ORIGIN_HEADER] = f"{partition.name}/{message.sequence}"
                headers[DUE_HEADER] = str(message.due_at_ms)
                target = retry_partition(subject, group, level_of(partition.name))
                attempt = message.attempt
                if is_expired(message.expires_at_ms, self._clock.now_ms()):
                    # While the broker was down, or the disk full.
                    headers[DEAD_HEADER] = "expired"
                    target, attempt = dead_partition(subject, group), attempt - 1
                packing.add(target, message, headers=headers, attempt=attempt)
                missing.discard(message.sequence)
        missing.difference_update(withheld_of(missing, withheld))
        return packing.batches(), sorted(missing), withheld

"""What a broker does by the clock: leases, checkpoints, indexes, retention, room on the disk."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

from pulque.broker.components import BrokerParts
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import CorruptionError, PulqueError, StorageFullError
from pulque.net.steps import Steps, in_slices
from pulque.rules.consumption import Consumption
from pulque.rules.consumption_state import encode_changes
from pulque.rules.retention import SegmentAge, expired_segments
from pulque.serving.commit import Committer
from pulque.storage.logs.fact_codec import encode_action

__all__ = ["Housekeeper", "Rhythm", "opened_in_steps"]

_TICK_S = 0.25
_CHECKPOINT_LEAST_MS = 1000
_CHECKPOINT_SHARE = 25
"""Capturing a checkpoint may take this fraction of the event loop's time."""
_SWEEP_MS = 60_000
_LOSSES_TOLD = 10


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often things are done."""

    checkpoint_records: int
    checkpoint_ms: int
    lease_check_ms: int
    retention_ms: int
    retention_bytes: int | None


class Housekeeper:
    """Runs beside the data path on the same event loop; disk work goes to a thread."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        parts: BrokerParts,
        committer: Committer,
        rhythm: Rhythm,
    ) -> None:
        self._engine = state.engine
        self._consumption = state.consumption
        self._dedup = state.dedup
        self._schedule = state.schedule
        self._dead = state.dead
        self._adoptions = state.adoptions
        self._settler = parts.settler
        self._puller = parts.puller
        self._committer = committer
        self._clock = around.clock
        self._executor = around.executor
        self._rhythm = rhythm
        self._warn = around.warn
        self._fail = around.fail
        now_ms = self._clock.monotonic_ms()
        self._checkpoint_at_ms = now_ms
        self._not_before_ms = now_ms
        self._leases_at_ms = now_ms
        self._sweep_at_ms = now_ms
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        """The checkpoint that a thread is at."""

    async def run(self) -> None:
        """Keep house until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.tick()
            except StorageFullError as error:
                self._warn("housekeeping_delayed", reason=str(error))
            except CorruptionError as error:
                self._warn("corruption_found", reason=str(error))

    async def checkpoint(self) -> None:
        """Write a checkpoint of now."""
        if self._writing is not None:
            # Whoever waited for it was cancelled; the thread was not.
            await asyncio.wait([self._writing])
            if self._writing.exception() is not None:
                self._engine.abandon_checkpoint()
        # First, so that what follows from the queue being written is in it, and that there is
        # nothing left to fail once the changes are taken.
        self._committer.flush()
        began_ms = self._clock.monotonic_ms()
        changes: dict[bytes, bytes | None] = {**self._dedup.encode_changes()}
        changes.update(self._schedule.encode_changes())
        changes.update(self._dead.encode_changes())
        changes.update(self._adoptions.encode_changes())
        changes.update(encode_changes(self._consumption))
        job = self._engine.begin_checkpoint(changes)
        taken_ms = self._clock.monotonic_ms() - began_ms
        self._checkpoint_at_ms = began_ms
        self._not_before_ms = began_ms + max(_CHECKPOINT_LEAST_MS, taken_ms * _CHECKPOINT_SHARE)
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._executor, job.run)
        try:
            await asyncio.shield(self._writing)
        except StorageFullError:
            self._engine.abandon_checkpoint()
            raise
        except PulqueError as error:
            self._fail(error)
            return
        self._engine.finish_checkpoint(job)
        self._writing = None

    async def tick(self) -> None:
        """Do what is due now."""
        async with self._turn:
            await self._keep_house()

    async def _keep_house(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._engine.check_room()
        if now_ms - self._leases_at_ms >= self._rhythm.lease_check_ms:
            self._leases_at_ms = now_ms
            self._lose_silent()
        if self._engine.actions.needs_roll():
            await self._roll_actions()
        if self._is_checkpoint_due(now_ms):
            await self.checkpoint()
        await self._index_sealed()
        await self._retain()
        if now_ms - self._sweep_at_ms >= _SWEEP_MS:
            self._sweep_at_ms = now_ms
            self._dedup.forget_idle(self._clock.now_ms())
            self._adoptions.forget_old(self._clock.now_ms())

    async def _roll_actions(self) -> None:
        opened: list[bytes] | None = None
        steps = opened_in_steps(self._consumption)
        while opened is None:
            try:
                next(steps)
            except StopIteration as done:
                opened = done.value
            else:
                await asyncio.sleep(0)  # others have their turn
        if self._engine.actions.needs_roll():  # nobody sealed it meanwhile
            self._engine.actions.start_segment(opened)

    def _lose_silent(self) -> None:
        lost = self._settler.lose_silent()
        self._puller.dismiss(lost)
        held = [(group, consumer, count) for (group, consumer), count in lost.items() if count]
        for group, consumer, count in held[:_LOSSES_TOLD]:
            self._warn("consumer_lost", group=group, consumer=consumer, messages=count)
        if len(held) > _LOSSES_TOLD:
            self._warn("more_consumers_lost", consumers=len(held) - _LOSSES_TOLD)

    def _is_checkpoint_due(self, now_ms: int) -> bool:
        records = self._engine.records_since_checkpoint
        if not records or now_ms < self._not_before_ms:
            return False
        return (
            records >= self._rhythm.checkpoint_records
            or now_ms - self._checkpoint_at_ms >= self._rhythm.checkpoint_ms
        )

    async def _index_sealed(self) -> None:
        loop = asyncio.get_running_loop()
        while (job := self._engine.begin_index()) is not None:
            await loop.run_in_executor(self._executor, job.run)
            self._engine.finish_index(job)

    async def _retain(self) -> None:
        now_ms = self._clock.now_ms()
        segments = self._engine.segments
        ages = [
            SegmentAge(segment.end - segment.base, after.opened_at_ms)
            for segment, after in pairwise(segments)
        ]
        expired = expired_segments(
            ages,
            now_ms=now_ms,
            retention_ms=self._rhythm.retention_ms,
            retention_bytes=self._rhythm.retention_bytes,
        )
        if not expired:
            return
        loop = asyncio.get_running_loop()
        for _ in range(min(expired, self._engine.removable_segments)):
            await loop.run_in_executor(self._executor, self._engine.remove_oldest().run)


def opened_in_steps(consumption: Consumption) -> Steps[list[bytes]]:
    """Return what a segment that is started before the next step has to begin with, encoded.

    A segment of the action log begins with all subscriptions that are open. There may be hundreds
    of thousands of them. They are made into bytes a few at a time, between the requests of others;
    only where each stands in the file is found out at the instant of the change.
    """
    made: dict[int, tuple[int, bytes]] = {}
    for some in in_slices(list(consumption.subscriptions.values())):
        for each in some:
            made[each.id] = (each.incarnation, encode_action(consumption.open_fact(each)))
        yield
    found = []
    for each in consumption.subscriptions.values():
        incarnation, fact = made.get(each.id, (-1, b""))
        # Meanwhile some came, and some are another run of their consumer.
        if incarnation != each.incarnation:
            fact = encode_action(consumption.open_fact(each))
        found.append(fact)
    return found

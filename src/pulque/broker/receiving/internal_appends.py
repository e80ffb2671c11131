"""Appends of the broker's own: retries, what waits, dead letters."""

import asyncio
from collections.abc import Callable

from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import PulqueError, StorageFullError
from pulque.model.batch import read_header
from pulque.model.names import PartitionName
from pulque.serving.commit import Committer
from pulque.storage.logs.message_log import Appended

__all__ = ["Appender"]

_TRY_AGAIN_S = 1.0


class Appender:
    """Appends batches that the broker packed itself. They may use the last room on the disk."""

    def __init__(self, state: BrokerState, around: Surroundings, committer: Committer) -> None:
        self._engine = state.engine
        self._committer = committer
        self._clock = around.clock
        self._warn = around.warn

    async def append(
        self,
        target: PartitionName,
        batch: bytes,
        written: Callable[[Appended], None],
        *,
        is_patient: bool = True,
    ) -> None:
        """Append a batch; without room it waits until there is.

        Args:
            target: Where to; the partition is made if need be.
            batch: As packed for it.
            written: Called when it is in the log, before anything else can happen.
            is_patient: Whether to wait for room.

        Raises:
            StorageFullError: There is no room, and nobody waits for it.
            UnavailableError: Nobody knows whether it is stored: the disk failed.
        """
        while True:
            try:
                await self._append_once(target, batch, written)
            except StorageFullError as error:
                if not is_patient:
                    raise
                self._warn("redelivery_delayed", partition=target, reason=str(error))
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                return

    async def _append_once(
        self, target: PartitionName, batch: bytes, written: Callable[[Appended], None]
    ) -> None:
        now_ms = self._clock.now_ms()
        partition = self._engine.create_partition(target, now_ms, from_reserve=True)
        appended = self._engine.append(
            partition,
            batch,
            read_header(batch),
            now_ms=now_ms,
            wants_disk=False,
            from_reserve=True,
        )
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(appended: Appended, error: PulqueError | None) -> None:
            if error is None:
                # At once, not when this task has its turn: no checkpoint may come between, or
                # the messages would be redelivered once more after a restart.
                written(appended)
            if over.done():
                return
            if error is None:
                over.set_result(None)
            else:
                over.set_exception(error)

        self._committer.submit(appended, done)
        self._committer.schedule()
        await over

"""A follower's copying: bytes of both logs come from the leader, are checked, written and synced.

While a thread syncs what has come, the next bytes are asked for; how far the disk is, the leader
is told as soon as that is so. A checkpoint of the leader is kept beside the logs: with it, this
broker can lead at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.clock import Clock
from pulque.errors import (
    CorruptionError,
    NotAllowedError,
    PulqueError,
    RemoteProtocolError,
    StaleEpochError,
    StorageError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from pulque.serving.sync_thread import SyncThread
from pulque.storage.disk_jobs import SyncJob
from pulque.storage.replication.record_checks import BadRange
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.wire.leadership import Led
from pulque.wire.replication import (
    NO_ROOM,
    CheckpointPart,
    CopyCheckpoint,
    Follow,
    Followed,
    Replicate,
    Replicated,
)
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Copier"]

T = TypeVar("T")
_PATIENCE_S = 3.0
_PART_S = 0.02
_AT_ONCE = 4 * 1024 * 1024
_WAITS_PER_LEASE = 5
_LONGEST_WAIT_MS = 1000
_CHECKPOINT_MS = 5000
"""A newer checkpoint is fetched at most this often."""
_OLD_DATABASE = (
    "If the meta servers' database was restored from an older backup, put the newer one back; if "
    "there is none, stop all brokers of the group, remove told.json from their data directories, "
    "and start the one first whose messages count"
)


class Copier:
    """Copies the logs of one leader, over one connection. Lives in one event loop.

    Args:
        logs: Where to.
        thread: Waits for the disk.
        clock: The broker's.
        name: The broker's own name.
        warn: Logs an event with its fields.
    """

    def __init__(  # noqa: PLR0915  # what it keeps track of
        self,
        logs: ReplicaLogs,
        thread: SyncThread,
        clock: Clock,
        name: str,
        warn: Callable[..., None],
    ) -> None:
        self._logs = logs
        self._thread = thread
        self._clock = clock
        self._name = name
        self._warn = warn
        self._led: Led | None = None
        self._connection: AsyncConnection | None = None
        self._is_syncing = False
        self._idle = asyncio.Event()
        """Set while nothing is being synced."""
        self._idle.set()
        self._failure: PulqueError | None = None
        self._begin = (0, 0)
        """Where empty logs begin."""
        self._checkpoint_ms: int | None = None
        self.is_parting = False
        """Whether this broker is to lead next: once its leader is over, or its promise to it."""
        self.has_room = True
        """Whether this broker would take messages, if it led."""
        self.is_damaged = False
        """Whether a log here is damaged: the damaged ranges are copied again first."""
        self._damage: list[BadRange] | None = None
        """Where, as far as it is known."""
        self.confirmed = 0
        """What leaders said about what is confirmed: never dropped again."""
        self.followed: tuple[int, str] = (0, "")
        """The epoch that this broker followed or led last, and the token of its leader."""
        self.leader_end = self._leader_action_end = 0
        """How far the leader's message log reached then."""
        self.promised_ms = 0
        """Not before then does this broker lead: its leader may count on it."""

    def mend(self) -> None:
        """Copy the damaged ranges of the logs again before anything else."""
        self.is_damaged, self._damage = True, None
        if self._connection is not None:
            self._connection.abort()

    async def copy(self, led: Led) -> None:
        """Copy until the leader is gone or says no.

        Raises:
            PulqueError: It is, or does.
            StorageError: This broker's own disk failed.
        """
        # Of the leader before: what is synced of its log says nothing about this one's.
        await self._idle.wait()
        if self.is_damaged and self._damage is None:
            connection = await self._open(led)
            try:
                await self._leave_sync(connection, led)
            finally:
                await connection.close()
            self._damage = await asyncio.to_thread(self._logs.find_damage)
        connection = await self._open(led)
        try:
            await self._agree(connection, led)
            await self._mend(connection, led)
            connection.on_deposed = self._release
            self._led, self._connection = led, connection
            # What is here from before is perhaps only in the page cache.
            self._sync()
            while not self.is_parting:
                await self._copy_once(connection, led)
            while True:
                await self._part(connection, led)
        finally:
            self._connection = None
            await connection.close()
            await self._idle.wait()

    async def _open(self, led: Led) -> AsyncConnection:
        address = Address(led.host, led.port)
        client = f"broker {self._name}"
        return await AsyncConnection.open(address, client=client, timeout=_PATIENCE_S)

    async def _leave_sync(self, connection: AsyncConnection, led: Led) -> None:
        """Ask the leader to take this broker out of sync, as one that begins with nothing.

        Raises:
            UnavailableError: It is still in sync.
        """
        leadership, directory = led.leadership, self._logs.identity.id
        request = Follow(
            leadership.broker_group, self._name, directory, leadership.epoch, 0, 0, ()
        )
        await _ask(connection, request, _PATIENCE_S, _as(Followed))

    async def _mend(self, connection: AsyncConnection, led: Led) -> None:
        """Copy the damaged ranges again, over what is there; nothing else here is touched.

        Raises:
            CorruptionError: The leader's bytes are damaged there, too.
        """
        logs, damage = self._logs, self._damage
        if not self.is_damaged or damage is None:
            return
        # What the leader's retention removed needs no mending.
        none = Replicate(logs.identity.id, led.leadership.epoch, 0, 0, 0, 0, 0, 0, 0)
        logs.remove_before((await _ask(connection, none, _PATIENCE_S, _copied)).message_oldest)
        if not damage:
            # It is not the log: an index was made while the log could not be read.
            logs.drop_indexes()
        while damage:
            bad = damage[0]
            at, end = bad.offset, min(bad.end, logs.segment_end(bad.offset))
            while at < end:
                asked = replace(
                    none,
                    message_offset=at,
                    action_offset=logs.action_end,
                    max_bytes=min(_AT_ONCE, end - at),
                )
                self.promised_ms = self._clock.monotonic_ms() + led.lease_ms
                answer = await _ask(connection, asked, _PATIENCE_S, _copied)
                at = logs.mend(answer.message_base, answer.message_offset, answer.messages)
            if end:
                self._warn(
                    "damage_mended", leader=led.name, offset=bad.offset, bytes=end - bad.offset
                )
            damage.pop(0)
        logs.drop_damaged_actions()
        self._begin = (logs.message_end, logs.action_end)
        logs.has_holes = self.is_damaged = False
        self._damage = None

    async def _part(self, connection: AsyncConnection, led: Led) -> None:
        """Ask for nothing any more, and wait for the leader to say that it is over."""
        await _ask(connection, self._question(led, 0, 0), _PATIENCE_S, _as(Replicated))
        await asyncio.sleep(_PART_S)

    def _release(self) -> None:
        """Take in that the leader says itself that it leads no more: no promise binds now."""
        self.promised_ms = 0

    async def _agree(self, connection: AsyncConnection, led: Led) -> None:
        """Find out where to go on, and drop what the leader does not have."""
        logs, leadership = self._logs, led.leadership
        if logs.epochs and logs.epochs[-1].epoch > leadership.epoch:
            raise StaleEpochError(
                f"{led.name} led in epoch {leadership.epoch}, and there was epoch "
                f"{logs.epochs[-1].epoch} since: what it says is of no use"
            )
        if leadership.epoch == self.followed[0] and leadership.token != self.followed[1]:
            raise NotAllowedError(
                f"{led.name} leads in epoch {leadership.epoch}, and another process led in that "
                f"epoch before, whose messages this broker has: it keeps them. {_OLD_DATABASE}"
            )
        request = Follow(
            leadership.broker_group,
            self._name,
            logs.identity.id,
            leadership.epoch,
            logs.message_end,
            logs.action_end,
            logs.epochs,
        )
        followed = await _ask(connection, request, _PATIENCE_S, _as(Followed))
        if not followed.is_anew and followed.message_end < min(self.confirmed, logs.message_end):
            # Never: rather stand still, and let somebody look, than drop what was promised.
            raise NotAllowedError(
                f"{led.name} leads in epoch {followed.epoch} and has the message log up to "
                f"{followed.message_end}, and {self.confirmed} bytes of it were confirmed: this "
                f"broker keeps them, and does not follow. {_OLD_DATABASE}"
            )
        lost = logs.message_end - followed.message_end
        if followed.is_anew:
            if not logs.is_empty:
                self._warn("logs_emptied", leader=led.name, bytes=logs.message_end)
                logs.empty()
        else:
            if lost > 0:
                # Nobody was told that it is stored: those in sync did not all have it.
                self._warn("tail_dropped", leader=led.name, bytes=lost)
            logs.cut(followed.message_end, followed.action_end)
        self.followed = (leadership.epoch, leadership.token)
        self._begin = (followed.message_end, followed.action_end)
        self.leader_end = 0
        logs.take_epochs(followed.epochs)
        self._checkpoint_ms = None

    async def _copy_once(self, connection: AsyncConnection, led: Led) -> None:
        """Ask for more, and take it in."""
        if self._failure is not None:
            raise self._failure
        if self.is_damaged:
            raise UnavailableError("what is here is damaged, and is to be mended")
        wait_ms = min(led.lease_ms // _WAITS_PER_LEASE, _LONGEST_WAIT_MS)
        request = self._question(led, _AT_ONCE, wait_ms)
        self.promised_ms = self._clock.monotonic_ms() + led.lease_ms
        answer = await _ask(connection, request, wait_ms / 1000 + _PATIENCE_S, _copied)
        try:
            self._take_in(answer)
        except StorageFullError as error:
            self._warn("no_room_to_follow", reason=str(error))
            await asyncio.sleep(1.0)
        self._sync()
        if answer.checkpoint != self._logs.checkpoint and self._may_copy():
            await self._copy_checkpoint(connection, answer.checkpoint)

    def _question(self, led: Led, max_bytes: int, wait_ms: int) -> Replicate:
        logs = self._logs
        return Replicate(
            logs.identity.id,
            led.leadership.epoch,
            max(logs.message_end, self._begin[0]),
            max(logs.action_end, self._begin[1]),
            logs.message_synced,
            logs.action_synced,
            (1 if self.has_room else NO_ROOM) if logs.checkpoint > 0 else 0,
            max_bytes,
            wait_ms,
        )

    def _take_in(self, answer: Replicated) -> None:
        logs = self._logs
        if answer.messages:
            logs.append_messages(
                answer.message_base, answer.message_offset, bytes(answer.messages)
            )
        if answer.actions:
            logs.append_actions(answer.action_base, answer.action_offset, bytes(answer.actions))
        if answer.message_oldest > logs.message_oldest:
            logs.remove_before(answer.message_oldest)
        self.confirmed = max(self.confirmed, answer.confirmed)
        self.leader_end, self._leader_action_end = answer.message_end, answer.action_end

    # -- syncing --------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Have a thread wait for the disk, if there is anything to wait for."""
        if self._is_syncing:
            return
        job = self._logs.begin_sync()
        if job is None:
            return
        self._is_syncing = True
        self._idle.clear()
        self._thread.run(job.run, partial(self._synced, job))

    def _synced(self, job: SyncJob, problem: BaseException | None) -> None:
        self._is_syncing = False
        self._idle.set()
        if problem is not None:
            # What was written may be gone, so nothing more is: only a restart tells what is left.
            self._failure = StorageError(f"the logs cannot be synced: {problem}")
            if self._connection is not None:
                self._connection.abort()
            return
        self._logs.finish_sync(job)
        if self._has_all():
            self._logs.settle_known()
        connection, led = self._connection, self._led
        if connection is None or led is None:
            return
        connection.post(self._question(led, 0, 0), self._told)
        self._sync()

    def _has_all(self) -> bool:
        """Whether the leader had no more than what is on this disk, when it was last heard."""
        logs = self._logs
        return (
            self._connection is not None
            and logs.message_synced >= self.leader_end > 0
            and logs.action_synced >= self._leader_action_end
        )

    def _told(self, answer: Response | PulqueError) -> None:
        """Take in the answer to what was said about the disk."""
        if isinstance(answer, PulqueError) and self._connection is not None:
            self._connection.abort()

    # -- the leader's checkpoint ----------------------------------------------------------------

    def _may_copy(self) -> bool:
        if self._logs.checkpoint == 0 or self._checkpoint_ms is None:
            return True
        return self._clock.monotonic_ms() - self._checkpoint_ms >= _CHECKPOINT_MS

    async def _copy_checkpoint(self, connection: AsyncConnection, number: int) -> None:
        """Copy a checkpoint, if the logs reach as far as it does."""
        parts: list[bytes] = []
        size, have = 1, 0
        while have < size:
            request = CopyCheckpoint(number, have, _AT_ONCE)
            found, size, data = await _ask(connection, request, _PATIENCE_S, _part)
            if found != number or not data:
                return  # there is a newer one by now
            parts.append(data)
            have += len(data)
        try:
            self._logs.put_checkpoint(number, b"".join(parts))
        except UsageError:
            return  # the logs have to come first
        except (CorruptionError, StorageFullError) as error:
            self._warn("checkpoint_not_copied", number=number, reason=str(error))
        self._checkpoint_ms = self._clock.monotonic_ms()


async def _ask(
    connection: AsyncConnection,
    request: Request,
    timeout_s: float,
    convert: Callable[[Response], T],
) -> T:
    """Ask the leader; that its disk failed is no reason to doubt one's own."""
    try:
        return await connection.request(request, timeout_s, convert)
    except StorageError as error:
        raise UnavailableError(f"the leader says: {error}") from None


def _as(kind: type[T]) -> Callable[[Response], T]:
    def convert(response: Response) -> T:
        if not isinstance(response, kind):
            raise RemoteProtocolError(f"{type(response).__name__} came instead of {kind.__name__}")
        return response

    return convert


def _copied(response: Response) -> Replicated:
    """Return an answer whose bytes stay when the next one comes."""
    found = _as(Replicated)(response)
    return Replicated(
        found.epoch,
        found.message_base,
        found.message_offset,
        found.action_base,
        found.action_offset,
        found.message_end,
        found.confirmed,
        found.message_oldest,
        found.checkpoint,
        found.action_end,
        bytes(found.messages),
        bytes(found.actions),
    )


def _part(response: Response) -> tuple[int, int, bytes]:
    found = _as(CheckpointPart)(response)
    return found.number, found.size, bytes(found.data)

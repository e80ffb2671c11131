"""What followers ask of their leader: where to begin, bytes of both logs, and its checkpoint."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from pulque.broker.replication.leader import ReplicationLeader
from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    PositionLostError,
    PulqueError,
    StaleEpochError,
    UnavailableError,
)
from pulque.model.positions import ActionOffset, MessageOffset
from pulque.net.server import AcceptedConnection
from pulque.rules.replication import LogPoint, common_point
from pulque.storage.files import WouldBlockError
from pulque.wire.leadership import HandedOver, HandOver
from pulque.wire.replication import (
    CheckpointPart,
    CopyCheckpoint,
    Follow,
    Followed,
    Replicate,
    Replicated,
)

__all__ = ["Streams"]

_MOST_FOLLOWERS = 32
_MOST_BYTES = 8 * 1024 * 1024
_LONGEST_WAIT_MS = 10_000

Refuse = Callable[[PulqueError], None]


@dataclass(slots=True, eq=False)
class _CopyRequest:
    """A follower's question that waits for something to be written."""

    request: Replicate
    connection: AcceptedConnection
    answer: Callable[[Replicated], None]
    refuse: Refuse
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _CopyingFollower:
    """One follower, by its data directory."""

    name: str
    connection: AcceptedConnection
    answered_ms: int
    """When it was answered last, on the monotonic clock."""
    waiting: set[_CopyRequest] = field(default_factory=set)


class Streams:
    """Serves followers. Lives in one event loop.

    Args:
        leading: Knows who leads, and takes in how far followers are.
    """

    def __init__(self, leading: ReplicationLeader) -> None:
        self.leading = leading
        """Who leads, and what is confirmed."""
        self._engine = leading.engine
        self._clock = leading.clock
        self._epochs = leading.epochs
        self._followers: dict[str, _CopyingFollower] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        leading.on_written = self._written
        leading.on_over = self._dismiss

    def report(self) -> dict[str, object]:
        """Return how the group is led, and what is known of each follower, for people."""
        leading, now_ms = self.leading, self._clock.monotonic_ms()
        known = leading.leadership
        return {
            "role": "leader",
            "group": known.broker_group,
            "epoch": known.epoch,
            "is_open": leading.opened.is_set(),
            "is_whole": leading.is_whole,
            "in_sync": len(known.in_sync),
            "min_in_sync": known.min_in_sync,
            "message_end": leading.end.messages,
            "action_end": leading.end.actions,
            "confirmed": leading.in_sync.confirmed.messages,
            "followers": [self._row(each, now_ms) for each in leading.in_sync.followers],
        }

    def _row(self, directory: str, now_ms: int) -> dict[str, object]:
        leading, follower = self.leading, self._followers.get(directory)
        found = leading.in_sync.state_of(directory, now_ms)
        synced, behind_ms = found or (LogPoint(MessageOffset(0), ActionOffset(0)), 0)
        return {
            "name": "" if follower is None else follower.name,
            "directory": directory,
            "is_in_sync": directory in leading.leadership.in_sync,
            "is_connected": follower is not None,
            "message_synced": synced.messages,
            "action_synced": synced.actions,
            "behind_ms": behind_ms,
        }

    def follow(self, request: Follow, connection: AcceptedConnection) -> Followed:
        """Say where a follower goes on from.

        Raises:
            StaleEpochError: It takes this broker for the leader of another epoch.
            NotAllowedError: It is of another group, or has messages that nobody here knows.
        """
        leading = self.leading
        leading.check_epoch(request.epoch)
        group = leading.leadership.broker_group
        if request.broker_group != group:
            raise NotAllowedError(
                f"{request.name} is of broker group {request.broker_group}, and this is {group}"
            )
        newest = request.epochs[-1].epoch if request.epochs else 0
        if newest > leading.leadership.epoch:
            # Somebody else led since: to follow this one would drop what was confirmed then.
            raise StaleEpochError(
                f"{request.name} knows of epoch {newest}, and this broker leads in epoch "
                f"{leading.leadership.epoch}: it was replaced"
            )
        self._check_place(request, connection)
        leading.in_sync.gone(request.directory)
        point, is_anew = self._begin_at(request)
        if is_anew and request.directory in leading.in_sync.counted:
            # Before it empties its logs nobody may take it for one that could lead.
            leading.in_sync.lost(request.directory)
            raise UnavailableError(f"{request.name} counts as in sync; try again when it does not")
        now_ms = self._clock.monotonic_ms()
        self._followers[request.directory] = _CopyingFollower(request.name, connection, now_ms)
        return Followed(
            leading.leadership.epoch,
            is_anew,
            point.messages,
            point.actions,
            self._engine.newest_checkpoint,
            self._epochs,
        )

    def _check_place(self, request: Follow, connection: AcceptedConnection) -> None:
        """Refuse who takes up places of others."""
        for directory, follower in self._followers.items():
            if follower.connection is connection and directory != request.directory:
                raise NotAllowedError(f"this connection is that of {follower.name} already")
        known = {*self._followers, *self.leading.leadership.in_sync}
        if len(self._followers) >= _MOST_FOLLOWERS and request.directory not in known:
            raise OverloadedError(f"{len(self._followers)} follow this broker already")

    def _begin_at(self, request: Follow) -> tuple[LogPoint, bool]:
        """Return where a follower goes on, and whether it has to begin anew."""
        engine = self._engine
        oldest = LogPoint(
            MessageOffset(engine.segments[0].base), ActionOffset(engine.actions.segments[0].base)
        )
        if not request.message_end and not request.action_end:
            return oldest, True
        point = common_point(
            self._epochs,
            self.leading.end,
            request.epochs,
            LogPoint(MessageOffset(request.message_end), ActionOffset(request.action_end)),
        )
        if point is None:
            raise NotAllowedError(
                f"{request.name} has {request.message_end} bytes of messages from a time that the "
                f"leader of group {request.broker_group} knows nothing of: two logs are never "
                "merged. Give it an empty data directory, or start the broker first whose "
                "messages count"
            )
        return (point, False) if point.reaches(oldest) else (oldest, True)

    def replicate(
        self,
        request: Replicate,
        connection: AcceptedConnection,
        answer: Callable[[Replicated], None],
        refuse: Refuse,
    ) -> None:
        """Take in how far a follower is, and give it more, now or when there is more.

        Raises:
            StaleEpochError: It follows in another epoch.
            NotAllowedError: It did not say what it has.
        """
        self.leading.check_epoch(request.epoch)
        follower = self._followers.get(request.directory)
        if follower is None or follower.connection is not connection:
            raise NotAllowedError("a follower has to say what it has before it asks for more")
        self._check_synced(request)
        if request.max_bytes:
            # It asks after it was answered, and promises by it not to lead for a while.
            self.leading.tenancy.asked(request.directory, follower.answered_ms)
        synced = LogPoint(
            MessageOffset(request.message_synced), ActionOffset(request.action_synced)
        )
        asked = _CopyRequest(request, connection, answer, refuse)
        self.leading.heard(
            request.directory, synced, is_ready=request.is_ready, has_room=request.has_room
        )
        if request.max_bytes and not self._has_more(request):
            self._hold(asked, follower)
        else:
            self._serve(asked)

    def checkpoint(
        self,
        request: CopyCheckpoint,
        connection: AcceptedConnection,
        answer: Callable[[CheckpointPart], None],
        refuse: Refuse,
    ) -> None:
        """Give a follower a part of a checkpoint.

        Raises:
            NotAllowedError: It did not say what it has.
        """
        if not any(each.connection is connection for each in self._followers.values()):
            raise NotAllowedError("a follower has to say what it has before it asks for more")
        self._start(self._checkpoint(request, answer), refuse)

    def hand_over(
        self, request: HandOver, answer: Callable[[HandedOver], None], refuse: Refuse
    ) -> None:
        """Have another broker lead, as somebody commands."""

        async def hand_over() -> None:
            answer(HandedOver(await self.leading.hand_over(request.to)))

        self._start(hand_over(), refuse)

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget what a follower asked for."""
        for directory, follower in list(self._followers.items()):
            if follower.connection is connection:
                del self._followers[directory]
                self.leading.in_sync.forget(directory)
                for asked in follower.waiting:
                    if asked.timer is not None:
                        asked.timer.cancel()

    async def close(self) -> None:
        """Give up what is under way."""
        for follower in self._followers.values():
            for asked in follower.waiting:
                if asked.timer is not None:
                    asked.timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.leading.close()

    # -- inside ---------------------------------------------------------------------------------

    def _check_synced(self, request: Replicate) -> None:
        """Refuse a follower that says it has what there is not: it would be confirmed."""
        end = self.leading.end
        if request.message_synced > end.messages or request.action_synced > end.actions:
            raise InvalidRequestError(
                f"{request.message_synced} and {request.action_synced} bytes are synced at the "
                f"follower, and the logs end at {end.messages} and {end.actions}"
            )

    def _has_more(self, request: Replicate) -> bool:
        end = self.leading.end
        return request.message_offset < end.messages or request.action_offset < end.actions

    def _written(self) -> None:
        """Answer those who wait for more."""
        for follower in self._followers.values():
            for asked in [each for each in follower.waiting if self._has_more(each.request)]:
                self._release(asked, follower)

    def _dismiss(self) -> None:
        """Tell all who wait that this broker leads no more: they need not keep their promise."""
        for follower in self._followers.values():
            for asked in list(follower.waiting):
                follower.waiting.discard(asked)
                if asked.timer is not None:
                    asked.timer.cancel()
                asked.refuse(self.leading.refusal())

    def _hold(self, asked: _CopyRequest, follower: _CopyingFollower) -> None:
        wait_s = min(asked.request.wait_ms, _LONGEST_WAIT_MS) / 1000
        loop = asyncio.get_running_loop()
        asked.timer = loop.call_later(wait_s, self._release, asked, follower)
        follower.waiting.add(asked)

    def _release(self, asked: _CopyRequest, follower: _CopyingFollower) -> None:
        follower.waiting.discard(asked)
        if asked.timer is not None:
            asked.timer.cancel()
        self._serve(asked)

    def _serve(self, asked: _CopyRequest) -> None:
        try:
            found = self._read(asked.request, may_block=False)
        except WouldBlockError:
            self._start(self._serve_cold(asked), asked.refuse)
        except PulqueError as error:
            asked.refuse(error)
        else:
            self._answer(asked, found)

    async def _serve_cold(self, asked: _CopyRequest) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self.leading.executor, lambda: self._read(asked.request, may_block=True)
        )
        self._answer(asked, found)

    def _answer(self, asked: _CopyRequest, found: Replicated) -> None:
        follower = self._followers.get(asked.request.directory)
        is_its_own = follower is not None and follower.connection is asked.connection
        if follower is not None and is_its_own and asked.request.max_bytes:
            follower.answered_ms = self._clock.monotonic_ms()
        asked.answer(found)

    def _read(self, request: Replicate, *, may_block: bool) -> Replicated:
        """Return what comes next; may be called from any thread."""
        engine, leading = self._engine, self.leading
        most = min(request.max_bytes, _MOST_BYTES)
        end = leading.end
        message_base, message_offset, messages = 0, request.message_offset, b""
        action_base, action_offset, actions = 0, request.action_offset, b""
        if most and request.message_offset != end.messages:
            message_base, message_offset, messages = engine.message_bytes(
                MessageOffset(request.message_offset), most, may_block=may_block
            )
        if most and request.action_offset != end.actions:
            action_base, action_offset, actions = engine.action_bytes(
                ActionOffset(request.action_offset), most, may_block=may_block
            )
        return Replicated(
            leading.leadership.epoch,
            message_base,
            message_offset,
            action_base,
            action_offset,
            end.messages,
            leading.in_sync.confirmed.messages,
            engine.segments[0].base,
            engine.newest_checkpoint,
            end.actions,
            messages,
            actions,
        )

    async def _checkpoint(
        self, request: CopyCheckpoint, answer: Callable[[CheckpointPart], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        most = min(request.max_bytes, _MOST_BYTES)
        try:
            size, data = await loop.run_in_executor(
                self.leading.executor,
                lambda: self._engine.checkpoint_part(request.number, request.offset, most),
            )
        except PositionLostError:
            answer(CheckpointPart(0, 0, b""))
        else:
            answer(CheckpointPart(request.number, size, data))

    def _start(self, work: Coroutine[None, None, None], refuse: Refuse) -> None:
        """Have work done; what goes wrong with it is the asker's to hear, and ends nothing."""

        async def run() -> None:
            try:
                await work
            except PulqueError as error:
                refuse(error)
            except Exception as error:  # noqa: BLE001  # the root of a task
                refuse(UnavailableError(f"the leader could not do it: {error!r}"))

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

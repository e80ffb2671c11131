"""The leader's side of replication: who follows, what they have, and what is confirmed by that.

Followers ask for bytes of both logs. They get them as soon as they are written, while this broker
syncs them itself; what everybody who is in sync has on disk is confirmed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pulque.broker.receiving.admission import Gate
from pulque.broker.replication.leadership_client import Authority
from pulque.broker.state import Surroundings
from pulque.errors import (
    NotAllowedError,
    NotLeaderError,
    PulqueError,
    RejectedError,
    StaleEpochError,
    UnavailableError,
)
from pulque.model.leadership import EpochStart, Leadership
from pulque.model.positions import ActionOffset, MessageOffset
from pulque.rules.replication import InSync, LogPoint, Tenancy
from pulque.serving.commit import Committer
from pulque.storage.engine import Engine
from pulque.wire.leadership import ChangeInSync, Led

__all__ = ["ReplicationLeader", "Rule"]

_TICK_S = 0.05
_REFUSED_S = 1.0
_HAND_OVER_S = 3.0
_HAND_OVER_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Rule:
    """What a process is told when it is to lead."""

    led: Led
    """The leadership."""
    authority: Authority
    """Who says so, and goes on saying so."""
    epochs: tuple[EpochStart, ...]
    """Where leaderships began in this broker's logs, this one among them."""
    lag_ms: int
    """Who has not caught up for so long is not in sync."""
    heard_ms: int
    """When the meta servers were asked that said so, on the monotonic clock."""


class ReplicationLeader:
    """Leads a broker group. Lives in one event loop; made anew for every leadership.

    Args:
        rule: What it is told.
        engine: Its logs, opened in the epoch of the leadership.
        gate: Told whether messages may be taken.
        around: The world around it.
        info: Logs an event with its fields.
        deposed: Called once, when somebody else leads.
    """

    def __init__(  # noqa: PLR0915  # what it keeps track of
        self,
        rule: Rule,
        engine: Engine,
        gate: Gate,
        around: Surroundings,
        *,
        info: Callable[..., None],
        deposed: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.epochs = rule.epochs
        self.clock, self.executor = around.clock, around.executor
        self._authority = rule.authority
        self._gate = gate
        self._info = info
        self._deposed = deposed
        self.is_whole = True
        """Whether no log of this broker was found damaged: else it hands over."""
        self.is_over = False
        """Whether somebody else leads by now: then nobody is served any more."""
        leadership = rule.led.leadership
        now_ms = self.clock.monotonic_ms()
        self.in_sync = InSync(leadership, self.end, lag_ms=rule.lag_ms, now_ms=now_ms)
        self.tenancy = Tenancy(rule.led.lease_ms)
        self.tenancy.heard(rule.heard_ms)
        self._told = ("", "")
        self._turn = asyncio.Lock()
        """Of those who want it to hand over."""
        self._roomy: set[str] = set()
        """The followers that have room for messages."""
        self._resuming: asyncio.Task[None] | None = None
        self._is_leaving = False
        """Whether it is about to hand over: nobody is served then, lest two lead at once."""
        self.opened = asyncio.Event()
        """Set once all that there was is confirmed: only then is anybody served."""
        self.on_written: Callable[[], None] = lambda: None
        """Called when there is more to copy."""
        self.on_short: Callable[[PulqueError], None] = lambda _: None
        """Called when too few are in sync: nobody is told any more that a batch is kept."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when somebody else leads."""
        self._committer: Committer | None = None
        self._look()
        rule.authority.on_led = self._led

    @property
    def leadership(self) -> Leadership:
        """As the meta servers know it."""
        return self.in_sync.leadership

    @property
    def end(self) -> LogPoint:
        """How far both logs are written."""
        return LogPoint(MessageOffset(self.engine.segments[-1].end), self.engine.actions.end)

    def why_refused(self) -> NotLeaderError | None:
        """Return why clients are not served now; None while they are."""
        if (
            self.opened.is_set()
            and not self.is_over
            and not self._is_leaving
            and self.tenancy.holds(self.clock.monotonic_ms(), self.in_sync.counted)
        ):
            return None
        return self.refusal()

    def refusal(self) -> NotLeaderError:
        """Return what to say to whoever is not served."""
        if self.is_over or self._is_leaving:
            return NotLeaderError("this broker hands its leadership over; ask for the route again")
        if self.opened.is_set():
            return NotLeaderError(
                "this broker cannot tell whether it still leads its group; ask for the route again"
            )
        return NotLeaderError(
            "this broker has just been made the leader of its group and waits for those that are "
            "in sync; try again"
        )

    def check_epoch(self, epoch: int) -> None:
        """Refuse a follower of another leadership, or of one that is over.

        Raises:
            StaleEpochError: It is of another one.
            NotLeaderError: This one is over.
        """
        if self.is_over:
            raise self.refusal()
        if epoch != self.leadership.epoch:
            raise StaleEpochError(
                f"this broker leads in epoch {self.leadership.epoch}, and epoch {epoch} is "
                "followed: ask a meta server who leads"
            )

    # -- what the committer tells, and is told --------------------------------------------------

    def attach(self, committer: Committer) -> None:
        """Confirm what is committed there."""
        self._committer = committer

    def written(self) -> None:
        """Let followers have what is new."""
        self.on_written()

    @property
    def own(self) -> LogPoint:
        """What is on this broker's own disk."""
        return LogPoint(self.engine.synced, self.engine.actions.synced)

    def synced(self) -> None:
        """Take note that more is on this broker's own disk."""
        if self.in_sync.synced(self.own):
            self._confirm()

    def heard(
        self, directory: str, synced: LogPoint, *, is_ready: bool, has_room: bool = True
    ) -> None:
        """Take note of how far a follower is."""
        now_ms = self.clock.monotonic_ms()
        if has_room:
            self._roomy.add(directory)
        else:
            self._roomy.discard(directory)
        if self.in_sync.heard(directory, synced, self.end, now_ms, is_ready=is_ready):
            self._confirm()

    def _confirm(self) -> None:
        if self._committer is None:
            return
        point = self.in_sync.confirmed
        self._committer.confirm(MessageOffset(point.messages), ActionOffset(point.actions))
        if self.in_sync.has_begun and not self.opened.is_set():
            self.opened.set()
            self._info(
                "leadership_begun",
                epoch=self.leadership.epoch,
                in_sync=len(self.leadership.in_sync),
            )

    # -- who is in sync -------------------------------------------------------------------------

    def retire(self) -> None:
        """Serve nobody any more, whatever comes: the process ends."""
        self.is_over = True

    async def close(self) -> None:
        """Give up what is under way."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)

    async def run(self) -> None:
        """Keep the set of those that are in sync, until cancelled."""
        self.synced()
        while True:
            await asyncio.sleep(_TICK_S)
            # Facts that nobody waits for are copied, too: what is lost of them comes twice.
            self.on_written()
            wish = self.in_sync.wish(self.clock.monotonic_ms())
            if wish is not None and not self.is_over:
                await self._propose(wish)

    async def _propose(self, wish: tuple[str, ...]) -> None:
        self.in_sync.propose(wish)
        try:
            answer = await self._authority.change(self._change(wish))
        except RejectedError as error:
            self._tell("in_sync_not_changed", str(error))
            await self._settle()
            await asyncio.sleep(_REFUSED_S)
        except PulqueError as error:
            self.in_sync.unknown()
            self._tell("in_sync_not_changed", str(error))
            await asyncio.sleep(_REFUSED_S)
        else:
            self._take_in(answer.leadership, self.in_sync.decided)
            if self.leadership.in_sync != wish:
                self._tell("in_sync_not_changed", "the meta servers do not agree")
                await asyncio.sleep(_REFUSED_S)

    async def _settle(self) -> None:
        """Take in a refusal; what was asked for before, and may yet come true, is ended, too."""
        if not self.in_sync.was_unknown:
            self.in_sync.decided(self.leadership)
            return
        try:
            answer = await self._authority.change(self._change(self.leadership.in_sync))
        except PulqueError:
            self.in_sync.unknown()
        else:
            self._take_in(answer.leadership, self.in_sync.decided)

    def _tell(self, event: str, reason: str) -> None:
        """Log what is wrong; the same thing once."""
        if (event, reason) != self._told:
            self._info(event, reason=reason)
        self._told = (event, reason)

    def _change(self, in_sync: tuple[str, ...]) -> ChangeInSync:
        known = self.leadership
        return ChangeInSync(known.broker_group, known.token, known.epoch, known.version, in_sync)

    def _led(self, led: Led) -> None:
        """Take in what a meta server says."""
        self._take_in(led.leadership, self.in_sync.changed)

    def _take_in(self, heard: Leadership, tell: Callable[[Leadership], bool]) -> None:
        if not self.in_sync.is_mine(heard):
            if heard.version > self.leadership.version:
                self._authority.forget()
                self._end()
            return
        self.tenancy.heard(self._authority.heard_ms)
        before = self.leadership
        is_more = tell(heard)
        known = self.leadership
        if before.in_sync != known.in_sync:
            self._info("in_sync_changed", before=len(before.in_sync), now=len(known.in_sync))
        if (before.in_sync, before.min_in_sync) != (known.in_sync, known.min_in_sync):
            self._look()
        if is_more:
            self._confirm()

    def _look(self) -> None:
        """Take messages while enough are in sync."""
        known = self.leadership
        if not self.in_sync.is_short:
            self._gate.obstruct("")
            return
        text = (
            f"{len(known.in_sync)} brokers of group {known.broker_group} are in sync, and "
            f"{known.min_in_sync} have to be (replication.min_in_sync)"
        )
        self._gate.obstruct(text)
        self.on_short(UnavailableError(f"whether it will be kept is not known: {text}"))

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._info("leadership_over", epoch=self.leadership.epoch)
            self.on_over()
            self._deposed()

    # -- handing over ---------------------------------------------------------------------------

    async def hand_over(self, to: str = "") -> Leadership:
        """Have another broker lead, one that has all; serve nobody meanwhile.

        Args:
            to: Which one, by its data directory; any that is in sync if empty.

        Raises:
            NotAllowedError: That one is not in sync, or nobody else is.
            UnavailableError: It does not catch up in time, or no meta server agrees; this broker
                goes on leading then.
        """
        others = self.in_sync.counted
        if not others or to not in {"", *others}:
            group = self.leadership.broker_group
            who = f"{to} is not" if to else "nobody else is"
            raise NotAllowedError(f"{who} in sync in broker group {group}")
        async with self._turn:
            if self.is_over:
                raise self.refusal()
            self._is_leaving = True
            try:
                next_one = await self._until_somebody_has_all(to)
                rest = {*self.leadership.in_sync} - {self.leadership.leader, next_one}
                answer = await self._authority.change(self._change((next_one, *sorted(rest))))
            except RejectedError:
                self._is_leaving = False
                raise
            except PulqueError:
                self._resuming = asyncio.create_task(self._resume())
                raise
            self._is_leaving = False
        if not answer.is_done:
            raise UnavailableError("the meta servers did not agree that another broker leads")
        self._info("leadership_handed_over", epoch=answer.leadership.epoch)
        self._authority.forget()
        self._end()
        return answer.leadership

    async def make_room(self) -> None:
        """Have a follower lead that has room for messages, if this broker has none.

        Raises:
            PulqueError: It does not; this broker goes on leading then.
        """
        if not self.engine.is_full or self.is_over:
            return
        able = sorted(self.in_sync.counted & self._roomy)
        if able:
            self._info("leader_is_full", reason="a follower has room, and is to lead")
            await self.hand_over(able[0])

    async def _resume(self) -> None:
        """Go on leading, once it is certain that what was asked for cannot come true any more.

        The version that it was asked for is over then: nothing but that is changed.
        """
        while not self.is_over:
            try:
                answer = await self._authority.change(self._change(self.leadership.in_sync))
            except PulqueError as error:
                self._info("leadership_not_certain", reason=str(error))
                await asyncio.sleep(_REFUSED_S)
            else:
                self._is_leaving = False
                self._take_in(answer.leadership, self.in_sync.changed)
                return

    async def _until_somebody_has_all(self, to: str) -> str:
        """Return the broker that is to lead, or any that is in sync, once it has all."""
        deadline_ms = self.clock.monotonic_ms() + int(_HAND_OVER_S * 1000)
        while self.clock.monotonic_ms() < deadline_ms:
            whole = [each for each in self.in_sync.has_all(self.end) if to in {"", each}]
            if whole:
                return whole[0]
            await asyncio.sleep(_HAND_OVER_PAUSE_S)
        raise UnavailableError(f"no follower has caught up within {_HAND_OVER_S:g} s")

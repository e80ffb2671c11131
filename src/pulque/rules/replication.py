"""What a leader may call confirmed, who is in sync with it, and for how long it leads.

Three rules that a failover rests on:

- Up to where two logs are the same follows from where leaderships began in each (``common_end``).
- Confirmed is what everybody that is in sync has on disk; while the set changes, the larger one
  counts (``InSync``).
- A leader stops serving before another one can begin (``Tenancy``).

Time is the monotonic clock's.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pulque.model.leadership import EpochStart, Leadership
from pulque.model.positions import ActionOffset, MessageOffset

__all__ = ["InSync", "LogPoint", "Tenancy", "common_end", "common_point"]

_LEASE_SHARE = 0.9
"""Clocks of two machines run at the same speed, but for a tenth."""


class LogPoint(NamedTuple):
    """A place in both logs."""

    messages: MessageOffset
    actions: ActionOffset

    def reaches(self, other: "LogPoint") -> bool:
        """Whether nothing of both logs before ``other`` is behind this one."""
        return self.messages >= other.messages and self.actions >= other.actions


def common_point(
    ours: Sequence[EpochStart],
    our_end: LogPoint,
    theirs: Sequence[EpochStart],
    their_end: LogPoint,
) -> LogPoint | None:
    """Return up to where both logs of two brokers are the same; None if nobody can tell.

    Args:
        ours: Where leaderships began in the logs of the one; the oldest first.
        our_end: Where its logs end.
        theirs: The same of the other one.
        their_end: Likewise.
    """
    messages = common_end(
        [(each.epoch, each.messages) for each in ours],
        our_end.messages,
        [(each.epoch, each.messages) for each in theirs],
        their_end.messages,
    )
    actions = common_end(
        [(each.epoch, each.actions) for each in ours],
        our_end.actions,
        [(each.epoch, each.actions) for each in theirs],
        their_end.actions,
    )
    if messages is None or actions is None:
        return None
    return LogPoint(MessageOffset(messages), ActionOffset(actions))


def common_end(
    ours: Sequence[tuple[int, int]],
    our_end: int,
    theirs: Sequence[tuple[int, int]],
    their_end: int,
) -> int | None:
    """Return up to where one log is the same at two brokers; None if they share no leadership.

    There is one writer in each leadership, so what both have of it is the same as far as the
    shorter one goes; and a broker takes over the list of a leader only when its log is the
    beginning of that leader's.
    """
    shared = set(ours) & set(theirs)
    if not shared:
        return None
    epoch = max(shared)[0]
    return min(_end_of(epoch, ours, our_end), _end_of(epoch, theirs, their_end))


def _end_of(epoch: int, starts: Iterable[tuple[int, int]], end: int) -> int:
    """Return where a leadership ended in a log: where any later one began, or with the log."""
    return min([end, *(start for later, start in starts if later > epoch)])


class _Follower:
    """What the leader knows of one follower."""

    __slots__ = ("asked_at", "asked_ms", "caught_up_ms", "is_ready", "synced")

    def __init__(self, now_ms: int) -> None:
        self.synced = LogPoint(MessageOffset(0), ActionOffset(0))
        self.is_ready = False
        self.caught_up_ms = now_ms
        """When it last had all that there was."""
        self.asked_ms = now_ms
        self.asked_at: LogPoint | None = None
        """Where the leader's logs ended when it was heard of last; None if it never was."""


class InSync:
    """Who is in sync with a leader, and what is confirmed by that.

    Args:
        leadership: As it was granted.
        start: Where the logs were when it began.
        lag_ms: Who has not caught up for so long is not in sync.
        now_ms: The time.
    """

    def __init__(
        self, leadership: Leadership, start: LogPoint, *, lag_ms: int, now_ms: int
    ) -> None:
        self.leadership = leadership
        """As the meta servers know it."""
        self.confirmed = LogPoint(MessageOffset(0), ActionOffset(0))
        """Everybody who is in sync has both logs up to here, on disk."""
        self._start = start
        self._lag_ms = lag_ms
        self._me = leadership.leader
        self._own = LogPoint(MessageOffset(0), ActionOffset(0))
        self._proposed: tuple[str, ...] | None = None
        self._is_unknown = False
        """Nobody knows what became of what was proposed."""
        self.was_unknown = False
        """Whether that was so for any proposal since the leadership last changed."""
        self._followers = {
            each: _Follower(now_ms) for each in leadership.in_sync if each != self._me
        }

    @property
    def counted(self) -> set[str]:
        """Who has to have what is confirmed, besides the leader."""
        counted = {*self.leadership.in_sync, *(self._proposed or ())}
        return counted - {self._me}

    @property
    def is_short(self) -> bool:
        """Whether too few are in sync for messages to be taken."""
        return len(self.leadership.in_sync) < self.leadership.min_in_sync

    @property
    def has_begun(self) -> bool:
        """Whether all that there was when the leadership began is confirmed."""
        return self.confirmed.reaches(self._start)

    def synced(self, own: LogPoint) -> bool:
        """Take in how far the leader's own disk is; say whether more is confirmed."""
        self._own = own
        return self._advance()

    def heard(
        self, directory: str, synced: LogPoint, end: LogPoint, now_ms: int, *, is_ready: bool
    ) -> bool:
        """Take in how far a follower is; say whether more is confirmed by that.

        Args:
            directory: Who it is.
            synced: What it has on disk.
            end: Where the leader's logs end.
            now_ms: The time.
            is_ready: Whether it could lead.
        """
        follower = self._followers.setdefault(directory, _Follower(now_ms))
        if synced.reaches(end):
            follower.caught_up_ms = now_ms
        elif follower.asked_at is not None and synced.reaches(follower.asked_at):
            follower.caught_up_ms = max(follower.caught_up_ms, follower.asked_ms)
        if follower.asked_at is None or synced.reaches(follower.asked_at):
            follower.asked_at, follower.asked_ms = end, now_ms
        follower.synced, follower.is_ready = synced, is_ready
        return self._advance()

    def gone(self, directory: str) -> None:
        """Take in that a follower begins anew: what it had does not count before it says so."""
        follower = self._followers.get(directory)
        if follower is not None:
            follower.synced = LogPoint(MessageOffset(0), ActionOffset(0))
            follower.is_ready, follower.asked_at = False, None

    def forget(self, directory: str) -> None:
        """Take in that a follower is not connected any more; one that is in sync is waited for."""
        if directory not in self.counted:
            self._followers.pop(directory, None)

    def lost(self, directory: str) -> None:
        """Take in that a follower does not have what it had: it must not stay in sync."""
        self.gone(directory)
        follower = self._followers.get(directory)
        if follower is not None:
            follower.asked_at = self.confirmed
            follower.caught_up_ms = -(10**15)

    def wish(self, now_ms: int) -> tuple[str, ...] | None:
        """Return who should be in sync, if that is another set than the one that is."""
        if self._proposed is not None:
            # Once more until somebody says what became of it: meanwhile both sets count.
            return self._proposed if self._is_unknown else None
        known = set(self.leadership.in_sync)
        wanted = {self._me, *filter(lambda each: self._keeps_up(each, now_ms), known - {self._me})}
        wanted |= {each for each in self._followers if self._may_join(each, now_ms)}
        return tuple(sorted(wanted)) if wanted != known else None

    def propose(self, in_sync: tuple[str, ...]) -> None:
        """Take in that a set was proposed to the meta servers: from now on both sets count."""
        self._proposed, self._is_unknown = in_sync, False

    def unknown(self) -> None:
        """Take in that nobody knows what became of the proposal: it may yet come true."""
        self._is_unknown = self.was_unknown = True

    def decided(self, leadership: Leadership) -> bool:
        """Take in the answer to the proposal; say whether more is confirmed."""
        self._proposed, self._is_unknown = None, False
        self.was_unknown = False
        return self.changed(leadership)

    def changed(self, leadership: Leadership) -> bool:
        """Take in a leadership as the meta servers know it; say whether more is confirmed.

        That of another epoch is none of this leader's: it confirms nothing any more by it.
        """
        if not self.is_mine(leadership) or leadership.version <= self.leadership.version:
            return False
        # Whatever was proposed was proposed for the version before: that is over.
        self._proposed, self._is_unknown = None, False
        self.was_unknown = False
        self.leadership = leadership
        return self._advance()

    def is_mine(self, leadership: Leadership) -> bool:
        """Whether a leadership is the one that this leader was granted."""
        mine = self.leadership
        return (leadership.epoch, leadership.token) == (mine.epoch, mine.token)

    def state_of(self, directory: str, now_ms: int) -> tuple[LogPoint, int] | None:
        """Return how far a follower is, and for how long it has not caught up, in ms."""
        follower = self._followers.get(directory)
        return None if follower is None else (follower.synced, now_ms - follower.caught_up_ms)

    @property
    def followers(self) -> list[str]:
        """All that were ever heard of."""
        return sorted(self._followers)

    def has_all(self, end: LogPoint) -> list[str]:
        """Return which of those that are in sync have the logs up to a place."""
        return [
            each
            for each in self.leadership.in_sync
            if each in self._followers and self._followers[each].synced.reaches(end)
        ]

    def _advance(self) -> bool:
        points = [self._own, *(self._synced_of(each) for each in self.counted)]
        found = LogPoint(
            max(self.confirmed.messages, min(each.messages for each in points)),
            max(self.confirmed.actions, min(each.actions for each in points)),
        )
        if found == self.confirmed:
            return False
        self.confirmed = found
        return True

    def _synced_of(self, directory: str) -> LogPoint:
        follower = self._followers.get(directory)
        return follower.synced if follower else LogPoint(MessageOffset(0), ActionOffset(0))

    def _keeps_up(self, directory: str, now_ms: int) -> bool:
        follower = self._followers.get(directory)
        if follower is None:
            return False
        # One that was in sync and is behind what is confirmed lost it: nobody may elect it.
        has_lost = follower.asked_at is not None and not follower.synced.reaches(self.confirmed)
        return now_ms - follower.caught_up_ms <= self._lag_ms and not has_lost

    def _may_join(self, directory: str, now_ms: int) -> bool:
        follower = self._followers[directory]
        return (
            follower.is_ready
            and follower.asked_at is not None
            and now_ms - follower.caught_up_ms <= self._lag_ms
            and follower.synced.reaches(self.confirmed)
            and follower.synced.reaches(self._start)
        )


class Tenancy:
    """For how long a leader may be sure that nobody else leads.

    Args:
        lease_ms: For how long a meta server waits before it has another one elected, and a
            follower before it leads, after it last asked its leader for more.
    """

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = int(lease_ms * _LEASE_SHARE)
        self._heard_ms: int | None = None
        self._asked_ms: dict[str, int] = {}

    def heard(self, sent_ms: int) -> None:
        """Take in that a meta server answered what was sent at a time."""
        self._heard_ms = max(sent_ms, self._heard_ms or sent_ms)

    def asked(self, directory: str, since_ms: int) -> None:
        """Take in that a follower asked for more, not before a time."""
        self._asked_ms[directory] = max(since_ms, self._asked_ms.get(directory, since_ms))

    def holds(self, now_ms: int, others: Iterable[str]) -> bool:
        """Whether nobody else can lead now.

        Args:
            now_ms: The time.
            others: Who could be elected: all that are in sync, but the leader.
        """
        if self._heard_ms is not None and now_ms - self._heard_ms <= self._lease_ms:
            return True
        # Those who promised not to lead yet do not, and with nobody else there is nobody.
        asked = self._asked_ms
        return all(
            now_ms - asked.get(each, -self._lease_ms - 1) <= self._lease_ms for each in others
        )

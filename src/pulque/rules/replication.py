"""What a leader may confirm, which followers are in sync, and how long it may lead.

Three rules that failover relies on:

- The beginnings of leaderships in two logs determine up to where these are the same
  (``common_end``).
- A message is confirmed when every in-sync broker has it on disk; while the set changes, the
  larger set counts (``InSync``).
- A leader stops serving before another one can begin (``Tenancy``).

Time is the monotonic clock's.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pulque.model.leadership import EpochStart, Leadership
from pulque.model.positions import ActionOffset, MessageOffset

__all__ = ["InSync", "LogPoint", "Tenancy", "common_end", "common_point"]

_LEASE_SHARE = 0.9
"""A leader uses 90 % of its lease: clocks of two machines may differ by a tenth in speed."""


class LogPoint(NamedTuple):
    """A place in both logs."""

    messages: MessageOffset
    actions: ActionOffset

    def reaches(self, other: "LogPoint") -> bool:
        """Return whether this point is at or beyond ``other`` in both logs."""
        return self.messages >= other.messages and self.actions >= other.actions


def common_point(
    ours: Sequence[EpochStart],
    our_end: LogPoint,
    theirs: Sequence[EpochStart],
    their_end: LogPoint,
) -> LogPoint | None:
    """Return up to where both logs of two brokers are the same; None if that is unknown.

    Args:
        ours: Where leaderships began in the logs of one broker; the oldest first.
        our_end: The ends of its logs.
        theirs: The same of the other broker.
        their_end: The ends of the other's logs.
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

    Each leadership has one writer, so the parts that both brokers have of it are the same up to
    the end of the shorter one; and a broker adopts a leader's list only when its log is the
    beginning of that leader's.
    """
    shared = set(ours) & set(theirs)
    if not shared:
        return None
    epoch = max(shared)[0]
    return min(_end_of(epoch, ours, our_end), _end_of(epoch, theirs, their_end))


def _end_of(epoch: int, starts: Iterable[tuple[int, int]], end: int) -> int:
    """Return where a leadership ended in a log: where the next one began, or the end."""
    return min([end, *(start for later, start in starts if later > epoch)])


class _Follower:
    """What the leader knows of one follower."""

    __slots__ = ("asked_at", "asked_ms", "caught_up_ms", "is_ready", "synced")

    def __init__(self, now_ms: int) -> None:
        self.synced = LogPoint(MessageOffset(0), ActionOffset(0))
        self.is_ready = False
        self.caught_up_ms = now_ms
        """When it last had everything."""
        self.asked_ms = now_ms
        self.asked_at: LogPoint | None = None
        """The ends of the leader's logs at its last request; None before the first."""


class InSync:
    """The in-sync set of a leader, and what is confirmed by it.

    Args:
        leadership: The granted leadership.
        start: The ends of the logs when it began.
        lag_ms: A follower that has not caught up for so long is not in sync.
        now_ms: The time.
    """

    def __init__(
        self, leadership: Leadership, start: LogPoint, *, lag_ms: int, now_ms: int
    ) -> None:
        self.leadership = leadership
        """As the meta servers know it."""
        self.confirmed = LogPoint(MessageOffset(0), ActionOffset(0))
        """Every in-sync broker has both logs up to here on disk."""
        self._start = start
        self._lag_ms = lag_ms
        self._me = leadership.leader
        self._own = LogPoint(MessageOffset(0), ActionOffset(0))
        self._proposed: tuple[str, ...] | None = None
        self._is_unknown = False
        """Whether the outcome of the proposal is unknown."""
        self.was_unknown = False
        """Whether any outcome was unknown since the leadership last changed."""
        self._followers = {
            each: _Follower(now_ms) for each in leadership.in_sync if each != self._me
        }

    @property
    def counted(self) -> set[str]:
        """The followers that must have a message before it is confirmed."""
        counted = {*self.leadership.in_sync, *(self._proposed or ())}
        return counted - {self._me}

    @property
    def is_short(self) -> bool:
        """Whether too few brokers are in sync to take messages."""
        return len(self.leadership.in_sync) < self.leadership.min_in_sync

    @property
    def has_begun(self) -> bool:
        """Whether everything from before the leadership is confirmed."""
        return self.confirmed.reaches(self._start)

    def synced(self, own: LogPoint) -> bool:
        """Record the leader's synced point; return whether more is confirmed."""
        self._own = own
        return self._advance()

    def heard(
        self, directory: str, synced: LogPoint, end: LogPoint, now_ms: int, *, is_ready: bool
    ) -> bool:
        """Record a follower's progress; return whether more is confirmed.

        Args:
            directory: The id of its data directory.
            synced: Up to where it has the logs on disk.
            end: The ends of the leader's logs.
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
        """Record that a follower starts over: its progress counts when it reports again."""
        follower = self._followers.get(directory)
        if follower is not None:
            follower.synced = LogPoint(MessageOffset(0), ActionOffset(0))
            follower.is_ready, follower.asked_at = False, None

    def forget(self, directory: str) -> None:
        """Record that a follower disconnected; the leader still waits for it if it is in sync."""
        if directory not in self.counted:
            self._followers.pop(directory, None)

    def lost(self, directory: str) -> None:
        """Record that a follower has lost bytes: it must leave the in-sync set."""
        self.gone(directory)
        follower = self._followers.get(directory)
        if follower is not None:
            follower.asked_at = self.confirmed
            follower.caught_up_ms = -(10**15)

    def wish(self, now_ms: int) -> tuple[str, ...] | None:
        """Return the desired in-sync set, if it differs from the present one."""
        if self._proposed is not None:
            # Once more until somebody says what became of it: meanwhile both sets count.
            return self._proposed if self._is_unknown else None
        known = set(self.leadership.in_sync)
        wanted = {self._me, *filter(lambda each: self._keeps_up(each, now_ms), known - {self._me})}
        wanted |= {each for each in self._followers if self._may_join(each, now_ms)}
        return tuple(sorted(wanted)) if wanted != known else None

    def propose(self, in_sync: tuple[str, ...]) -> None:
        """Record that a set was proposed to the meta servers: from now on both sets count."""
        self._proposed, self._is_unknown = in_sync, False

    def unknown(self) -> None:
        """Record that the outcome of the proposal is unknown: it may still take effect."""
        self._is_unknown = self.was_unknown = True

    def decided(self, leadership: Leadership) -> bool:
        """Apply the answer to the proposal; return whether more is confirmed."""
        self._proposed, self._is_unknown = None, False
        self.was_unknown = False
        return self.changed(leadership)

    def changed(self, leadership: Leadership) -> bool:
        """Apply the leadership as the meta servers know it; return whether more is confirmed.

        A leadership of another epoch is another leader's, and confirms nothing here.
        """
        if not self.is_mine(leadership) or leadership.version <= self.leadership.version:
            return False
        # Whatever was proposed was proposed for the version before: that is over.
        self._proposed, self._is_unknown = None, False
        self.was_unknown = False
        self.leadership = leadership
        return self._advance()

    def is_mine(self, leadership: Leadership) -> bool:
        """Return whether a leadership is the one that this leader was granted."""
        mine = self.leadership
        return (leadership.epoch, leadership.token) == (mine.epoch, mine.token)

    def state_of(self, directory: str, now_ms: int) -> tuple[LogPoint, int] | None:
        """Return a follower's synced point, and for how long it has not caught up, in ms."""
        follower = self._followers.get(directory)
        return None if follower is None else (follower.synced, now_ms - follower.caught_up_ms)

    @property
    def followers(self) -> list[str]:
        """All followers that ever connected."""
        return sorted(self._followers)

    def has_all(self, end: LogPoint) -> list[str]:
        """Return the in-sync followers that have the logs up to a point."""
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
    """How long a leader can be sure that no other broker leads.

    Args:
        lease_ms: How long a meta server waits before it has another broker elected, and a
            follower before it leads, after its last request to the leader.
    """

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = int(lease_ms * _LEASE_SHARE)
        self._heard_ms: int | None = None
        self._asked_ms: dict[str, int] = {}

    def heard(self, sent_ms: int) -> None:
        """Record that a meta server answered a request that was sent at this time."""
        self._heard_ms = max(sent_ms, self._heard_ms or sent_ms)

    def asked(self, directory: str, since_ms: int) -> None:
        """Record that a follower sent a request, not before this time."""
        self._asked_ms[directory] = max(since_ms, self._asked_ms.get(directory, since_ms))

    def holds(self, now_ms: int, others: Iterable[str]) -> bool:
        """Return whether no other broker can lead now.

        Args:
            now_ms: The time.
            others: The brokers that could be elected: all in-sync ones, except the leader.
        """
        if self._heard_ms is not None and now_ms - self._heard_ms <= self._lease_ms:
            return True
        # Those who promised not to lead yet do not, and with nobody else there is nobody.
        asked = self._asked_ms
        return all(
            now_ms - asked.get(each, -self._lease_ms - 1) <= self._lease_ms for each in others
        )

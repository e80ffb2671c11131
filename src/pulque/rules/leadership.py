"""Decide who leads a broker group.

Only in-sync brokers can be elected, as only they are known to have every confirmed message.
Every decision is based on one row as a meta server saw it, and replaces only that very row:
its version identifies it. An election begins the next epoch, so no two leaders share one.

Time is the monotonic clock's.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

from pulque.model.cluster import Placement, Serving
from pulque.model.leadership import Leadership
from pulque.model.names import PartitionName, Pattern
from pulque.model.positions import Epoch
from pulque.model.routes import PartitionRoute, Route
from pulque.rules.routing import NO_SLOTS, version_of

__all__ = [
    "ElectionCandidate",
    "Vigil",
    "asked",
    "beat_within",
    "change_in_sync",
    "elect",
    "found",
    "hand_over",
    "is_short",
    "replace_leader",
    "route_of_followers",
    "set_min_in_sync",
    "without",
]


BEATS = 5
"""How many heartbeats fit into a leader's lease."""


class ElectionCandidate(NamedTuple):
    """A broker of a group, as of its last heartbeat."""

    directory: str
    """The id of its data directory."""
    name: str
    token: str
    """The random token of its process."""
    message_end: int
    """The sum of the ends of its two logs."""
    is_fit: bool
    """Whether its logs are intact."""
    is_alive: bool = True


class _Seen(NamedTuple):
    sign: Hashable
    since_ms: int


class Vigil:
    """Measure how long leaders are silent, as one meta server sees them in periodic polls.

    A leader is silent for as long as consecutive polls found the same sign of life. A poll that
    is late restarts all measurements: a meta server that was paused has missed polls, and what
    it reads first after that is old.
    """

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        """A leader that is silent for this long is replaced."""
        self._seen: dict[str, _Seen] = {}
        self._looked_ms: int | None = None

    def look(
        self, signs: Mapping[str, Hashable], began_ms: int, ended_ms: int
    ) -> Mapping[str, int]:
        """Record one poll of all leaders; return for how long each sign of life is unchanged.

        Args:
            signs: By broker group; a value that changes with each heartbeat of the leader.
            began_ms: When reading began: an unchanged leader was silent at least until then.
            ended_ms: When reading ended: a changed sign is at most as recent as this.
        """
        is_late = self._looked_ms is None or ended_ms - self._looked_ms > self.lease_ms // 2
        before = {} if is_late else self._seen
        self._looked_ms = ended_ms
        self._seen = {
            group: seen
            if (seen := before.get(group)) is not None and seen.sign == sign
            else _Seen(sign, ended_ms)
            for group, sign in signs.items()
        }
        return {group: max(began_ms - seen.since_ms, 0) for group, seen in self._seen.items()}


def beat_within(lease_ms: int) -> int:
    """Return the heartbeat interval of brokers, so that several heartbeats fit in a lease."""
    return max(lease_ms // BEATS, 1)


def found(broker_group: str, first: ElectionCandidate, min_in_sync: int) -> Leadership:
    """Return the first leadership of a broker group."""
    return Leadership(
        broker_group, Epoch(1), 1, first.directory, first.token, (first.directory,), min_in_sync
    )


def elect(
    row: Leadership, chosen: ElectionCandidate, in_sync: Collection[str] | None = None
) -> Leadership:
    """Return the leadership of a chosen broker, in the next epoch.

    Args:
        row: The leadership before.
        chosen: The broker that is to lead.
        in_sync: The in-sync brokers, if they differ from before.

    Raises:
        ValueError: The chosen broker is not in sync: it might lack confirmed messages.
    """
    having_all = row.in_sync if in_sync is None else tuple(sorted(set(in_sync)))
    if chosen.directory not in having_all or chosen.directory not in row.in_sync:
        raise ValueError(f"{chosen.directory} is not in sync, and cannot be elected")
    return row._replace(
        epoch=Epoch(row.epoch + 1),
        version=row.version + 1,
        leader=chosen.directory,
        token=chosen.token,
        in_sync=having_all,
    )


def replace_leader(row: Leadership, candidates: Iterable[ElectionCandidate]) -> Leadership | None:
    """Return the leadership of another broker; None if none can lead."""
    rest = [each for each in row.in_sync if each != row.leader]
    return hand_over(row, rest, candidates)


def hand_over(
    row: Leadership,
    in_sync: Collection[str],
    candidates: Iterable[ElectionCandidate],
    preferred: str = "",
) -> Leadership | None:
    """Return the leadership of one of the brokers that have everything; None if none can lead.

    All of them have every confirmed message. The one with the longest log also keeps most of the
    unconfirmed ones; the leader that hands over may know better which one that is.
    """
    able = [
        each
        for each in candidates
        if each.directory in in_sync
        and each.directory in row.in_sync
        and each.directory != row.leader
        and each.is_alive
        and each.is_fit
    ]
    if not able:
        return None
    chosen = min(
        able, key=lambda each: (each.directory != preferred, -each.message_end, each.name)
    )
    return elect(row, chosen, in_sync)


def change_in_sync(row: Leadership, in_sync: Collection[str]) -> Leadership:
    """Return the same leadership with other in-sync brokers.

    Raises:
        ValueError: The leader is not one of them.
    """
    if row.leader not in in_sync:
        raise ValueError(f"{row.leader} leads, and is not among those that are in sync")
    return row._replace(version=row.version + 1, in_sync=tuple(sorted(set(in_sync))))


def without(row: Leadership, gone: Collection[str]) -> Leadership | None:
    """Return the same leadership without followers that left; None if none was in sync."""
    rest = [each for each in row.in_sync if each == row.leader or each not in gone]
    return change_in_sync(row, rest) if len(rest) < len(row.in_sync) else None


def set_min_in_sync(
    row: Leadership, leader: ElectionCandidate, min_in_sync: int
) -> Leadership | None:
    """Return the leadership with the leader's ``min_in_sync``; None if that is unchanged.

    Only the leader's setting counts; other brokers' settings count when they lead.
    """
    if (leader.directory, leader.token) != (row.leader, row.token):
        return None
    if not min_in_sync or min_in_sync == row.min_in_sync:
        return None
    return row._replace(version=row.version + 1, min_in_sync=min_in_sync)


def asked(
    row: Leadership, asker: ElectionCandidate, candidates: Iterable[ElectionCandidate]
) -> tuple[Leadership, str] | None:
    """Return the leadership after a broker's ``Lead`` request, and the reason; None if unchanged.

    A leadership belongs to the process that it was granted to. A process that was started later on
    the same directory has every confirmed message, but not the memory of the earlier one: it leads
    in an epoch of its own. If another in-sync broker has more, that one leads instead: the disk
    may have lost bytes, which would then be dropped everywhere.
    """
    is_leader = asker.directory == row.leader
    if not asker.is_fit:
        if is_leader:
            other = replace_leader(row, candidates)
            return None if other is None else (other, "the leader's logs are not whole")
        rest = [each for each in row.in_sync if each != asker.directory]
        if len(rest) == len(row.in_sync):
            return None
        return change_in_sync(row, rest), ""
    if not is_leader or asker.token == row.token:
        return None
    longer = [each for each in candidates if each.message_end > asker.message_end]
    other = replace_leader(row, longer)
    if other is not None:
        return other, "the leader was started anew, and another one has more"
    return elect(row, asker), "the leader was started anew"


def is_short(row: Leadership) -> bool:
    """Return whether too few brokers are in sync to take messages."""
    return len(row.in_sync) < row.min_in_sync


def route_of_followers(
    pattern: Pattern,
    placed: Iterable[Placement] | None,
    followers: Mapping[str, Iterable[Serving]],
) -> Route:
    """Return the route to the followers of the brokers that serve a subject.

    Args:
        pattern: The subject, or a pattern.
        placed: The partitions of the subject; None for a pattern, which any group may serve.
        followers: The live followers, by broker group.
    """
    if placed is None:
        name = PartitionName(pattern)
        places = [(name, group) for group in sorted(followers)]
    else:
        places = [(each.partition, each.broker_group) for each in placed]
    found_there = tuple(
        PartitionRoute(partition, group, there.host, there.port, sends=0, slots=NO_SLOTS)
        for partition, group in places
        for there in followers.get(group, ())
    )
    return Route(pattern, version_of(found_there), found_there)

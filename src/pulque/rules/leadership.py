"""Who leads a broker group: what is decided about it, and when.

Only those that are in sync can be elected, as only they are known to have all that was confirmed.
Every decision is made from one row as somebody saw it, and is written only over that very row:
its version names it. An election makes the next epoch, so that no two leaders have the same.

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
    "Candidate",
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
"""How often a leader is heard of within its lease."""


class Candidate(NamedTuple):
    """A broker of a group, as it was heard of last."""

    directory: str
    """The id of its data directory."""
    name: str
    token: str
    """Of its process."""
    message_end: int
    """How far its logs reach, both together."""
    is_fit: bool
    """Whether its logs are whole."""
    is_alive: bool = True


class _Seen(NamedTuple):
    sign: Hashable
    since_ms: int


class Vigil:
    """What one meta server sees of the leaders, look by look.

    A leader is silent for as long as looks in a row found the same sign of life. One look that
    comes late begins everything anew: whoever was stopped for a while has seen nothing meanwhile,
    and what it wakes up with is old.
    """

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        """Who is silent for this long does not lead any more."""
        self._seen: dict[str, _Seen] = {}
        self._looked_ms: int | None = None

    def look(
        self, signs: Mapping[str, Hashable], began_ms: int, ended_ms: int
    ) -> Mapping[str, int]:
        """Take in the signs of life of all leaders; return for how long each did not change.

        Args:
            signs: By broker group; whatever differs when the leader was heard of.
            began_ms: When they began to be read: what is silent was so until then, at least.
            ended_ms: When they were read: what is new is so from then on, at the latest.
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
    """Return how often brokers say that they live, so that several of them fit in a lease."""
    return max(lease_ms // BEATS, 1)


def found(broker_group: str, first: Candidate, min_in_sync: int) -> Leadership:
    """Return the first leadership of a broker group."""
    return Leadership(
        broker_group, Epoch(1), 1, first.directory, first.token, (first.directory,), min_in_sync
    )


def elect(
    row: Leadership, chosen: Candidate, in_sync: Collection[str] | None = None
) -> Leadership:
    """Return the leadership of a broker that was chosen, in the next epoch.

    Args:
        row: The leadership before.
        chosen: Who is to lead.
        in_sync: Who has all that was confirmed, if not the same as before.

    Raises:
        ValueError: The chosen one is not in sync: it might lack what was confirmed.
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


def replace_leader(row: Leadership, candidates: Iterable[Candidate]) -> Leadership | None:
    """Return the leadership of another one in the place of the leader; None if there is nobody."""
    rest = [each for each in row.in_sync if each != row.leader]
    return hand_over(row, rest, candidates)


def hand_over(
    row: Leadership,
    in_sync: Collection[str],
    candidates: Iterable[Candidate],
    preferred: str = "",
) -> Leadership | None:
    """Return the leadership of one of those that have everything; None if none of them can.

    All of them have what was confirmed. The one with the longest log also keeps most of what was
    sent and not confirmed yet; who hands over may know better who that is.
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
    """Return the same leadership with others in sync.

    Raises:
        ValueError: The leader is not among them.
    """
    if row.leader not in in_sync:
        raise ValueError(f"{row.leader} leads, and is not among those that are in sync")
    return row._replace(version=row.version + 1, in_sync=tuple(sorted(set(in_sync))))


def without(row: Leadership, gone: Collection[str]) -> Leadership | None:
    """Return the same leadership without followers that left; None if none was in sync."""
    rest = [each for each in row.in_sync if each == row.leader or each not in gone]
    return change_in_sync(row, rest) if len(rest) < len(row.in_sync) else None


def set_min_in_sync(row: Leadership, leader: Candidate, min_in_sync: int) -> Leadership | None:
    """Return the same leadership as its leader is told to lead it; None if that is the same.

    Only the process that leads decides: what others are told counts when they lead.
    """
    if (leader.directory, leader.token) != (row.leader, row.token):
        return None
    if not min_in_sync or min_in_sync == row.min_in_sync:
        return None
    return row._replace(version=row.version + 1, min_in_sync=min_in_sync)


def asked(
    row: Leadership, asker: Candidate, candidates: Iterable[Candidate]
) -> tuple[Leadership, str] | None:
    """Return what follows from a broker's question who leads, and why; None if nothing does.

    A leadership belongs to the process that it was granted to. One that was started later has its
    directory, and all that was confirmed, but not its memory: it begins in an epoch of its own.
    Unless somebody else that is in sync has more: then perhaps its disk lost something, and what
    it lacks would be dropped everywhere.
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
    """Whether too few are in sync for messages to be taken."""
    return len(row.in_sync) < row.min_in_sync


def route_of_followers(
    pattern: Pattern,
    placed: Iterable[Placement] | None,
    followers: Mapping[str, Iterable[Serving]],
) -> Route:
    """Return who copies what serves a subject.

    Args:
        pattern: The subject, or a pattern.
        placed: The partitions of the subject; None for a pattern, which any group may serve.
        followers: Those that live, by broker group.
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

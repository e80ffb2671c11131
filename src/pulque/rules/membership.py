"""Who belongs to a cluster, who lives, and who takes messages.

A server says again and again that it is there. One that is silent for three times its interval
leaves the routes until it is heard again; it stays known. A name belongs to one data directory as
long as its server lives: a restart is known by its directory. So does a broker group, unless it
has a leadership: then one of its brokers serves, and the others follow.

Time is the monotonic clock's.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from pulque.errors import FencedError, NotAllowedError
from pulque.model.cluster import GroupMarks, Server, ServerState, Serving
from pulque.model.leadership import Leadership
from pulque.model.routes import Role
from pulque.rules.leadership import is_short

__all__ = [
    "MISSED_BEATS",
    "Change",
    "Heard",
    "check_cluster",
    "check_directory",
    "check_owner",
    "clock_warning",
    "decide",
    "following_brokers",
    "is_living",
    "serving_brokers",
    "serving_delays",
    "usable_groups",
]

MISSED_BEATS = 3
"""A server is silent once it missed so many."""
_NO_MARKS = GroupMarks()


class Change(Enum):
    """What a registration changes."""

    NOTHING = 0
    """It is a heartbeat."""
    STATE = 1
    """A server that is known comes back, moved, or says something else about itself."""
    NEW = 2
    """Nobody knew of this server."""


class Heard:
    """When each server was heard of last, by its name."""

    def __init__(self, beat_ms: int) -> None:
        self.silence_ms = MISSED_BEATS * beat_ms
        """Who was not heard of for longer is silent."""
        self._at_ms: dict[str, int] = {}

    def hear(self, name: str, now_ms: int) -> None:
        """Take note that a server lives."""
        self._at_ms[name] = max(now_ms, self._at_ms.get(name, now_ms))

    def forget(self, name: str) -> None:
        """Take note that a server is gone."""
        self._at_ms.pop(name, None)

    def silent_ms(self, name: str, now_ms: int) -> int | None:
        """Return how long a server was silent; None if it was never heard of, or is gone."""
        at_ms = self._at_ms.get(name)
        return None if at_ms is None else now_ms - at_ms

    def is_alive(self, name: str, now_ms: int) -> bool:
        """Whether a server was heard of lately."""
        at_ms = self._at_ms.get(name)
        return at_ms is not None and now_ms - at_ms <= self.silence_ms


def check_cluster(asked: str, ours: str, name: str) -> None:
    """Refuse a server of another cluster.

    Raises:
        NotAllowedError: It belongs to another one.
    """
    if asked and asked != ours:
        raise NotAllowedError(
            f"{name} belongs to cluster {asked}, and this meta server to cluster {ours}: its "
            "settings name the wrong meta servers, or its data directory is of another cluster"
        )


def decide(known: Server | None, asked: Server, *, is_alive: bool) -> Change:
    """Return what a registration changes.

    Args:
        known: The server of this name, if there is one.
        asked: What registers.
        is_alive: Whether the known one was heard of lately.

    Raises:
        NotAllowedError: Another living server has this name.
        FencedError: A later start on the same directory registered before, or as many starts of
            a copy.
    """
    if known is None or known.is_removed:
        return Change.NEW
    if known.directory != asked.directory:
        if is_alive and known.state is not ServerState.LEAVING:
            raise NotAllowedError(
                f"the name {asked.name} is taken by the server at {known.address}, which lives: "
                "give this one another name"
            )
        return Change.STATE
    if asked.incarnation < known.incarnation:
        raise FencedError(
            f"{asked.name} registers with incarnation {asked.incarnation}, and "
            f"{known.incarnation} did before from {known.address}: this process is the older one, "
            f"or its data directory {asked.directory} is an older copy. Stop the other one first, "
            "or give this one an empty data directory and another name"
        )
    is_twin = asked.incarnation == known.incarnation and asked.address != known.address
    if is_twin and is_alive and known.state is not ServerState.LEAVING:
        # A process keeps its address, and every start has a number of its own.
        raise FencedError(_in_use(asked, known))
    return Change.NOTHING if known == asked else Change.STATE


def check_owner(
    servers: Iterable[Server],
    asked: Server,
    heard: Heard,
    now_ms: int,
    leaderships: Mapping[str, Leadership],
) -> None:
    """Refuse a broker that would serve, or follow, beside one that stands alone.

    Raises:
        NotAllowedError: Its broker group belongs to another one.
    """
    if asked.role is not Role.BROKER:
        return
    row = leaderships.get(asked.broker_group)
    others = [
        each
        for each in servers
        if each.role is Role.BROKER
        and each.broker_group == asked.broker_group
        and each.name != asked.name
    ]
    if asked.state is ServerState.FOLLOWING:
        alone = [] if row is not None else [each for each in others if _serves(each)]
        _refuse_beside(
            asked,
            [each for each in alone if is_living(each, heard, now_ms)],
            "which stands alone: set replication.copies to 2 or more there, too",
        )
    elif row is not None:
        _check_leader(asked, row, others)
    else:
        _refuse_beside(
            asked,
            [each for each in others if is_living(each, heard, now_ms)],
            "which lives: give this broker a group of its own, or set replication.copies to 2 "
            "or more on both",
        )


def check_directory(
    servers: Iterable[Server],
    asked: Server,
    heard: Heard,
    now_ms: int,
    leaderships: Mapping[str, Leadership],
) -> None:
    """Refuse a broker whose data directory is another's, or of another broker group.

    A server that has another name now has left, or been silent, under the one before.

    Raises:
        NotAllowedError: It is.
    """
    if asked.role is not Role.BROKER or not asked.directory:
        return
    same = [
        each
        for each in servers
        if each.role is Role.BROKER and each.directory == asked.directory and not each.is_removed
    ]
    for each in same:
        if each.name != asked.name and is_living(each, heard, now_ms):
            raise NotAllowedError(_in_use(asked, each))
    groups = {each.broker_group for each in same}
    groups.update(
        row.broker_group for row in leaderships.values() if asked.directory in row.in_sync
    )
    groups.discard(asked.broker_group)
    for group in sorted(groups):
        raise NotAllowedError(
            f"data directory {asked.directory} of {asked.name} has the messages of broker group "
            f"{group}, and {asked.name} is of broker group {asked.broker_group}: set "
            f"cluster.group to {group}, or give it an empty data directory"
        )


def clock_warning(name: str, now_ms: int, ours_ms: int, tolerance_ms: int) -> str:
    """Return what to say about a clock that is far from ours; empty if it is not."""
    apart_ms = now_ms - ours_ms
    if abs(apart_ms) <= tolerance_ms:
        return ""
    way = "ahead of" if apart_ms > 0 else "behind"
    return (
        f"the clock of {name} is {abs(apart_ms) / 1000:.1f} s {way} the meta server's: times of "
        "messages, delays and resets by time will be off"
    )


def serving_brokers(
    servers: Iterable[Server],
    marks: Mapping[str, GroupMarks],
    heard: Heard,
    now_ms: int,
    leaderships: Mapping[str, Leadership],
) -> dict[str, Serving]:
    """Return the brokers that clients can go to, by broker group.

    Of a group with a leadership that is its leader, once it says that it is ready: until then it
    opens its logs. It takes no sends while too few are in sync.
    """
    found = {}
    for each in servers:
        row = leaderships.get(each.broker_group)
        if (
            each.role is Role.BROKER
            and _serves(each)
            and is_living(each, heard, now_ms)
            and (row is None or row.leader == each.directory)
        ):
            is_writable = (
                each.state is ServerState.READY
                and marks.get(each.broker_group, _NO_MARKS).takes_sends
                and (row is None or not is_short(row))
            )
            found[each.broker_group] = Serving(
                each.broker_group, each.host, each.port, is_writable
            )
    return found


def following_brokers(
    servers: Iterable[Server], heard: Heard, now_ms: int
) -> dict[str, tuple[Serving, ...]]:
    """Return the brokers that copy others, by broker group."""
    found: dict[str, tuple[Serving, ...]] = {}
    for each in sorted(servers):
        if (
            each.role is Role.BROKER
            and each.state is ServerState.FOLLOWING
            and is_living(each, heard, now_ms)
        ):
            there = Serving(each.broker_group, each.host, each.port, is_writable=False)
            found[each.broker_group] = (*found.get(each.broker_group, ()), there)
    return found


def serving_delays(servers: Iterable[Server], heard: Heard, now_ms: int) -> dict[str, Serving]:
    """Return the delay servers that clients can go to, by name."""
    return {
        each.name: Serving(
            each.broker_group, each.host, each.port, each.state is ServerState.READY
        )
        for each in servers
        if each.role is Role.DELAY and is_living(each, heard, now_ms)
    }


def usable_groups(serving: Mapping[str, Serving]) -> list[str]:
    """Return the broker groups that new subjects can be placed on."""
    return [group for group, there in serving.items() if there.is_writable]


def is_living(server: Server, heard: Heard, now_ms: int) -> bool:
    """Whether a server is there, and means to stay."""
    return (
        not server.is_removed
        and server.state is not ServerState.LEAVING
        and heard.is_alive(server.name, now_ms)
    )


def _in_use(asked: Server, other: Server) -> str:
    return (
        f"data directory {asked.directory} of {asked.name} at {asked.address} is in use by "
        f"{other.name} at {other.address}, which lives: one of them is a copy. Give each broker a "
        "data directory of its own, an empty one for a new broker; if this one only got another "
        "name or address, stop the other process first"
    )


def _serves(server: Server) -> bool:
    return server.state in {ServerState.READY, ServerState.FULL}


def _refuse_beside(asked: Server, others: Iterable[Server], why: str) -> None:
    for each in others:
        raise NotAllowedError(
            f"broker group {asked.broker_group} is held by {each.name} at {each.address}, {why}"
        )


def _check_leader(asked: Server, row: Leadership, others: Iterable[Server]) -> None:
    if row.leader == asked.directory:
        return
    leader = next((each for each in others if each.directory == row.leader), None)
    shown = f"{leader.name} at {leader.address}" if leader else f"data directory {row.leader}"
    raise NotAllowedError(
        f"broker group {asked.broker_group} is led by {shown} in epoch {row.epoch}: {asked.name} "
        "may only follow. If it stands alone, set replication.copies to 2 or more; if it was "
        "elected since, the meta servers' database was restored from an older backup: put the "
        "newer one back"
    )

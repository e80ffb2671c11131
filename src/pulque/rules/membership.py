"""Cluster membership: which servers are members, alive, and taking messages.

A server sends heartbeats. One that is silent for three times the interval
leaves the routes until its next heartbeat; it stays known. A name belongs to one data directory as
long as its server is alive: a restart is recognised by its directory. The same holds for a broker
group, unless it has a leadership: then one of its brokers serves, and the others follow.

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
"""A server is silent after so many missed heartbeats."""
_NO_MARKS = GroupMarks()


class Change(Enum):
    """What a registration changes."""

    NOTHING = 0
    """Nothing: the registration is a heartbeat."""
    STATE = 1
    """A known server came back, moved, or changed its description."""
    NEW = 2
    """The server is new."""


class Heard:
    """The last heartbeat of each server, by name."""

    def __init__(self, beat_ms: int) -> None:
        self.silence_ms = MISSED_BEATS * beat_ms
        """A server without a heartbeat for longer is silent."""
        self._at_ms: dict[str, int] = {}

    def hear(self, name: str, now_ms: int) -> None:
        """Record a heartbeat of a server."""
        self._at_ms[name] = max(now_ms, self._at_ms.get(name, now_ms))

    def forget(self, name: str) -> None:
        """Record that a server is gone."""
        self._at_ms.pop(name, None)

    def silent_ms(self, name: str, now_ms: int) -> int | None:
        """Return the time since a server's last heartbeat; None if it is unknown or gone."""
        at_ms = self._at_ms.get(name)
        return None if at_ms is None else now_ms - at_ms

    def is_alive(self, name: str, now_ms: int) -> bool:
        """Return whether a server's last heartbeat is recent."""
        at_ms = self._at_ms.get(name)
        return at_ms is not None and now_ms - at_ms <= self.silence_ms


def check_cluster(asked: str, ours: str, name: str) -> None:
    """Refuse a server of another cluster.

    Raises:
        NotAllowedError: The server belongs to another cluster.
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
        asked: The server that registers.
        is_alive: Whether the known one is alive.

    Raises:
        NotAllowedError: Another live server has this name.
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
    """Refuse a broker that would join the broker group of one that stands alone.

    Raises:
        NotAllowedError: Its broker group belongs to another broker.
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
    """Refuse a broker whose data directory belongs to another broker or broker group.

    A server may change its name after it has left, or been silent, under the old one.

    Raises:
        NotAllowedError: The directory belongs to another one.
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
    """Return a warning about a clock that differs too much from ours, or an empty text."""
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
    """Return the brokers that serve clients, by broker group.

    In a group with a leadership that is the leader, once it reports to be ready: until then it
    opens its logs. It takes no sends while too few brokers are in sync.
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
    """Return the followers, by broker group."""
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
    """Return the delay servers that serve clients, by name."""
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
    """Return whether a server is alive and not leaving."""
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

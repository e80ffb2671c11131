"""The cluster as the administration API sees it: this meta server's knowledge and commands."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

from pulque.admin.cluster import (
    ClusterPolicies,
    KnownServer,
    PlacedPartition,
    PlacedSubject,
    Standing,
    StateName,
    WatchingClient,
)
from pulque.errors import NotAllowedError, UnknownServerError, UnknownSubjectError
from pulque.meta.cluster_commands import ClusterCommands
from pulque.meta.components import MetaParts
from pulque.meta.directory_refresh import Refresher
from pulque.meta.policies import PoliciesInForce, written
from pulque.model.cluster import GroupMarks, Placement, Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.names import Pattern, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import Role

__all__ = ["AdministeredCluster"]

_NO_MARKS = GroupMarks()
_STATES: Mapping[ServerState, StateName] = {
    ServerState.READY: "ready",
    ServerState.FULL: "full",
    ServerState.LEAVING: "leaving",
    ServerState.FOLLOWING: "following",
}


class AdministeredCluster:
    """Implements ``pulque.admin.cluster.Cluster``."""

    def __init__(
        self,
        parts: MetaParts,
        refresher: Refresher,
        administration: ClusterCommands,
        policies: PoliciesInForce,
    ) -> None:
        self._parts = parts
        self._directory = parts.directory
        self._refresher = refresher
        self._administration = administration
        self._policies = policies

    @property
    def id(self) -> str:
        """The id of the cluster; empty until the database was read."""
        return self._refresher.cluster

    async def check_ready(self) -> None:
        """Look whether the database answers, and take in what is new there."""
        await self._refresher.refresh()

    # -- servers -----------------------------------------------------------------------------

    async def servers(self) -> Sequence[KnownServer]:
        """Return all that ever registered and were not removed."""
        self._refresher.check_loaded()
        servers = self._directory.servers.values()
        return [self._known(each) for each in servers if not each.is_removed]

    async def mark_server(
        self, name: str, *, is_read_only: bool | None = None, is_draining: bool | None = None
    ) -> KnownServer:
        """Decide what a server's broker group may take."""
        await self._refresher.refresh()  # who leads may have changed
        found = self._find(name)
        if is_read_only or is_draining:
            self._check_may_mark(found)
        await self._administration.mark_group(
            found.broker_group, is_read_only=is_read_only, is_draining=is_draining
        )
        return self._known(found)

    def _check_may_mark(self, server: Server) -> None:
        """Refuse to stop a whole broker group by way of one that only follows in it."""
        row = self._directory.leaderships.get(server.broker_group)
        if _standing(server, row) != "follower":
            return
        leader = row and self._directory.broker_in(row.broker_group, row.leader)
        raise NotAllowedError(
            f"{server.name} follows in broker group {server.broker_group}, and takes no sends "
            "itself: to take it out of service, stop it, then `pulque broker remove` it. To have "
            f"the whole group take no sends, name its leader{f', {leader.name}' if leader else ''}"
        )

    async def remove_server(self, name: str) -> None:
        """Forget a server that is gone for good."""
        self._find(name)
        await self._administration.remove_server(name)

    def _find(self, name: str) -> Server:
        self._refresher.check_loaded()
        found = self._directory.servers.get(name)
        if found is None or found.is_removed:
            raise UnknownServerError(f"there is no server {name!a}")
        return found

    def _known(self, server: Server) -> KnownServer:
        now_ms = self._parts.clock.monotonic_ms()
        marks = self._directory.marks.get(server.broker_group, _NO_MARKS)
        row = self._directory.leaderships.get(server.broker_group)
        return KnownServer(
            name=server.name,
            broker_group=server.broker_group,
            role=server.role,
            host=server.host,
            port=server.port,
            state=self._state(server, now_ms),
            silent_ms=self._directory.heard.silent_ms(server.name, now_ms),
            is_read_only=marks.is_read_only,
            is_draining=marks.is_draining,
            incarnation=server.incarnation,
            partitions=self._directory.partitions_on(server.broker_group),
            standing=_standing(server, row),
            epoch=row.epoch if row else 0,
            is_in_sync=server.directory in row.in_sync if row else None,
            min_in_sync=row.min_in_sync if row else 0,
            directory=server.directory,
        )

    def _state(self, server: Server, now_ms: int) -> StateName:
        if server.state is ServerState.LEAVING:
            return "leaving"
        if not self._directory.heard.is_alive(server.name, now_ms):
            return "silent"
        return _STATES[server.state]

    # -- subjects ----------------------------------------------------------------------------

    async def subjects(self, after: str = "", limit: int = 100) -> Sequence[PlacedSubject]:
        """Return subjects in the order of their names, beginning after one."""
        self._refresher.check_loaded()
        names = nsmallest(limit, (name for name in self._directory.subjects if name > after))
        return [self._placed(name, self._directory.subjects[name]) for name in names]

    async def subject(self, name: Subject) -> PlacedSubject | None:
        """Return one subject."""
        self._refresher.check_loaded()
        placed = self._directory.subjects.get(name)
        return None if placed is None else self._placed(name, placed)

    async def create_subject(
        self, name: Subject, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        """Place a subject ahead of its first send; one that exists is returned as it is."""
        await self._refresher.refresh()
        placed = self._directory.subjects.get(name)
        if placed is None:
            placed = await self._administration.create_subject(name, broker_groups)
        return self._placed(name, placed)

    async def extend_subject(
        self, name: Subject, partitions: int, broker_groups: Sequence[str] = ()
    ) -> PlacedSubject:
        """Split partitions, so that more take messages; never fewer."""
        found = await self._read(name)
        if partitions < found.taking:
            raise NotAllowedError(
                f"subject {name} has {found.taking} partitions that take messages, and "
                f"{partitions} are wanted: merge them to have fewer"
            )
        if partitions > found.taking:
            placed = await self._administration.extend_subject(name, partitions, broker_groups)
            return self._placed(name, placed)
        return found

    async def merge_subject(self, name: Subject, partitions: int) -> PlacedSubject:
        """Merge partitions, so that fewer take messages; never more."""
        found = await self._read(name)
        if partitions > found.taking:
            raise NotAllowedError(
                f"subject {name} has {found.taking} partitions that take messages, and "
                f"{partitions} are wanted: extend it to have more"
            )
        if partitions < found.taking:
            placed = await self._administration.merge_subject(name, partitions)
            return self._placed(name, placed)
        return found

    async def order_subject(self, name: Subject, order: OrderStrategy) -> PlacedSubject:
        """Decide what a failure may do to the order of a subject's messages."""
        await self._administration.order_subject(name, order)
        return await self._read(name)

    async def _read(self, name: Subject) -> PlacedSubject:
        await self._refresher.refresh()
        placed = self._directory.subjects.get(name)
        if placed is None:
            raise UnknownSubjectError(f"there is no subject {name}")
        return self._placed(name, placed)

    async def mark_subject(self, name: Pattern, *, is_read_only: bool) -> None:
        """Have a subject, or all of a pattern, take no sends, or take them again."""
        self._refresher.check_loaded()
        await self._administration.mark_subject(name, is_read_only=is_read_only)

    async def read_only_marks(self) -> Sequence[Pattern]:
        """Return the subjects and patterns that take no sends, by name."""
        self._refresher.check_loaded()
        return [Pattern(each) for each in sorted(self._directory.read_only)]

    def _placed(self, name: Subject, placed: Iterable[Placement]) -> PlacedSubject:
        return PlacedSubject(
            name,
            self._directory.is_read_only(name),
            tuple(PlacedPartition(*each) for each in placed),
            self._directory.order_of(name),
        )

    # -- clients and policies ----------------------------------------------------------------

    async def clients(self, after: str = "", limit: int = 100) -> Sequence[WatchingClient]:
        """Return clients that watch routes here, in the order of their ids."""
        now_ms = self._parts.clock.monotonic_ms()
        later = (each for each in self._parts.online if each.client > after)
        return [
            WatchingClient(
                each.client,
                each.application,
                each.address,
                each.since_ms,
                max(now_ms - each.seen_at_ms, 0),
                each.routes,
            )
            for each in nsmallest(limit, later, key=lambda each: each.client)
        ]

    async def policies(self) -> ClusterPolicies:
        """Return what holds for the whole cluster."""
        self._refresher.check_loaded()
        return self._policies.now

    async def set_policies(self, policies: ClusterPolicies) -> ClusterPolicies:
        """Decide what holds for the whole cluster from now on."""
        self._refresher.check_loaded()
        await self._parts.store.set_policies(written(policies))
        await self._refresher.refresh()
        return self._policies.now


def _standing(server: Server, row: Leadership | None) -> Standing:
    if row is not None and server.role is Role.BROKER:
        return "leader" if row.leader == server.directory else "follower"
    return "follower" if server.state is ServerState.FOLLOWING else "alone"

"""Elections: a leader that nobody hears of is replaced by one that has all that was confirmed.

Every meta server looks after all leaders by itself, and any of them may elect: the database lets
one of them do it. Who lives is seen by the counts of heartbeats there, which is where all meta
servers write down whom they heard. One that cannot read them sees nothing, and elects nobody.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from pulque.errors import NotAllowedError, UnavailableError
from pulque.meta.components import MetaParts
from pulque.meta.database.leadership_store import LeadershipStore, Replica
from pulque.meta.directory_refresh import Refresher
from pulque.model.cluster import Server, ServerState
from pulque.model.leadership import Leadership
from pulque.rules.leadership import ElectionCandidate, Vigil, replace_leader, without

__all__ = ["Elections"]

_LOOKS = 10
"""How often to look within a lease."""
_LONGEST_S = 0.5


class Elections:
    """Looks after the leaders. Lives in one event loop.

    Args:
        parts: What is known of the cluster.
        store: Where leaderships are written down.
        refresher: Reads what was written, and counts heartbeats.
        lease_ms: Who is silent for this long does not lead any more.
    """

    def __init__(
        self, parts: MetaParts, store: LeadershipStore, refresher: Refresher, *, lease_ms: int
    ) -> None:
        self.lease_ms = lease_ms
        """Who is silent for this long does not lead any more."""
        self.silent_ms: Mapping[str, int] = {}
        """For how long this meta server saw no sign of each leader, by broker group."""
        self._directory = parts.directory
        self._clock = parts.clock
        self._warn = parts.warn
        self._store = store
        self._refresher = refresher
        self._vigil = Vigil(lease_ms)
        self._told: dict[str, dict[str, int]] = {}
        """By broker group, the version that each of its brokers named last."""
        self._is_stopping = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Look again and again, until stopped."""
        pause_s = min(self.lease_ms / 1000 / _LOOKS, _LONGEST_S)
        while not self._is_stopping:
            self._wake.clear()
            with contextlib.suppress(UnavailableError):  # the refresher says it
                await self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s)

    def stop(self) -> None:
        """Have ``run`` end."""
        self._is_stopping = True
        self._wake.set()

    def hurry(self) -> None:
        """Look at once, as a broker has left."""
        self._wake.set()

    def check_newest(self, broker_group: str, name: str, told: int) -> None:
        """Refuse to go on with a leadership that is older than what a broker was told.

        What a broker said before is forgotten when it says something else: somebody may have
        removed its ``told.json``, as the refusal says.

        Args:
            broker_group: Whose leadership.
            name: Of the broker that asks.
            told: The version that it knows.

        Raises:
            NotAllowedError: It is.
        """
        self._told.setdefault(broker_group, {})[name] = told
        row = self._directory.leaderships.get(broker_group)
        known = 0 if row is None else row.version
        newer = self._told_newer(broker_group, known)
        if newer:
            names = ", ".join(newer)
            raise NotAllowedError(
                f"{names} of broker group {broker_group} followed version {max(newer.values())} "
                f"of its leadership, and the database of the meta servers has version {known}: it "
                "was restored from an older backup, and does not know who has all that was "
                "confirmed. Put the newer database back. If there is none: stop all brokers of "
                f"the group, remove told.json from the data directories of {names}, and start the "
                "one first whose messages count"
            )

    def _told_newer(self, broker_group: str, known: int) -> Mapping[str, int]:
        """Return the brokers that know a later version of the leadership, and which."""
        servers = self._directory.servers
        return {
            name: told
            for name, told in sorted(self._told.get(broker_group, {}).items())
            if told > known and (server := servers.get(name)) is not None and not server.is_removed
        }

    def _is_older(self, row: Leadership) -> bool:
        return bool(self._told_newer(row.broker_group, row.version))

    async def candidates(self, broker_group: str) -> Sequence[ElectionCandidate]:
        """Return the brokers of a group that asked who leads, as they spoke of themselves.

        Raises:
            UnavailableError: The database is away.
        """
        replicas = await self._store.replicas()
        return [
            ElectionCandidate(
                each.directory,
                each.name,
                each.token,
                each.message_end,
                each.is_fit,
                self._is_there(each),
            )
            for each in replicas
            if each.broker_group == broker_group
        ]

    async def change(
        self,
        seen: Leadership,
        wanted: Leadership,
        reason: str,
        beats: tuple[str, int] | None = None,
    ) -> bool:
        """Write down another leadership, and say so if somebody was elected.

        Returns:
            Whether it was done; if not, another was faster, and that is known now.

        Raises:
            UnavailableError: The database is away. It may have been done or not.
        """
        is_done = await self._store.change(seen, wanted, beats)
        if is_done and wanted.epoch != seen.epoch:
            self.tell_elected(wanted, reason)
        await self._refresher.refresh()
        return is_done

    def tell_elected(self, row: Leadership, reason: str) -> None:
        """Have the log say who leads now, and why."""
        leader = self._directory.broker_in(row.broker_group, row.leader)
        self._warn(
            "leader_elected",
            broker_group=row.broker_group,
            epoch=row.epoch,
            leader=leader.name if leader else row.leader,
            directory=row.leader,
            in_sync=len(row.in_sync),
            reason=reason,
        )

    def _is_there(self, replica: Replica) -> bool:
        server = self._directory.broker_in(replica.broker_group, replica.directory)
        if server is None or server.state is ServerState.LEAVING or not replica.token:
            return False
        silent_ms = self._directory.heard.silent_ms(server.name, self._clock.monotonic_ms())
        return silent_ms is not None and silent_ms <= self.lease_ms // 2

    async def _look(self) -> None:
        if not self._directory.leaderships:
            self.silent_ms = {}
            return
        began_ms = self._clock.monotonic_ms()
        await self._refresher.refresh()
        beats = await self._refresher.count_beats()
        rows = dict(self._directory.leaderships)
        leaders = {
            group: self._directory.broker_in(group, row.leader) for group, row in rows.items()
        }
        signs = {
            group: (rows[group].epoch, beats.get(leader.name) if leader else None)
            for group, leader in leaders.items()
        }
        self.silent_ms = self._vigil.look(signs, began_ms, self._clock.monotonic_ms())
        for group, row in rows.items():
            if self._is_older(row):
                continue
            if not await self._drop_who_left(row, leaders[group]):
                await self._replace_if_gone(row, leaders[group], beats)

    async def _drop_who_left(self, row: Leadership, leader: Server | None) -> bool:
        """Take followers that stopped on purpose out of sync, so that no send waits for them.

        Only while their leader lives: without it they may be the last that have everything.
        """
        if leader is None or not self._directory.is_living(leader):
            return False
        found = [self._directory.broker_in(row.broker_group, each) for each in row.in_sync]
        left = [each.directory for each in found if each and each.state is ServerState.LEAVING]
        wanted = without(row, left)
        return wanted is not None and await self.change(row, wanted, "")

    async def _replace_if_gone(
        self, row: Leadership, leader: Server | None, beats: Mapping[str, int]
    ) -> None:
        counted = None
        if leader is not None and leader.state is ServerState.LEAVING:
            reason = "the leader left"
        elif self.silent_ms[row.broker_group] < self.lease_ms:
            return
        elif leader is None:
            reason = "nobody has the leader's data directory any more"
        elif self._refresher.is_uncounted(leader.name):
            return
        else:
            reason = f"nothing was heard of the leader for {self.lease_ms} ms"
            counted = (leader.name, beats.get(leader.name, 0))
        wanted = replace_leader(row, await self.candidates(row.broker_group))
        if wanted is not None:
            await self.change(row, wanted, reason, counted)

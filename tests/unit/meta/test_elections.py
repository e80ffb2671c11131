"""Elections: nobody is replaced in haste, and only by who has all that was confirmed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pulque.errors import UnavailableError
from pulque.meta.database.connection import Database, parse_database_url
from pulque.meta.database.leadership_store import LeadershipStore, Replica
from pulque.meta.database.store import ClusterStore
from pulque.model.cluster import Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch
from pulque.model.routes import Role
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection
from pulque.wire.leadership import ChangeInSync, InSyncChanged
from tests.unit.meta.running import (
    RunningMeta,
    Start,
    eventually,
    follow,
    leading,
    register,
    route,
)

LEASE_MS = 200
STEP_MS = 40
B1, B2, B3 = (f"directory-of-b{number}" for number in (1, 2, 3))


class Group:
    """A group of brokers in front of a meta server whose clock the test turns."""

    def __init__(self, running: RunningMeta, raw: RawConnection, clock: ManualClock) -> None:
        self.running = running
        self.raw = raw
        self.clock = clock

    async def shown(self) -> dict[str, Any]:
        (found,) = (await self.raw.status())["leaderships"]
        return dict(found)

    async def epoch(self) -> int:
        return int((await self.shown())["epoch"])

    async def saw(self, silent_ms: int) -> None:
        """Wait until the meta server has looked, and found the leader as silent as that."""

        async def has_looked() -> bool:
            return bool((await self.shown())["silent_ms"] == silent_ms)

        await eventually(has_looked)

    async def elected(self, epoch: int) -> dict[str, Any]:
        async def is_elected() -> bool:
            return await self.epoch() == epoch

        await eventually(is_elected)
        return await self.shown()

    async def pass_by(self, steps: int, *names: str) -> None:
        """Let time pass while only some brokers ask; the leader is not one of them."""
        before_ms = int((await self.shown())["silent_ms"])
        for step in range(1, steps + 1):
            self.clock.advance(STEP_MS)
            for name in names:
                await leading(self.raw, name)
            await self.saw(before_ms + step * STEP_MS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def group(start: Start, clock: ManualClock) -> Group:
    """Three brokers that are in sync; b1 leads them."""
    running = await start(
        clock=clock, replication={"lease": f"{LEASE_MS}ms"}, cluster={"heartbeat": "1h"}
    )
    raw = await running.connect()
    await follow(raw, "b1", "b2", "b3")
    row = (await leading(raw, "b1", message_end=1)).leadership
    for name in ("b2", "b3"):
        await leading(raw, name)
    said = ChangeInSync("g", row.token, row.epoch, row.version, (B1, B2, B3))
    assert (await raw.ask(said, InSyncChanged)).is_done
    found = Group(running, raw, clock)
    await found.saw(0)
    return found


# -- when ---------------------------------------------------------------------------------------


async def test_a_leader_that_is_silent_for_the_lease_is_replaced(group: Group) -> None:
    await group.pass_by(4, "b2", "b3")
    assert await group.epoch() == 1

    group.clock.advance(STEP_MS)
    await leading(group.raw, "b3", message_end=7)

    found = await group.elected(2)
    assert (found["leader"], found["in_sync"]) == ("b3", [B2, B3])
    assert (await leading(group.raw, "b3")).leadership.token == "token-of-b3"


@pytest.mark.parametrize("sign", ["lead", "register"])
async def test_a_leader_that_is_heard_of_stays(group: Group, sign: str) -> None:
    for _ in range(3):
        await group.pass_by(4, "b2", "b3")
        if sign == "lead":
            await leading(group.raw, "b1")
        else:
            await follow(group.raw, "b1")
        await group.saw(0)

    assert await group.epoch() == 1


async def test_a_meta_server_that_was_stopped_does_not_elect_when_it_wakes_up(
    group: Group,
) -> None:
    await group.pass_by(2, "b2", "b3")

    group.clock.advance(100 * LEASE_MS)
    await leading(group.raw, "b2")

    # What it had seen before is worth nothing, and it has seen nothing since.
    await group.saw(0)
    await group.pass_by(4, "b2")
    assert await group.epoch() == 1
    group.clock.advance(STEP_MS)
    await leading(group.raw, "b2")
    assert (await group.elected(2))["leader"] == "b2"


async def test_a_leader_that_leaves_is_replaced_at_once(group: Group) -> None:
    await follow(group.raw, "b1", state=ServerState.LEAVING)

    assert (await group.elected(2))["leader"] == "b2"


# -- whom ---------------------------------------------------------------------------------------


async def test_nobody_is_elected_who_is_silent_leaves_or_is_not_whole(group: Group) -> None:
    await follow(group.raw, "b2", state=ServerState.LEAVING)
    await group.pass_by(8)
    await leading(group.raw, "b3", is_fit=False)
    await group.pass_by(8)
    assert await group.epoch() == 1

    # The leader itself may come back, however late.
    found = (await leading(group.raw, "b1", token="new", message_end=1)).leadership

    assert (found.leader, found.epoch, found.in_sync) == (B1, 2, (B1,))


async def test_nobody_is_elected_who_is_not_in_sync(group: Group) -> None:
    shown = await group.shown()
    said = ChangeInSync("g", "token-of-b1", 1, shown["version"], (B1, B2))
    assert (await group.raw.ask(said, InSyncChanged)).is_done
    await group.pass_by(8, "b3")
    assert await group.epoch() == 1

    await leading(group.raw, "b2")

    found = await group.elected(2)
    assert (found["leader"], found["in_sync"]) == ("b2", [B2])


async def test_one_leader_after_the_other_is_replaced(group: Group) -> None:
    await group.pass_by(4, "b2", "b3")
    group.clock.advance(STEP_MS)
    await leading(group.raw, "b2", message_end=9)
    await group.elected(2)
    await group.saw(0)

    await group.pass_by(4, "b3")
    group.clock.advance(STEP_MS)
    await leading(group.raw, "b3")

    found = await group.elected(3)
    assert (found["leader"], found["in_sync"]) == ("b3", [B3])


async def test_the_old_name_on_a_new_disk_is_another_broker(group: Group) -> None:
    await follow(group.raw, "b1", state=ServerState.LEAVING)
    await group.elected(2)
    await follow(group.raw, "b2", state=ServerState.LEAVING)
    await group.elected(3)
    assert (await group.shown())["in_sync"] == [B3]

    await follow(group.raw, "b3", state=ServerState.LEAVING)
    await follow(group.raw, "b3", directory="new-disk")
    found = (await leading(group.raw, "b3", directory="new-disk")).leadership

    assert (found.leader, found.epoch, found.in_sync) == (B3, 3, (B3,))


# -- several meta servers -----------------------------------------------------------------------


async def test_meta_servers_that_elect_at_the_same_time_make_one_epoch(
    group: Group, start: Start, clock: ManualClock
) -> None:
    settings = {"replication": {"lease": f"{LEASE_MS}ms"}, "cluster": {"heartbeat": "1h"}}
    others = [await start(group.running.directory, clock=clock, **settings) for _ in range(2)]
    groups = [group, *[Group(each, await each.connect(), clock) for each in others]]
    for each in groups:
        await each.saw(0)

    for step in range(1, 6):
        clock.advance(STEP_MS)
        for name in ("b2", "b3"):
            await asyncio.gather(*(leading(each.raw, name) for each in groups))
        if step < 5:
            await asyncio.gather(*(each.saw(step * STEP_MS) for each in groups))

    found = await asyncio.gather(*(each.elected(2) for each in groups))
    assert {(each["epoch"], each["version"], each["leader"]) for each in found} == {(2, 3, "b2")}


async def test_a_leader_that_another_meta_server_hears_of_stays(
    group: Group, start: Start, clock: ManualClock
) -> None:
    settings = {"replication": {"lease": f"{LEASE_MS}ms"}, "cluster": {"heartbeat": "1h"}}
    second = await start(group.running.directory, clock=clock, **settings)
    other = Group(second, await second.connect(), clock)
    await other.saw(0)
    for _ in range(3):
        await group.pass_by(4, "b2", "b3")
        # Only registered there: the next look tells it to all.
        await follow(other.raw, "b1")
        await group.saw(0)

    assert await group.epoch() == 1


async def test_who_asks_one_meta_server_is_elected_by_another(
    group: Group, start: Start, clock: ManualClock
) -> None:
    settings = {"replication": {"lease": f"{LEASE_MS}ms"}, "cluster": {"heartbeat": "1h"}}
    second = await start(group.running.directory, clock=clock, **settings)
    other = Group(second, await second.connect(), clock)
    await leading(other.raw, "b3", token="told-there", message_end=50)
    shown = await group.shown()

    said = ChangeInSync("g", "token-of-b1", 1, shown["version"], (B3, B2))
    answer = await group.raw.ask(said, InSyncChanged)

    assert answer.is_done
    assert (answer.leadership.leader, answer.leadership.token) == (B3, "told-there")
    assert answer.leadership.in_sync == (B2, B3)


# -- what is in the database --------------------------------------------------------------------


def database(path: Path) -> Database:
    return Database(parse_database_url(f"sqlite:///{path}"), password=None, timeout_s=60.0)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[ClusterStore, LeadershipStore]]:
    opened = database(tmp_path / "meta.sqlite")
    store = ClusterStore(opened)
    await store.open()
    yield store, LeadershipStore(opened)
    await store.close()


ROW = Leadership("g", Epoch(1), 1, B1, "t", (B1, B2), 2)
NEXT = ROW._replace(epoch=Epoch(2), version=2, leader=B2, in_sync=(B2,))


async def leaderships(store: ClusterStore) -> dict[str, Leadership]:
    found = await store.changes(-1)
    assert found is not None
    return found.leaderships


async def test_a_leadership_is_created_once_and_changed_only_as_it_was_seen(
    stores: tuple[ClusterStore, LeadershipStore],
) -> None:
    store, rows = stores
    outcomes = await asyncio.gather(*(rows.create(ROW._replace(token=str(n))) for n in range(3)))
    assert sorted(outcomes) == [False, False, True]
    (made,) = (await leaderships(store)).values()

    outcomes = await asyncio.gather(*(rows.change(made, NEXT._replace(token=t)) for t in "abc"))

    assert sorted(outcomes) == [False, False, True]
    (now,) = (await leaderships(store)).values()
    assert now == NEXT._replace(token="abc"[outcomes.index(True)])
    assert not await rows.change(now._replace(epoch=Epoch(1)), ROW)
    assert not await rows.change(now._replace(version=1), ROW)
    assert not await rows.change(now._replace(broker_group="h"), ROW)
    assert await leaderships(store) == {"g": now}


async def test_a_leader_that_is_counted_at_the_last_moment_stays(
    stores: tuple[ClusterStore, LeadershipStore],
) -> None:
    store, rows = stores
    await store.register(Server("b1", "g", Role.BROKER, "h", 1, B1, 1, ServerState.READY), None)
    await rows.create(ROW)
    beats = await store.beat([])

    await rows.hear([Replica(B1, "g", "b1", "t", 9, is_fit=True)])

    assert not await rows.change(ROW, NEXT, ("b1", beats["b1"]))
    assert await rows.change(ROW, NEXT, ("b1", beats["b1"] + 1))


async def test_what_was_said_of_directories_that_nobody_has_is_forgotten(
    stores: tuple[ClusterStore, LeadershipStore],
) -> None:
    store, rows = stores
    await rows.create(ROW)
    await rows.hear([Replica(each, "g", "b", "t", 9, is_fit=True) for each in (B1, B2)])
    seen = None
    for number in range(3):  # as with empty data directories, one after the other
        directory = f"d{number}"
        server = Server("b3", "g", Role.BROKER, "h", 1, directory, 1, ServerState.FOLLOWING)
        assert await store.register(server, seen) is None
        seen = server
        await rows.hear([Replica(directory, "g", "b3", "t", 0, is_fit=True)])

    assert {each.directory for each in await rows.replicas()} == {B1, B2, "d2"}


async def test_what_brokers_said_last_is_kept(
    stores: tuple[ClusterStore, LeadershipStore],
) -> None:
    _, rows = stores
    first = Replica(B1, "g", "b1", "t", 9, is_fit=True)
    await rows.hear([first, Replica(B2, "g", "b2", "u", 1, is_fit=True)])
    await rows.hear([first._replace(message_end=20, is_fit=False)])

    assert list(await rows.replicas()) == [
        first._replace(message_end=20, is_fit=False),
        Replica(B2, "g", "b2", "u", 1, is_fit=True),
    ]


# -- the database is away -----------------------------------------------------------------------


@dataclass
class Orphaned:
    """A meta server that was started while its database is away, and what it knows from before."""

    raw: RawConnection
    known: Leadership
    come_back: Callable[[], object]


@pytest.fixture
async def orphaned(tmp_path: Path) -> AsyncIterator[Orphaned]:
    """b1 leads, and b2 is in sync."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sections = {
        "database": {"url": f"sqlite:///{elsewhere / 'meta.sqlite'}"},
        "replication": {"lease": f"{LEASE_MS}ms"},
        "cluster": {"heartbeat": "1h"},
    }
    first = RunningMeta(tmp_path / "own", sections)
    await first.server.start()
    raw = await first.connect()
    await follow(raw, "b1", "b2")
    row = (await leading(raw, "b1", message_end=1)).leadership
    await leading(raw, "b2")
    said = ChangeInSync("g", row.token, row.epoch, row.version, (B1, B2))
    known = (await raw.ask(said, InSyncChanged)).leadership
    await register(raw, "b1", broker_group="g", incarnation=2)
    await first.close()
    away = elsewhere.rename(tmp_path / "away")

    second = RunningMeta(tmp_path / "own", sections)
    await second.server.start()
    yield Orphaned(await second.connect(), known, lambda: away.rename(elsewhere))
    await second.close()


async def test_without_the_database_followers_are_told_what_is_known_and_nobody_is_elected(
    orphaned: Orphaned,
) -> None:
    raw, known = orphaned.raw, orphaned.known
    assert (await leading(raw, "b2")).leadership == known
    assert (await leading(raw, "b2", token="new")).leadership == known
    assert [each.broker_group for each in (await route(raw, "*", "c")).partitions] == ["g"]
    said = ChangeInSync("g", known.token, known.epoch, known.version, (B1,))
    with pytest.raises(UnavailableError, match="database of the meta servers is away"):
        await raw.ask(said, InSyncChanged)


async def test_without_the_database_a_leader_is_given_no_lease(orphaned: Orphaned) -> None:
    raw, known = orphaned.raw, orphaned.known
    for token in (known.token, "new"):
        # Another meta server that does not hear of it may have somebody else elected.
        with pytest.raises(UnavailableError, match="cannot tell the others that it lives"):
            await leading(raw, "b1", token=token)
    assert (await leading(raw, "b2")).leadership == known
    orphaned.come_back()

    async def is_elected_anew() -> bool:
        try:
            found = (await leading(raw, "b1", token="new", message_end=1)).leadership
        except UnavailableError:
            return False
        return found.epoch > known.epoch

    await eventually(is_elected_anew)


# -- who leaves ---------------------------------------------------------------------------------


async def leave(group: Group, name: str) -> None:
    await register(group.raw, name, broker_group="g", state=ServerState.LEAVING)


async def test_a_follower_that_stops_is_out_of_sync_at_once(group: Group) -> None:
    await leave(group, "b2")

    # No time passes: the leader hears it with the answer to its question.
    async def is_dropped() -> bool:
        return list((await group.shown())["in_sync"]) == [B1, B3]

    await eventually(is_dropped)
    found = (await leading(group.raw, "b1", message_end=1)).leadership
    assert (found.epoch, found.leader, found.in_sync) == (1, B1, (B1, B3))


async def test_a_follower_that_stops_while_its_leader_is_away_can_still_be_elected(
    group: Group,
) -> None:
    group.clock.advance(4 * 3_600_000)  # for the brokers to be silent
    await leave(group, "b2")
    await leave(group, "b3")

    async def has_looked_twice() -> bool:
        group.clock.advance(STEP_MS // 2)
        return bool((await group.shown())["silent_ms"])

    await eventually(has_looked_twice)
    assert list((await group.shown())["in_sync"]) == [B1, B2, B3]
    await follow(group.raw, "b3", incarnation=2)

    async def is_elected() -> bool:
        group.clock.advance(STEP_MS // 2)
        await leading(group.raw, "b3", token="another")
        return await group.epoch() == 2

    await eventually(is_elected)
    found = await group.shown()
    assert (found["leader"], found["in_sync"]) == ("b3", [B2, B3])


async def test_min_in_sync_is_what_the_leader_is_told(group: Group) -> None:
    before = (await leading(group.raw, "b2", min_in_sync=3)).leadership
    assert before.min_in_sync == 2

    changed = (await leading(group.raw, "b1", min_in_sync=1)).leadership
    assert (changed.min_in_sync, changed.version) == (1, before.version + 1)
    assert (changed.epoch, changed.in_sync) == (before.epoch, before.in_sync)
    # The same again changes nothing.
    assert (await leading(group.raw, "b1", min_in_sync=1)).leadership == changed
    assert (await group.shown())["min_in_sync"] == 1

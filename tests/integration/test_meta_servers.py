"""Meta servers as processes: alone on SQLite, several over one PostgreSQL, any of them killed."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pulque.errors import NotAllowedError, PulqueError, UnavailableError
from pulque.model.leadership import Leadership
from pulque.model.routes import RouteKind
from pulque.testing.process import BrokerProcessError, ServerProcess
from pulque.testing.raw import RawConnection, expect
from pulque.wire.leadership import ChangeInSync, InSyncChanged
from pulque.wire.ordered import Attend, Attended
from pulque.wire.registration import Registered
from pulque.wire.requests import Route, Watch
from pulque.wire.responses import Routed, Watched
from pulque.wire.routes import KnownRoute
from tests.integration.postgres import Postgres
from tests.unit.meta.running import broker, eventually, follow, leading, register, route

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("postgres")]

StartMeta = Callable[..., ServerProcess]
Connect = Callable[[ServerProcess], Awaitable[RawConnection]]
QUICK = ("--set", "cluster.heartbeat=200ms", "--set", "database.refresh=50ms")
CALM = ("--set", "cluster.heartbeat=1h", "--set", "database.refresh=50ms")
"""Nobody falls silent while the test waits for something else."""


@pytest.fixture
def start_meta(tmp_path: Path) -> Iterator[StartMeta]:
    """Start meta servers with options of their own; all of them end with the test."""
    started: list[ServerProcess] = []

    def start(*arguments: str, password: str = "") -> ServerProcess:
        log = tmp_path / f"meta-{len(started)}.stderr"
        environ = {"PULQUE_META__DATABASE__PASSWORD": password} if password else {}
        process = ServerProcess(["meta", *arguments], log=log, environ=environ, timeout=60.0)
        started.append(process)
        process.restart()
        return process

    yield start
    for process in started:
        process.close()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect to meta servers; all connections end with the test."""
    opened: list[RawConnection] = []

    async def connect_to(process: ServerProcess) -> RawConnection:
        opened.append(await RawConnection.open(process.url, patience_s=30.0))
        return opened[-1]

    yield connect_to
    for raw in opened:
        raw.close()


@pytest.fixture
def three(start_meta: StartMeta, postgres: Postgres) -> list[ServerProcess]:
    """Three meta servers over one new database."""
    url = postgres.new_database()
    return [start_meta("--database", url, *CALM, password=postgres.password) for _ in range(3)]


# -- one ----------------------------------------------------------------------------------------


@pytest.mark.accepts("001-09", "004-32", "004-21")
async def test_one_meta_server_keeps_the_cluster_in_a_file(
    start_meta: StartMeta, tmp_path: Path, connect: Connect
) -> None:
    process = start_meta("--data", str(tmp_path / "meta"), *CALM)
    raw = await connect(process)
    await register(raw, "b1", "b2", "b3")
    before = await route(raw, "orders")
    process.kill()
    process.restart()

    assert await route(await connect(process), "orders") == before
    assert process.stop() == 0
    assert "meta_server_stopped" in process.stderr


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("postgresql://me:secret-word@127.0.0.1/x", "a URL with a password"),
        ("mysql://me@127.0.0.1/x", "a database of kind 'mysql'"),
        ("nonsense", "not a database URL"),
    ],
)
def test_a_database_that_cannot_be_is_refused_at_the_start(
    start_meta: StartMeta, url: str, found: str
) -> None:
    with pytest.raises(BrokerProcessError, match="ended with code 2") as failed:
        start_meta("--database", url)

    assert found in str(failed.value)
    assert "Traceback" not in str(failed.value)
    assert "secret-word" not in str(failed.value)


# -- several over one PostgreSQL ----------------------------------------------------------------


@pytest.mark.accepts("004-17", "004-18", "004-19")
async def test_any_meta_server_answers_anything_and_any_may_die(
    three: list[ServerProcess], connect: Connect
) -> None:
    raws = [await connect(each) for each in three]
    clusters = set()
    for raw in raws:
        for name in ("b1", "b2", "b3"):
            clusters.add((await raw.ask(broker(name), Registered)).cluster)
    assert len(clusters) == 1
    created = await route(raws[0], "orders")

    async def is_known(at: RawConnection) -> bool:
        return await route(at, "orders", "g") == created

    await eventually(lambda: is_known(raws[2]))
    for victim in range(3):
        three[victim].kill()
        survivor = await connect(three[(victim + 1) % 3])
        assert await route(survivor, "orders") == created
        assert (await route(survivor, f"created-without-{victim}")).partitions
        three[victim].restart()
        back = await connect(three[victim])
        assert (await route(back, f"created-without-{victim}", "g")).partitions


async def test_one_subject_wanted_at_all_of_them_is_placed_once(
    three: list[ServerProcess], connect: Connect
) -> None:
    raws = [await connect(each) for each in three]
    for raw in raws:
        await register(raw, "b1", "b2", "b3", "b4", "b5")
    names = [f"subject-{n}" for n in range(40)]
    asked = [(raw, [await raw.put(Route(name)) for name in names]) for raw in raws]
    answers = [
        [expect(await raw.answer_to(each), Routed).route for each in ids] for raw, ids in asked
    ]

    assert answers[0] == answers[1] == answers[2]
    per_group = [each.broker_group for found in answers[0] for each in found.partitions]
    assert len(per_group) == 80


async def test_a_name_wanted_by_two_at_once_goes_to_one(
    three: list[ServerProcess], connect: Connect
) -> None:
    raws = [await connect(each) for each in three[:2]]
    outcomes: list[object] = []

    async def try_at(raw: RawConnection, directory: str) -> None:
        try:
            outcomes.append(await raw.ask(broker("b1", directory=directory), Registered))
        except PulqueError as error:
            outcomes.append(error)

    await asyncio.gather(try_at(raws[0], "one"), try_at(raws[1], "other"))

    assert sorted(type(each).__name__ for each in outcomes) == ["NotAllowedError", "Registered"]


async def test_who_is_heard_by_one_is_known_to_all_and_who_falls_silent_too(
    start_meta: StartMeta, postgres: Postgres, connect: Connect
) -> None:
    url = postgres.new_database()
    first, second = [
        await connect(start_meta("--database", url, *QUICK, password=postgres.password))
        for _ in range(2)
    ]
    is_beating = True

    async def beat() -> None:
        while is_beating:
            await register(first, "b1")
            await asyncio.sleep(0.05)

    async def is_known(*, wanted: bool) -> bool:
        return bool((await route(second, "*", "g")).partitions) == wanted

    beating = asyncio.create_task(beat())
    await eventually(lambda: is_known(wanted=True))
    # Far longer than the second one would wait for a server that nobody hears.
    for _ in range(20):
        await asyncio.sleep(0.1)
    await eventually(lambda: is_known(wanted=True))
    is_beating = False
    await beating
    await eventually(lambda: is_known(wanted=False))


# -- who leads ----------------------------------------------------------------------------------

LEASE = ("--set", "replication.lease=1s", "--set", "database.refresh=50ms")
FOLLOWING = ("b1", "b2", "b3")


class Beating:
    """Brokers of one group that ask again and again, each at a meta server of its own."""

    def __init__(self, raws: Sequence[RawConnection]) -> None:
        self.raws = dict(zip(FOLLOWING, raws, strict=True))
        self.rows: dict[str, Leadership] = {}
        self.silent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Have b1 lead, and all be in sync."""
        for name, raw in self.raws.items():
            await follow(raw, name)
            self.rows[name] = (await leading(raw, name, message_end=1)).leadership
        row = self.rows["b1"]
        everybody = tuple(f"directory-of-{name}" for name in FOLLOWING)
        said = ChangeInSync("g", row.token, row.epoch, row.version, everybody)
        assert (await self.raws["b1"].ask(said, InSyncChanged)).is_done
        self._tasks = [asyncio.create_task(self._beat(name)) for name in FOLLOWING]

    async def end(self) -> None:
        self.silent = set(FOLLOWING)
        await asyncio.gather(*self._tasks)

    async def _beat(self, name: str) -> None:
        while name not in self.silent:
            found = await leading(self.raws[name], name, version=self.rows[name].version)
            self.rows[name] = found.leadership
            await asyncio.sleep(0.05)

    async def agreed(self, epoch: int) -> Leadership:
        """Wait until all that are not silent know of an epoch; return what they know."""

        async def is_known() -> bool:
            return {self.rows[name].epoch for name in self.rows.keys() - self.silent} == {epoch}

        await eventually(is_known, 60)
        (found,) = {self.rows[name] for name in self.rows.keys() - self.silent}
        return found


@pytest.fixture
def three_with_leases(start_meta: StartMeta, postgres: Postgres) -> list[ServerProcess]:
    """Three meta servers over one new database that replace leaders soon."""
    url = postgres.new_database()
    return [start_meta("--database", url, *LEASE, password=postgres.password) for _ in range(3)]


async def test_a_leader_that_nobody_hears_is_replaced_once_whoever_elects(
    three_with_leases: list[ServerProcess], connect: Connect
) -> None:
    group = Beating([await connect(each) for each in three_with_leases])
    await group.begin()
    try:
        # Far longer than the lease: each meta server hears one of the three alone.
        for _ in range(30):
            await asyncio.sleep(0.1)
        assert (await group.agreed(1)).leader == "directory-of-b1"
        group.silent.add("b1")

        found = await group.agreed(2)

        assert found.leader == "directory-of-b2"
        assert found.in_sync == ("directory-of-b2", "directory-of-b3")
    finally:
        await group.end()
    said = [each.stderr.count("leader_elected") for each in three_with_leases]
    assert sum(said) == 2


async def test_a_meta_server_that_was_stopped_for_long_elects_nobody_when_it_goes_on(
    three_with_leases: list[ServerProcess], connect: Connect
) -> None:
    stopped = three_with_leases[2]
    raws = [await connect(each) for each in three_with_leases[:2]]
    group = Beating([*raws, await connect(three_with_leases[1])])
    await group.begin()
    try:
        await group.agreed(1)
        stopped.send_signal(signal.SIGSTOP)
        for _ in range(25):
            await asyncio.sleep(0.1)
        stopped.send_signal(signal.SIGCONT)
        watched = await connect(stopped)
        for _ in range(15):
            (shown,) = (await watched.status())["leaderships"]
            assert shown["epoch"] == 1
            await asyncio.sleep(0.1)
        await group.agreed(1)
    finally:
        await group.end()


async def test_without_the_database_nobody_is_elected_and_what_is_known_is_told(
    start_meta: StartMeta, postgres: Postgres, connect: Connect
) -> None:
    url = postgres.new_database()
    process = start_meta("--database", url, *LEASE, password=postgres.password)
    group = Beating([await connect(process) for _ in FOLLOWING])
    await group.begin()
    try:
        await group.agreed(1)
        group.silent.add("b1")
        postgres.stop()
        try:
            for _ in range(30):
                await asyncio.sleep(0.1)
            assert {group.rows[name].epoch for name in ("b2", "b3")} == {1}
        finally:
            postgres.start()

        assert (await group.agreed(2)).leader == "directory-of-b2"
    finally:
        await group.end()


# -- the database is away -----------------------------------------------------------------------


async def test_without_its_database_a_meta_server_goes_on_with_what_it_knows(
    start_meta: StartMeta, postgres: Postgres, connect: Connect
) -> None:
    url = postgres.new_database()
    process = start_meta("--database", url, *CALM, password=postgres.password)
    raw, watching = await connect(process), await connect(process)

    async def is_back() -> bool:
        return bool((await raw.status())["database"] == "ok")

    async def is_away() -> bool:
        return not await is_back()

    await register(raw, "b1", "b2")
    before = await route(raw, "orders")
    postgres.stop()
    try:
        known = KnownRoute(RouteKind.REALTIME, "orders", "", before.version)
        request_id = await watching.put(Watch("me", "app", (known,), 60_000))
        await watching.status()

        assert await route(raw, "orders") == before
        await register(raw, "b1")
        # A broker that is known may even come back elsewhere, and clients hear of it.
        await register(raw, "b2", port=7999, incarnation=2)
        (changed,) = expect(await watching.answer_to(request_id), Watched).changed
        assert 7999 in [each.port for each in changed.route.partitions]
        with pytest.raises(UnavailableError, match="database of the meta servers is away"):
            await route(raw, "new")
        with pytest.raises(UnavailableError, match="database of the meta servers is away"):
            await raw.ask(broker("b3"), Registered)
        # It looks after its database from time to time, and says so when it has.
        await eventually(is_away, limit_s=60)
    finally:
        postgres.start()

    await eventually(is_back, limit_s=60)
    assert (await route(raw, "new")).partitions
    # What it had to keep to itself is written down with the next heartbeat.
    await register(raw, "b2", port=7999, incarnation=2)
    other = await connect(start_meta("--database", url, *CALM, password=postgres.password))
    assert 7999 in [each.port for each in (await route(other, "orders")).partitions]


async def test_a_meta_server_that_starts_without_its_database_waits_for_it(
    start_meta: StartMeta, postgres: Postgres, connect: Connect
) -> None:
    url = postgres.new_database()
    postgres.stop()
    try:
        process = start_meta("--database", url, *CALM, password=postgres.password)
        raw = await connect(process)
        for request in (Route("orders"), broker("b1")):
            with pytest.raises(UnavailableError, match="database of the meta servers is away"):
                await raw.ask(request, Routed)
    finally:
        postgres.start()

    async def is_let_in() -> bool:
        try:
            await raw.ask(broker("b1"), Registered)
        except UnavailableError:
            return False
        return True

    await eventually(is_let_in, limit_s=60)
    assert (await route(raw, "orders")).partitions


async def test_a_meta_server_that_starts_without_its_database_goes_on_with_what_it_knew(
    start_meta: StartMeta, postgres: Postgres, connect: Connect, tmp_path: Path
) -> None:
    url = postgres.new_database()
    arguments = ("--database", url, "--data", str(tmp_path / "own"), *CALM)
    process = start_meta(*arguments, password=postgres.password)
    raw = await connect(process)
    await register(raw, "b1", "b2")
    before = await route(raw, "orders")
    assert process.stop() == 0
    postgres.stop()
    try:
        process.restart()
        raw = await connect(process)
        assert await route(raw, "orders") == before
        await register(raw, "b1")
        with pytest.raises(UnavailableError, match="database of the meta servers is away"):
            await route(raw, "new")
        assert "going_on_with_what_was_known_last" in process.stderr
    finally:
        postgres.start()

    async def is_back() -> bool:
        return bool((await raw.status())["as_of_ms"] is None)

    await eventually(is_back, limit_s=60)
    assert (await route(raw, "new")).partitions


async def test_a_password_is_taken_from_a_file_and_never_told(
    start_meta: StartMeta, postgres: Postgres, tmp_path: Path, connect: Connect
) -> None:
    url = postgres.new_database()
    secret = tmp_path / "secret"
    secret.write_text(f"{postgres.password}\n")
    good = start_meta("--database", url, "--set", f"database.password_file={secret}")
    await register(await connect(good), "b1")
    bad = start_meta("--database", url, password="wrong-word")

    assert "password authentication failed" in bad.stderr
    for process in (good, bad):
        assert postgres.password not in process.stderr
        assert "wrong-word" not in process.stderr


async def test_a_broker_of_another_cluster_is_refused_by_all(
    start_meta: StartMeta, tmp_path: Path, connect: Connect
) -> None:
    raws = [await connect(start_meta("--data", str(tmp_path / name))) for name in ("a", "b")]
    home = (await raws[0].ask(broker("b1"), Registered)).cluster

    with pytest.raises(NotAllowedError, match=f"belongs to cluster {home}"):
        await raws[1].ask(broker("b1", cluster=home), Registered)


@pytest.mark.accepts("002-45", "002-48")
async def test_partitions_are_allotted_over_one_postgresql_whoever_is_asked(
    three: list[ServerProcess], connect: Connect
) -> None:
    raws = [await connect(each) for each in three]
    for raw in raws:
        await register(raw, "b1", "b2")
    await route(raws[0], "orders")

    async def attend(number: int) -> list[str]:
        request = Attend(f"c{number}", 1, "orders", "g")
        found = await raws[number % 3].ask(request, Attended)
        return [each.broker_group for each in found.partitions]

    async def is_dealt() -> bool:
        return sorted([*await attend(0), *await attend(1)]) == ["b1", "b2"]

    await asyncio.gather(attend(0), attend(1))
    await eventually(is_dealt, 60)
    three[1].kill()
    raws[1] = raws[2]

    # The third one learns from the database what the second had allotted.
    await eventually(is_dealt, 60)
    await raws[2].ask(Attend("c1", 1, "orders", "g", is_online=False), Attended)

    async def has_all() -> bool:
        return await attend(0) == ["b1", "b2"]

    await eventually(has_all, 60)

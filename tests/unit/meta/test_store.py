"""The database: one revision for all writes, and nothing twice."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from pulque.errors import ConfigError, UnavailableError
from pulque.meta import migrations
from pulque.meta.database.connection import Database, parse_database_url
from pulque.meta.database.store import Changes, ClusterStore
from pulque.meta.database.tables import TABLES
from pulque.model.cluster import GroupMarks, Server, ServerState
from pulque.model.names import Subject
from pulque.model.routes import Role
from pulque.rules.ranges import split
from pulque.rules.routing import place_on

ORDERS = Subject("orders")


def database(path: Path) -> Database:
    return Database(parse_database_url(f"sqlite:///{path}"), password=None, timeout_s=60.0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ClusterStore]:
    """A new one."""
    made = ClusterStore(database(tmp_path / "meta.sqlite"))
    await made.open()
    yield made
    await made.close()


def server(name: str = "b1", **fields: object) -> Server:
    made = Server(name, name, Role.BROKER, "h", 7450, "d", 1, ServerState.READY)
    return made._replace(**fields)  # type: ignore[arg-type]


async def changes(store: ClusterStore, since: int = -1) -> Changes:
    found = await store.changes(since)
    assert found is not None
    return found


async def test_a_cluster_has_one_id_for_ever(store: ClusterStore, tmp_path: Path) -> None:
    first = await store.open()
    others = [ClusterStore(database(tmp_path / "meta.sqlite")) for _ in range(3)]

    assert {first, *await asyncio.gather(*(each.open() for each in others))} == {first}
    for each in others:
        await each.close()


async def test_sqlite_syncs_every_commit_whichever_connection_makes_it(tmp_path: Path) -> None:
    # A power cut that takes back who is in sync has one elected that lacks what was confirmed.
    made = database(tmp_path / "meta.sqlite")
    full = 2
    async with made.writing() as connection:
        found = [(await connection.execute(text("PRAGMA synchronous"))).scalar_one()]
    await made.close()  # what comes next is a new connection
    async with made.writing() as connection:
        found.append((await connection.execute(text("PRAGMA synchronous"))).scalar_one())
    await made.close()

    assert min(found) >= full


async def test_what_was_written_is_read_once(store: ClusterStore) -> None:
    placed = place_on(ORDERS, ["b1", "b2"])
    await store.register(server(), None)
    await store.create_subjects({ORDERS: placed})
    await store.mark_group("b1", GroupMarks(is_draining=True))
    await store.mark_subject("order.*", is_read_only=True)

    found = await changes(store)

    assert found.servers == [server()]
    assert found.subjects == {ORDERS: placed}
    assert found.groups == {"b1": GroupMarks(is_draining=True)}
    assert found.read_only == {"order.*": True}
    assert await store.changes(found.revision) is None


async def test_only_what_is_newer_is_read(store: ClusterStore) -> None:
    await store.create_subjects({ORDERS: place_on(ORDERS, ["b1"])})
    before = (await changes(store)).revision
    other = Subject("refunds")
    await store.create_subjects({other: place_on(other, ["b1"])})
    await store.mark_subject("orders", is_read_only=True)
    await store.mark_subject("orders", is_read_only=False)

    found = await changes(store, before)

    assert set(found.subjects) == {other}
    assert found.read_only == {"orders": False}


@pytest.mark.accepts("002-11")
async def test_a_subject_that_is_there_stays_as_it_is(store: ClusterStore) -> None:
    first = place_on(ORDERS, ["b1", "b2"])
    other = Subject("refunds")
    await store.create_subjects({ORDERS: first})

    await store.create_subjects({ORDERS: place_on(ORDERS, ["b3"]), other: first})

    found = await changes(store)
    assert found.subjects[ORDERS] == first
    assert other in found.subjects


async def test_only_who_saw_it_as_it_is_may_extend_a_subject(store: ClusterStore) -> None:
    two = place_on(ORDERS, ["b1", "b2"])
    four = split(ORDERS, two, 4, ["b1", "b2"])
    await store.create_subjects({ORDERS: two})

    assert await store.replace_partitions(ORDERS, two, four)
    assert not await store.replace_partitions(ORDERS, two, split(ORDERS, two, 3, ["b3"]))

    assert (await changes(store)).subjects == {ORDERS: four}


async def test_only_who_saw_a_server_as_it_is_may_change_it(store: ClusterStore) -> None:
    moved = server(port=1)
    assert await store.register(server(), None) is None
    assert await store.register(server(directory="other"), None) == server()
    assert await store.register(moved, server()) is None
    assert await store.register(server(port=2), server()) == moved

    assert (await changes(store)).servers == [moved]


async def test_beats_are_counted_and_are_no_change(store: ClusterStore) -> None:
    await store.register(server("b1"), None)
    await store.register(server("b2"), None)
    before = (await changes(store)).revision

    assert await store.beat(["b1"]) == {"b1": 1, "b2": 0}
    assert await store.beat(["b1", "b2", "unknown"]) == {"b1": 2, "b2": 1}
    assert await store.changes(before) is None


async def test_tables_of_a_newer_version_are_refused(store: ClusterStore, tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    newer = database(path)
    async with newer.writing() as connection:
        await connection.execute(text("UPDATE pulque_migrations SET version_num = '9999'"))
    del store

    with pytest.raises(ConfigError, match=r"meta\.sqlite are of a newer version of Pulque"):
        await newer.migrate()
    await newer.close()


async def test_tables_that_are_current_are_left_alone(
    store: ClusterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del store
    # Not even imported: `pulque up` begins sooner without it.
    monkeypatch.setitem(sys.modules, "alembic", None)
    again = database(tmp_path / "meta.sqlite")
    await again.migrate()
    async with again.writing() as connection:
        await connection.execute(text("UPDATE pulque_migrations SET version_num = '0001'"))
    with pytest.raises(ImportError):
        await again.migrate()
    await again.close()


def test_the_newest_step_is_the_last_of_the_files() -> None:
    steps = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert steps.get_current_head() == migrations.NEWEST


async def test_migrations_make_the_tables_that_the_code_uses(
    store: ClusterStore, tmp_path: Path
) -> None:
    del store
    opened = database(tmp_path / "meta.sqlite")

    def columns(connection: Connection) -> dict[str, list[tuple[str, bool]]]:
        found = inspect(connection)
        return {
            name: [(each["name"], bool(each["nullable"])) for each in found.get_columns(name)]
            for name in TABLES.tables
        }

    async with opened.reading() as connection:
        made = await connection.run_sync(columns)
    await opened.close()

    assert made == {
        name: [(each.name, bool(each.nullable)) for each in table.columns]
        for name, table in TABLES.tables.items()
    }


async def test_a_database_that_does_not_answer_is_away() -> None:
    nobody = parse_database_url("postgresql://me@127.0.0.1:1/x")
    missing = Database(nobody, password=None, timeout_s=60.0)

    with pytest.raises(UnavailableError, match="the database of the meta servers is away"):
        await ClusterStore(missing).open()
    await missing.close()

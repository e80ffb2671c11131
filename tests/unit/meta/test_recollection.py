"""A meta server that starts while its database is away goes on with what it knew last."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pulque.errors import UnavailableError
from pulque.meta.saved_directory import FILE
from pulque.wire.registration import Registered
from tests.unit.meta.running import RunningMeta, broker, eventually, register, route

Start = Callable[[], Awaitable[RunningMeta]]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Where the database is; without this folder it is away."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.fixture
async def start(tmp_path: Path, elsewhere: Path) -> AsyncIterator[Start]:
    started: list[RunningMeta] = []

    async def start_one() -> RunningMeta:
        url = f"sqlite:///{elsewhere / 'meta.sqlite'}"
        sections = {"database": {"url": url}, "cluster": {"heartbeat": "1h"}}
        running = RunningMeta(tmp_path / "own", sections)
        started.append(running)
        await running.server.start()
        return running

    yield start_one
    for running in started:
        await running.close()


def away_from(folder: Path) -> Path:
    return folder.with_name("away")


def move(folder: Path, to: Path) -> None:
    folder.rename(to)


def make(folder: Path) -> None:
    folder.mkdir()


def write_down(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(content)


async def test_what_was_known_is_known_and_only_what_is_new_has_to_wait(
    start: Start, elsewhere: Path
) -> None:
    first = await start()
    raw = await first.connect()
    await register(raw, "b1", "b2")
    before = await route(raw, "orders")
    await first.server.administration.mark_subject("closed", is_read_only=True)
    cluster = (await raw.status())["cluster"]
    await first.close()
    move(elsewhere, away_from(elsewhere))

    second = await start()
    raw = await second.connect()
    status = await raw.status()
    assert status["cluster"] == cluster
    assert status["database"] != "ok"
    assert status["as_of_ms"] > 0
    assert await route(raw, "orders") == before
    registered = await raw.ask(broker("b1"), Registered)
    assert (registered.cluster, registered.read_only) == (cluster, ("closed",))
    # A broker that is known may even come back elsewhere.
    await register(raw, "b2", port=7999, incarnation=2)
    assert 7999 in [each.port for each in (await route(raw, "orders")).partitions]
    with pytest.raises(UnavailableError, match="database of the meta servers is away"):
        await route(raw, "new")
    with pytest.raises(UnavailableError, match="database of the meta servers is away"):
        await raw.ask(broker("b3"), Registered)

    move(away_from(elsewhere), elsewhere)

    async def is_whole() -> bool:
        found = await raw.status()
        return bool(found["database"] == "ok" and found["as_of_ms"] is None)

    await eventually(is_whole)
    assert (await route(raw, "new")).partitions
    await register(raw, "b3")


async def test_what_another_cluster_knew_is_forgotten(start: Start, elsewhere: Path) -> None:
    first = await start()
    raw = await first.connect()
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    await first.close()
    move(elsewhere, away_from(elsewhere))
    second = await start()
    raw = await second.connect()
    assert (await route(raw, "orders", "g")).partitions
    old = (await raw.status())["cluster"]

    make(elsewhere)  # and so there is a new and empty database

    async def is_new() -> bool:
        found = await raw.status()
        return bool(found["cluster"] != old and found["database"] == "ok")

    await eventually(is_new)
    assert not (await route(raw, "orders", "g")).partitions
    assert not (await route(raw, "*", "g")).partitions
    assert (await raw.status())["servers"] == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1}'])
async def test_what_cannot_be_read_is_as_nothing(
    start: Start, elsewhere: Path, tmp_path: Path, content: bytes
) -> None:
    write_down(tmp_path / "own", content)
    move(elsewhere, away_from(elsewhere))

    raw = await (await start()).connect()

    with pytest.raises(UnavailableError, match="knows nothing yet: the database"):
        await route(raw, "orders")


async def test_with_the_database_nobody_looks_at_what_was_written_down(
    start: Start, tmp_path: Path
) -> None:
    write_down(tmp_path / "own", b"nonsense")

    running = await start()
    raw = await running.connect()
    await register(raw, "b1")

    assert (await route(raw, "orders")).partitions
    assert (await raw.status())["as_of_ms"] is None

"""Very many clients of one broker are served by the meta server that it asks for them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.errors import PulqueError, UnavailableError
from pulque.meta.ordered.partition_allotment import PartitionAllotment
from pulque.model.routes import RouteKind
from pulque.net.server import AcceptedConnection
from pulque.serving.metalink import MOST_HELD
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend, Attended
from pulque.wire.requests import Route, Status
from pulque.wire.responses import Response, Routed, StatusReport
from pulque.wire.routes import KnownRoute, Watch, Watched
from tests.unit.meta.running import RunningMeta, Start, eventually, route

MANY = 120
"""More than a meta server holds for one connection."""
FEW = 4
LONG_MS = 30_000


@pytest.fixture
async def meta(start: Start) -> RunningMeta:
    return await start(ordered={"timeout": "3s"})


@pytest.fixture
async def home(meta: RunningMeta, tmp_path: Path) -> AsyncIterator[RawConnection]:
    """A connection to a broker of a cluster with one meta server."""
    settings = {
        "name": "b1",
        "listen": {"port": 0},
        "storage": {"directory": str(tmp_path / "data"), "reserve": "1MiB"},
        "cluster": {"meta": [meta.server.url.removeprefix("pulque://")]},
    }
    broker = Broker(BrokerSettings.model_validate(settings))
    await broker.start()
    raw = await RawConnection.open(broker.url)
    yield raw
    raw.close()
    await broker.close()


def word(number: int, known: Attended | None = None) -> Attend:
    version, wait_ms = (known.version, LONG_MS) if known else (0, 0)
    return Attend(f"c{number}", 1, "orders", f"group-{number}", version=version, wait_ms=wait_ms)


async def answers(raw: RawConnection, asked: list[int]) -> list[Response | PulqueError]:
    return [await raw.answer_to(each) for each in asked]


async def test_many_ordered_consumers_are_held_until_their_next_heartbeat(
    home: RawConnection,
) -> None:
    await route(home, "orders")
    known = [await home.ask(word(number), Attended) for number in range(MANY)]

    asked = [await home.put(word(number, known[number])) for number in range(MANY)]

    assert {type(each) for each in await answers(home, asked)} == {Attended}


async def test_many_watches_are_held_at_once(meta: RunningMeta, home: RawConnection) -> None:
    raw = await meta.connect()
    version = (await route(home, "later", "g")).version
    known = (KnownRoute(RouteKind.REALTIME, "later", "g", version),)
    await home.ask(Watch("c", "", known, wait_ms=1), Watched)

    asked = [await home.put(Watch("c", "", known, LONG_MS)) for _ in range(MANY)]

    async def all_are_held() -> bool:
        status = await raw.ask(Status(), StatusReport)
        return int(json.loads(status.report)["watches"]) == MANY

    await eventually(all_are_held)
    await route(home, "later")
    assert {type(each) for each in await answers(home, asked)} == {Watched}


async def test_a_crowd_shares_few_connections(
    home: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(home, "orders")
    welcomed: list[AcceptedConnection] = []
    welcome = AcceptedConnection.welcome

    def noted(connection: AcceptedConnection) -> None:
        welcomed.append(connection)
        welcome(connection)

    monkeypatch.setattr(AcceptedConnection, "welcome", noted)
    asked = [await home.put(word(number)) for number in range(MANY)]

    assert {type(each) for each in await answers(home, asked)} == {Attended}
    assert len(welcomed) <= FEW


async def test_many_new_subjects_are_created_at_once(home: RawConnection) -> None:
    asked = [
        await home.put(Route(f"new-{number}", "", RouteKind.REALTIME)) for number in range(MANY)
    ]

    assert {type(each) for each in await answers(home, asked)} == {Routed}


async def test_all_who_wait_are_told_that_the_meta_server_is_gone(
    meta: RunningMeta, home: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(home, "orders")
    await home.ask(word(0), Attended)
    unanswered: list[object] = []
    monkeypatch.setattr(
        PartitionAllotment, "attend", lambda _, asked, *__: unanswered.append(asked)
    )
    asked = [await home.put(word(number)) for number in range(FEW)]

    async def all_wait() -> bool:
        return len(unanswered) == FEW

    await eventually(all_wait)
    await meta.server.close()

    for each in await answers(home, asked):
        assert isinstance(each, UnavailableError)


async def test_what_a_meta_server_did_not_answer_in_time_takes_no_place_from_others(
    home: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(home, "orders")
    monkeypatch.setattr("pulque.broker.cluster.meta_relay._ROUTE_S", 0.5)
    with monkeypatch.context() as slow:
        slow.setattr(PartitionAllotment, "attend", lambda *_: None)
        asked = [await home.put(word(number)) for number in range(MANY)]
        for each in await answers(home, asked):
            assert isinstance(each, UnavailableError)
    monkeypatch.undo()

    asked = [await home.put(word(number)) for number in range(MOST_HELD)]

    assert {type(each) for each in await answers(home, asked)} == {Attended}

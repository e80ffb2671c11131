"""Clients of one broker are served by the meta server that it asks for them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.errors import PulqueError, UnavailableError
from pulque.meta.attendance import Attendance
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend, Attended
from pulque.wire.responses import Response
from tests.unit.meta.running import RunningMeta, Start, eventually, route

FEW = 4


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


def word(number: int) -> Attend:
    return Attend(f"c{number}", 1, "orders", f"group-{number}", wait_ms=0)


async def answers(raw: RawConnection, asked: list[int]) -> list[Response | PulqueError]:
    return [await raw.answer_to(each) for each in asked]


async def test_all_who_wait_are_told_that_the_meta_server_is_gone(
    meta: RunningMeta, home: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(home, "orders")
    await home.ask(word(0), Attended)
    unanswered: list[object] = []
    monkeypatch.setattr(Attendance, "attend", lambda _, asked, *__: unanswered.append(asked))
    asked = [await home.put(word(number)) for number in range(FEW)]

    async def all_wait() -> bool:
        return len(unanswered) == FEW

    await eventually(all_wait)
    await meta.server.stop()

    for each in await answers(home, asked):
        assert isinstance(each, UnavailableError)

"""The API's messages that are due later, in front of two delay servers in memory."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

import pulque
from pulque.admin.app import create_app
from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.context import Context
from pulque.clock import SystemClock
from pulque.model.routes import Role
from tests.unit.admin.fakes import FakeCluster, server
from tests.unit.client.fake_cluster import FakeCluster as FakeServers
from tests.unit.client.fake_delay import FakeDelay, delayed_routes

START = datetime(2027, 1, 31, 9, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def delays() -> Iterator[list[FakeDelay]]:
    with FakeDelay("d1") as one, FakeDelay("d2") as other:
        yield [one, other]


@pytest.fixture
def client(delays: list[FakeDelay], tmp_path: Path) -> Iterator[pulque.Client]:
    with FakeServers(1) as servers:
        servers.meta.delayed_routes = delayed_routes(delays)
        with pulque.connect(servers.url, name="test", state_dir=tmp_path) as client:
            yield client


class Api:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def get(self, path: str, status: int = 200, **query: Any) -> Any:
        answer = await self.http.get(f"/api/v1/delayed{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, body: object, status: int = 200) -> Any:
        answer = await self.http.post(f"/api/v1/delayed{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


def api_of(delays: list[FakeDelay]) -> Api:
    known = {each.name: server(each.name, each.url, role=Role.DELAY) for each in delays}
    app = create_app(Context(FakeCluster(known), BrokerRequests(), SystemClock()))
    transport = httpx.ASGITransport(app=app)
    return Api(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1"))


async def test_counts_pages_and_contents(delays: list[FakeDelay], client: pulque.Client) -> None:
    api = api_of(delays)
    sent = [
        client.send("orders", b"tea", at=START + hour * HOUR, key="k")
        for hour in range(3)
        for _ in range(3)
    ]
    counts = await api.get("/counts")
    assert [(each["hour"], each["messages"]) for each in counts["items"]] == [
        ("2027-01-31T09:00:00Z", 3),
        ("2027-01-31T10:00:00Z", 3),
        ("2027-01-31T11:00:00Z", 3),
    ]
    page = await api.get("/counts", limit=2, end=(START + 3 * HOUR).isoformat())
    rest = await api.get("/counts", limit=2, cursor=page["next"])
    assert [each["hour"][11:13] for each in page["items"] + rest["items"]] == ["09", "10", "11"]
    found: list[str] = []
    cursor: dict[str, Any] = {}
    for _ in range(9):
        page = await api.get("", limit=2, **cursor)
        found += [each["id"] for each in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert found == [each.id for each in sorted(sent, key=lambda one: (one.due_at_ms, one.id))]
    some = await api.get("", subject="orders", start=(START + HOUR).isoformat(), limit=4)
    assert {each["due_at"] for each in some["items"]} == {
        "2027-01-31T10:00:00Z",
        "2027-01-31T11:00:00Z",
    }
    assert (await api.get("", subject="others"))["items"] == []
    shown = await api.get(f"/{sent[0].id}")
    assert (shown["body"], shown["key"], shown["subject"]) == ("tea", "k", "orders")
    assert shown["delay_server"] == sent[0].broker_group


async def test_what_is_stuck_is_paged_with_the_reason(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    sent = [client.send("orders", b"tea", at=START + hour * HOUR) for hour in range(7)]
    for delay in delays:
        delay.refused = dict.fromkeys(delay.scheduled, f"{delay.name} says no")
    api = api_of(delays)
    found: list[dict[str, Any]] = []
    cursor: dict[str, Any] = {}
    for _ in range(3):
        page = await api.get("/stuck", limit=3, **cursor)
        found += page["items"]
        cursor = {"cursor": page["next"]}
    assert cursor == {"cursor": None}
    assert [each["id"] for each in found] == [each.id for each in sent]
    assert {(each["delay_server"], each["reason"]) for each in found} == {
        ("d1", "d1 says no"),
        ("d2", "d2 says no"),
    }
    assert (await api.get("/stuck", subject="others"))["items"] == []
    assert all(each["reason"] is None for each in (await api.get(""))["items"])
    await api.get("/stuck", 422, cursor="nonsense")


async def test_cancel_and_reschedule(delays: list[FakeDelay], client: pulque.Client) -> None:
    api = api_of(delays)
    one, other = (client.send("orders", b"x", delay=60) for _ in range(2))
    done = await api.post("/cancel", {"ids": [one.id, "0" * 32]})
    assert [each["outcome"] for each in done["outcomes"]] == ["cancelled", "unknown"]
    moved = await api.post(f"/{other.id}/reschedule", {"at": "2027-03-01T01:00:00+01:00"})
    assert moved == {"id": other.id, "outcome": "moved", "due_at": "2027-03-01T00:00:00Z"}
    assert (await api.post(f"/{one.id}/reschedule", {"delay_seconds": 5}))["outcome"] == (
        "already_cancelled"
    )
    await api.get(f"/{one.id}", 404)


async def test_nonsense_is_refused(delays: list[FakeDelay]) -> None:
    api = api_of(delays)
    await api.get("/nonsense", 422)
    await api.get("", 422, start="2027-01-01T00:00:00")
    await api.get("", 422, start=START.isoformat(), end=START.isoformat())
    await api.get("", 422, cursor="nonsense")
    await api.post("/cancel", {"ids": []}, 422)
    await api.post("/cancel", {"ids": ["x"]}, 422)
    bad: list[object] = [
        {},
        {"at": "2027-01-01T00:00:00"},
        {"delay_seconds": -1},
        {"delay_seconds": True},
        {"delay_seconds": 1, "at": START.isoformat()},
    ]
    for body in bad:
        await api.post(f"/{'0' * 32}/reschedule", body, 422)


async def test_a_server_that_is_away_is_named(
    delays: list[FakeDelay], client: pulque.Client
) -> None:
    sent = [client.send("orders", b"x", at=START) for _ in range(2)]
    api = api_of(delays)
    delays[1].stop_listening()
    delays[1].drop_all()
    page = await api.get("")
    assert [each["delay_server"] for each in page["items"]] == ["d1"]
    assert [each["broker"] for each in page["unreachable"]] == ["d2"]
    (lost,) = [each for each in sent if each.broker_group == "d2"]
    await api.post("/cancel", {"ids": [lost.id]}, 503)
    delays[1].listen_again()


async def test_without_a_delay_server_it_says_so() -> None:
    answer = await api_of([]).get("", 409)
    assert answer["error"] == "NoDelayServerError"
    assert "pulque delay" in answer["message"]

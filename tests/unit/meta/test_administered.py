"""The cluster as the administration API sees it: a real meta server, asked over HTTP."""

import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from pulque.errors import ConfigError, PulqueError
from pulque.model.cluster import ServerState
from pulque.model.leadership import Leadership
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import Role
from pulque.testing.raw import RawConnection
from pulque.wire.leadership import ChangeInSync, InSyncChanged
from pulque.wire.registration import Registered
from pulque.wire.routes import Watch, Watched
from tests.unit.meta.running import (
    RunningMeta,
    Start,
    broker,
    eventually,
    follow,
    leading,
    register,
    route,
)

Ask = Callable[..., Awaitable[Any]]
ADMIN = {"enabled": True}


@pytest.fixture
async def meta(start: Start) -> RunningMeta:
    return await start(admin=ADMIN, replication={"lease": "1h"})


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60.0) as client:
        yield client


def asking(http: httpx.AsyncClient, meta: RunningMeta) -> Ask:
    async def ask(method: str, path: str, body: object = None, status: int = 200) -> Any:
        url = f"{meta.server.admin_url}/api/v1{path}"
        answer = await http.request(method, url, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    return ask


async def in_sync(raw: RawConnection, row: Leadership, *directories: str) -> Leadership:
    """Have the leader of a group say who is in sync; without itself, it hands over."""
    said = ChangeInSync("g", row.token, row.epoch, row.version, directories)
    answer = await raw.ask(said, InSyncChanged)
    assert answer.is_done
    return answer.leadership


async def test_servers_are_listed_marked_and_removed_when_they_are_gone(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "b1", "b2")

    rows = (await ask("GET", "/brokers"))["items"]
    assert [(row["name"], row["state"], row["address"]) for row in rows] == [
        ("b1", "ready", "127.0.0.1:7450"),
        ("b2", "ready", "127.0.0.1:7450"),
    ]
    await ask("PUT", "/brokers/b1/read-only", {"read_only": True})
    await ask("PUT", "/brokers/b2/drain", {"draining": True})
    told = [await raw.ask(broker(name), Registered) for name in ("b1", "b2")]
    assert [(each.is_read_only, each.is_draining) for each in told] == [
        (True, False),
        (False, True),
    ]
    refused = await ask("DELETE", "/brokers/b1", status=409)
    assert "drain and stop it first" in refused["message"]
    await raw.ask(broker("b1", state=ServerState.LEAVING), Registered)
    await ask("DELETE", "/brokers/b1", status=204)
    assert [row["name"] for row in (await ask("GET", "/brokers"))["items"]] == ["b2"]
    await ask("DELETE", "/brokers/b1", status=404)


async def test_who_leads_and_who_follows_is_listed(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "alone")
    await register(raw, "d1", role=Role.DELAY)
    await follow(raw, "b1", "b2", "b3")
    row = (await leading(raw, "b1", message_end=1, min_in_sync=2)).leadership
    await leading(raw, "b2")
    await register(raw, "b1", broker_group="g", incarnation=2)
    assert (await ask("GET", "/cluster"))["short_of_copies"] == 1
    row = await in_sync(raw, row, row.leader, "directory-of-b2")

    async def shown() -> dict[str, tuple[object, ...]]:
        rows = (await ask("GET", "/brokers"))["items"]
        fields = ("state", "standing", "epoch", "in_sync")
        return {row["name"]: tuple(row[field] for field in fields) for row in rows}

    assert await shown() == {
        "alone": ("ready", "alone", 0, None),
        "b1": ("ready", "leader", 1, True),
        "b2": ("following", "follower", 1, True),
        "b3": ("following", "follower", 1, False),
        "d1": ("ready", "alone", 0, None),
    }
    await in_sync(raw, row, "directory-of-b2")
    assert (await shown())["b1"] == ("ready", "follower", 2, False)
    assert (await shown())["b2"] == ("following", "leader", 2, True)


@pytest.mark.parametrize("mark", [("drain", "draining"), ("read-only", "read_only")])
async def test_a_follower_is_not_drained_as_that_would_stop_its_group(
    meta: RunningMeta, http: httpx.AsyncClient, mark: tuple[str, str]
) -> None:
    path, field = mark
    raw, ask = await meta.connect(), asking(http, meta)
    await follow(raw, "b1", "b2")
    await leading(raw, "b1", message_end=1, min_in_sync=1)
    await register(raw, "b1", broker_group="g", incarnation=2)
    assert [each.is_writable for each in (await route(raw, "orders")).partitions] == [True]

    refused = await ask("PUT", f"/brokers/b2/{path}", {field: True}, status=409)
    assert "b2 follows in broker group g" in refused["message"]
    assert "name its leader, b1" in refused["message"]
    assert [each.is_writable for each in (await route(raw, "orders")).partitions] == [True]

    await ask("PUT", f"/brokers/b1/{path}", {field: True})
    assert [each.is_writable for each in (await route(raw, "orders")).partitions] == [False]
    # Whoever led then may follow by now.
    await ask("PUT", f"/brokers/b2/{path}", {field: False})
    assert [each.is_writable for each in (await route(raw, "orders")).partitions] == [True]


async def test_a_meta_server_elects_nobody_by_command_and_asks_the_leader(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "alone")
    await follow(raw, "b1", "b2", "b3", port=1)  # nobody answers there
    row = (await leading(raw, "b1", message_end=1)).leadership
    for name in ("b2", "b3"):
        await leading(raw, name)
    row = await in_sync(raw, row, row.leader, "directory-of-b2")

    refused = await ask("POST", "/brokers/b2/lead", {}, status=503)
    assert "b1 that leads broker group g cannot be reached" in refused["message"]
    refused = await ask("POST", "/brokers/b3/lead", {}, status=409)
    assert "b3 does not have all that was confirmed" in refused["message"]
    await ask("POST", "/brokers/alone/lead", {}, status=422)
    await ask("POST", "/brokers/nobody/lead", {}, status=404)
    found = await ask("POST", "/brokers/b1/lead", {})
    assert (found["standing"], found["epoch"]) == ("leader", 1)
    assert (await leading(raw, "b1")).leadership == row


async def test_subjects_are_created_and_extended(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await ask("POST", "/subjects", {"subject": "order.book"}, status=503)
    await register(raw, "b1", "b2")

    made = await ask("POST", "/subjects", {"subject": "order.book"}, status=201)
    assert made == await ask("POST", "/subjects", {"subject": "order.book"})
    extended = await ask("POST", "/subjects/order.book/extend", {"partitions": 4})
    assert {(p["broker_group"], p["partition"]) for p in made["partitions"]} == {
        ("b1", "order.book"),
        ("b2", "order.book"),
    }
    assert {(p["broker_group"], p["partition"]) for p in extended["partitions"]} == {
        ("b1", "order.book"),
        ("b2", "order.book"),
        *((p["broker_group"], p["partition"]) for p in extended["partitions"][2:]),
    }
    assert extended["taking"] == 4
    assert [(p["closed"], p["parents"]) for p in extended["partitions"]] == [
        (True, []),
        (True, []),
        *((False, [f"order.book@{p['broker_group']}"]) for p in extended["partitions"][2:]),
    ]
    assert Counter(p["broker_group"] for p in extended["partitions"]) == {"b1": 3, "b2": 3}
    found = {
        (each.broker_group, each.partition, tuple(each.slots))
        for each in (await route(raw, "order.book", "g")).partitions
    }
    assert found == {
        (p["broker_group"], p["partition"], (0, 0) if p["closed"] else tuple(p["slots"]))
        for p in extended["partitions"]
    }
    assert extended == await ask("POST", "/subjects/order.book/extend", {"partitions": 4})
    await ask("POST", "/subjects/order.book/extend", {"partitions": 3}, status=409)
    await ask("POST", "/subjects/nothing/extend", {"partitions": 3}, status=404)


async def test_partitions_are_merged_and_order_is_set(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "b1", "b2")
    await ask("POST", "/subjects", {"subject": "order.book"}, status=201)
    await ask("POST", "/subjects/order.book/extend", {"partitions": 4})
    for wrong in (0, 1025, -1, "4", None):
        await ask("POST", "/subjects/order.book/extend", {"partitions": wrong}, status=422)
        await ask("POST", "/subjects/order.book/merge", {"partitions": wrong}, status=422)
    await ask("POST", "/subjects/order.book/merge", {"partitions": 5}, status=409)
    merged = await ask("POST", "/subjects/order.book/merge", {"partitions": 2})
    assert (merged["taking"], len(merged["partitions"])) == (2, 8)
    assert merged == await ask("POST", "/subjects/order.book/merge", {"partitions": 2})
    await ask("PUT", "/subjects/nothing/order", {"order": "strict"}, status=404)
    await ask("PUT", "/subjects/order.book/order", {"order": "sometimes"}, status=422)
    strict = await ask("PUT", "/subjects/order.book/order", {"order": "strict"})
    assert (merged["order"], strict["order"]) == ("best-effort", "strict")
    assert (await route(raw, "order.book", "g")).order is OrderStrategy.STRICT


async def test_subjects_are_marked_and_paged(meta: RunningMeta, http: httpx.AsyncClient) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "b1", "b2")
    await ask("POST", "/subjects", {"subject": "order.book"}, status=201)

    await ask("PUT", "/subjects/order.*/read-only", {"read_only": True})
    assert (await ask("GET", "/subjects/order.book"))["read_only"]
    assert not any(each.is_writable for each in (await route(raw, "order.book", "g")).partitions)
    for number in range(5):
        await ask("POST", "/subjects", {"subject": f"s{number}"}, status=201)
    page = await ask("GET", "/subjects?limit=4")
    rest = await ask("GET", f"/subjects?limit=4&cursor={page['next']}")
    names = [row["subject"] for row in page["items"] + rest["items"]]
    assert names == ["order.book", "s0", "s1", "s2", "s3", "s4"]
    assert rest["next"] is None


async def test_a_subject_is_created_where_one_says(
    meta: RunningMeta, http: httpx.AsyncClient
) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await register(raw, "b1", "b2", "b3")

    wanted = {"subject": "chosen", "broker_groups": ["b3", "b1"]}
    made = await ask("POST", "/subjects", wanted, status=201)

    assert [each["broker_group"] for each in made["partitions"]] == ["b3", "b1"]
    await ask("POST", "/subjects", {"subject": "x", "broker_groups": ["b9"]}, status=422)


async def test_policies_hold_at_every_meta_server_and_after_a_restart(
    start: Start, http: httpx.AsyncClient
) -> None:
    first = await start(admin=ADMIN, subjects={"spread": 1})
    second = await start(admin=ADMIN, subjects={"spread": 1})
    ask, ask_other = asking(http, first), asking(http, second)
    raw = await first.connect()
    await register(raw, "b1", "b2")
    assert {row["key"]: row["value"] for row in (await ask("GET", "/config"))["items"]} == {
        "create": "first-send",
        "allowed": [],
        "spread": 1,
    }

    changed = await ask(
        "PATCH", "/config", {"create": "beforehand", "allowed": ["order.*"], "spread": 2}
    )

    async def is_there() -> bool:
        return bool(await ask_other("GET", "/config") == changed)

    await eventually(is_there)
    other = await second.connect()
    assert not (await raw.ask(broker("b1"), Registered)).may_create
    with pytest.raises(PulqueError, match="created beforehand"):
        await route(other, "order.book")
    await ask_other("POST", "/subjects", {"subject": "stock"}, status=409)
    made = await ask_other("POST", "/subjects", {"subject": "order.book"}, status=201)
    assert len(made["partitions"]) == 2
    await first.close()
    third = await start(admin=ADMIN, subjects={"spread": 1})
    assert await asking(http, third)("GET", "/config") == changed


async def test_clients_that_watch_are_online(meta: RunningMeta, http: httpx.AsyncClient) -> None:
    raw, ask = await meta.connect(), asking(http, meta)
    await raw.ask(Watch("id-1", "shop", (), 0), Watched)

    (row,) = (await ask("GET", "/clients"))["items"]

    assert (row["server"], row["client"], row["application"]) == ("meta", "id-1", "shop")
    assert row["address"].startswith("127.0.0.1:")


async def test_a_port_that_somebody_chose_and_is_taken_is_told(
    meta: RunningMeta, start: Start
) -> None:
    taken = int(meta.server.admin_url.rpartition(":")[2])

    with pytest.raises(ConfigError, match=f"cannot listen on .*{taken}"):
        await start(admin={"port": taken})


def _port_below_a_taken_one(sockets: contextlib.ExitStack) -> int:
    """Return a free port if the one 40 above could be taken; 0 if another program uses it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        taken = sockets.enter_context(socket.socket())
        try:
            taken.bind(("127.0.0.1", port + 40))
        except (OSError, OverflowError):
            return 0
        taken.listen()
        return port


async def test_the_port_is_40_above_and_any_free_one_if_that_is_taken(start: Start) -> None:
    with contextlib.ExitStack() as sockets:
        port = next(filter(None, (_port_below_a_taken_one(sockets) for _ in range(100))))
        other = await start(admin=ADMIN, listen={"port": port})

    assert other.server.admin_url
    assert other.server.admin_url != f"http://127.0.0.1:{port + 40}"


async def test_it_can_be_left_out(running: RunningMeta) -> None:
    assert running.server.admin_url == ""

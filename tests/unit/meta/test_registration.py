"""Servers register, beat, fall silent, leave and come back."""

import time

import pytest

from pulque.errors import FencedError, InvalidNameError, InvalidRequestError, NotAllowedError
from pulque.model.cluster import ServerState
from pulque.model.routes import Role, RouteKind
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection
from pulque.wire.responses import Registered
from tests.unit.meta.running import RunningMeta, Start, broker, eventually, register, route


async def groups_of(raw: RawConnection, subject: str = "orders") -> set[str]:
    return {each.broker_group for each in (await route(raw, subject, "g")).partitions}


@pytest.mark.accepts("001-12", "001-09", "004-14", "004-32")
async def test_a_broker_registers_and_is_in_the_routes(raw: RawConnection) -> None:
    answer = await raw.ask(broker("b1", host="10.0.0.7", port=7451), Registered)

    assert raw.welcome is not None
    assert answer.cluster
    assert answer.heartbeat_ms == 5000
    (there,) = (await route(raw, "orders")).partitions
    assert (there.broker_group, there.host, there.port) == ("b1", "10.0.0.7", 7451)


@pytest.mark.accepts("001-14", "001-18", "001-19")
async def test_the_list_depends_on_what_is_asked_for(raw: RawConnection) -> None:
    await register(raw, "b1", "b2")
    await register(raw, "d1", role=Role.DELAY, port=7460)

    realtime = await route(raw, "orders")
    delayed = await route(raw, "orders", kind=RouteKind.DELAYED)
    consumer = await route(raw, "orders", "billing")
    of_pattern = await route(raw, "orders.*", "billing")

    assert {each.broker_group for each in realtime.partitions} == {"b1", "b2"}
    assert [(each.broker_group, each.port) for each in delayed.partitions] == [("d1", 7460)]
    assert consumer.partitions == realtime.partitions
    assert {each.broker_group for each in of_pattern.partitions} == {"b1", "b2"}


@pytest.mark.accepts("004-15", "004-36")
async def test_who_is_silent_for_three_beats_leaves_the_routes(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, cluster={"heartbeat": "1s"})).connect()
    await register(raw, "b1", "b2", now_ms=clock.now_ms())
    await route(raw, "orders")
    for _ in range(3):
        clock.advance(1000)
        await register(raw, "b1", now_ms=clock.now_ms())
    assert await groups_of(raw) == {"b1", "b2"}

    clock.advance(1)

    async def is_out() -> bool:
        return await groups_of(raw) == {"b1"}

    await eventually(is_out)
    await register(raw, "b2", now_ms=clock.now_ms())
    assert await groups_of(raw) == {"b1", "b2"}


async def test_who_leaves_is_out_at_once(raw: RawConnection) -> None:
    await register(raw, "b1", "b2")
    await route(raw, "orders")

    await register(raw, "b1", state=ServerState.LEAVING)

    assert await groups_of(raw) == {"b2"}


async def test_who_has_no_room_is_pulled_from_but_not_sent_to(raw: RawConnection) -> None:
    await register(raw, "b1")
    await route(raw, "orders")

    await register(raw, "b1", state=ServerState.FULL)

    (there,) = (await route(raw, "orders")).partitions
    assert not there.is_writable


async def test_the_second_of_one_name_is_told_where_the_first_is(raw: RawConnection) -> None:
    await register(raw, "b1", host="10.0.0.7", port=7451)

    with pytest.raises(NotAllowedError, match=r"b1 is taken by the server at 10\.0\.0\.7:7451"):
        await raw.ask(broker("b1", directory="another"), Registered)

    assert [each.port for each in (await route(raw, "orders")).partitions] == [7451]


async def test_a_restart_is_let_in_at_its_new_address(raw: RawConnection) -> None:
    await register(raw, "b1", port=7451)
    await route(raw, "orders")

    await register(raw, "b1", port=7452, incarnation=2)

    assert [each.port for each in (await route(raw, "orders")).partitions] == [7452]
    with pytest.raises(FencedError):
        await raw.ask(broker("b1", port=7451, incarnation=1), Registered)


async def test_a_second_broker_of_a_group_is_refused(raw: RawConnection) -> None:
    await register(raw, "b1")

    with pytest.raises(NotAllowedError, match="broker group b1 is held by b1"):
        await raw.ask(broker("b2", broker_group="b1"), Registered)


async def test_a_broker_of_another_cluster_is_refused(raw: RawConnection) -> None:
    answer = await raw.ask(broker("b1"), Registered)
    await raw.ask(broker("b1", cluster=answer.cluster), Registered)

    with pytest.raises(NotAllowedError, match=f"cluster elsewhere, .* cluster {answer.cluster}"):
        await raw.ask(broker("b2", cluster="elsewhere"), Registered)


@pytest.mark.parametrize(("apart_s", "way"), [(90, "ahead of"), (-90, "behind")])
async def test_a_clock_far_apart_is_warned_about(
    raw: RawConnection, apart_s: int, way: str
) -> None:
    now_ms = time.time_ns() // 1_000_000

    answer = await raw.ask(broker("b1", now_ms=now_ms + apart_s * 1000), Registered)

    assert way in answer.warning
    assert (await raw.ask(broker("b2"), Registered)).warning == ""


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": "a b"}, InvalidNameError),
        ({"name": ""}, InvalidNameError),
        ({"broker_group": "../x"}, InvalidNameError),
        ({"host": ""}, InvalidRequestError),
        ({"host": "x\x1b[2J"}, InvalidRequestError),
        ({"directory": "x" * 256}, InvalidRequestError),
        ({"port": 0}, InvalidRequestError),
        ({"incarnation": 2**63}, InvalidRequestError),
        ({"role": Role.META}, InvalidRequestError),
    ],
)
async def test_a_registration_that_makes_no_sense_is_refused(
    raw: RawConnection, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await raw.ask(broker("b1", **fields), Registered)

    assert (await raw.status())["servers"] == []


@pytest.mark.accepts("004-16")
async def test_a_restarted_meta_server_knows_what_it_knew(
    start: Start, running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1", "b2")
    before = await route(raw, "orders")
    await running.close()

    again = await (await start(running.directory)).connect()

    assert await route(again, "orders") == before
    assert again.welcome is not None
    assert raw.welcome is not None
    assert again.welcome.cluster == raw.welcome.cluster


async def test_the_status_tells_about_the_servers(raw: RawConnection) -> None:
    await register(raw, "b1")

    report = await raw.status()

    (server,) = report["servers"]
    assert (server["name"], server["address"], server["state"]) == (
        "b1",
        "127.0.0.1:7450",
        "ready",
    )
    assert (server["partitions"], server["log_bytes"]) == (3, 1000)
    assert report["database"] == "ok"

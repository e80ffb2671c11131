"""Brokers ask who leads their group, and leaders say who has all that was confirmed."""

import dataclasses
from typing import Any

import pytest

from pulque.errors import (
    FencedError,
    InvalidNameError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    UnavailableError,
)
from pulque.model.cluster import ServerState
from pulque.model.leadership import Leadership
from pulque.model.ordered import OrderStrategy
from pulque.model.positions import Epoch
from pulque.model.routes import RouteKind
from pulque.testing.raw import RawConnection, expect
from pulque.wire.leadership import ChangeInSync, InSyncChanged, Led
from pulque.wire.registration import Registered
from pulque.wire.routes import KnownRoute, Watch, Watched
from tests.unit.meta.running import (
    RunningMeta,
    Start,
    broker,
    eventually,
    follow,
    lead,
    leading,
    register,
    route,
)

B1, B2, B3 = (f"directory-of-b{number}" for number in (1, 2, 3))
FIRST = Leadership("g", Epoch(1), 1, B1, "token-of-b1", (B1,), 2)


@pytest.fixture
async def running(start: Start) -> RunningMeta:
    """A meta server that takes nobody for silent, however busy the machine is."""
    return await start(replication={"lease": "1h"}, cluster={"heartbeat": "1h"})


def said(row: Leadership, *in_sync: str) -> ChangeInSync:
    """Return what the leader of a row says about who is in sync."""
    return ChangeInSync(row.broker_group, row.token, row.epoch, row.version, in_sync)


async def led_by_two(raw: RawConnection) -> Leadership:
    """Have b1 lead, and b2 follow it in sync."""
    await follow(raw, "b1", "b2")
    row = await founded(raw)
    return (await raw.ask(said(row, B1, B2), InSyncChanged)).leadership


async def founded(raw: RawConnection) -> Leadership:
    """Have b1 lead alone, with something in its log; b2 has asked, too."""
    row = (await leading(raw, "b1", message_end=100, min_in_sync=2)).leadership
    await leading(raw, "b2")
    return row


async def waiting(raw: RawConnection, count: int) -> None:
    async def are_waiting() -> bool:
        return bool((await raw.status())["leads"] == count)

    await eventually(are_waiting)


# -- the first ----------------------------------------------------------------------------------


async def test_the_first_that_asks_is_the_leader_and_all_are_told_so(raw: RawConnection) -> None:
    await follow(raw, "b1", host="10.0.0.7", port=7451)
    await follow(raw, "b2")

    first = await leading(raw, "b1", message_end=100, min_in_sync=2)
    second = await leading(raw, "b2", min_in_sync=1)

    assert first == Led(FIRST, "b1", "10.0.0.7", 7451, 3_600_000)
    assert second == first


async def test_of_two_that_have_nothing_one_waits_until_the_other_has_asked(
    raw: RawConnection,
) -> None:
    await follow(raw, "b1", "b2")

    with pytest.raises(UnavailableError, match=r"b2 at .* has not asked, and may have messages"):
        await leading(raw, "b1")
    assert (await leading(raw, "b2")).leadership.leader == B2
    assert (await leading(raw, "b1")).leadership.leader == B2


async def test_one_that_has_nothing_does_not_come_before_one_that_has_messages(
    raw: RawConnection,
) -> None:
    await follow(raw, "b1", "b2")
    with pytest.raises(UnavailableError, match="logs of b1 are not whole"):
        await leading(raw, "b1", message_end=100, is_fit=False)

    with pytest.raises(NotAllowedError, match=r"b1 at 127\.0\.0\.1:7450 served broker group"):
        await leading(raw, "b2")


async def test_who_served_before_comes_first(running: RunningMeta, raw: RawConnection) -> None:
    await register(raw, "b1", broker_group="g", state=ServerState.LEAVING)
    await follow(raw, "b2")

    with pytest.raises(NotAllowedError, match="start it first, or remove it with `pulque broker"):
        await leading(raw, "b2")
    await running.server.administration.remove_server("b1")
    assert (await leading(raw, "b2")).leadership.leader == B2


async def test_who_is_not_registered_is_not_answered(raw: RawConnection) -> None:
    await follow(raw, "b1")

    for request in (
        lead("b2"),
        lead("b1", directory="another"),
        lead("b1", broker_group="h"),
        lead("b2", directory=B1),
    ):
        with pytest.raises(NotAllowedError, match="it has to register first"):
            await raw.ask(request, Led)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": "a b"}, InvalidNameError),
        ({"broker_group": ""}, InvalidNameError),
        ({"directory": ""}, InvalidRequestError),
        ({"directory": "with space"}, InvalidRequestError),
        ({"token": "x" * 256}, InvalidRequestError),
        ({"token": "\x1b"}, InvalidRequestError),
        ({"message_end": 2**63}, InvalidRequestError),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(
    raw: RawConnection, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await leading(raw, "b1", **fields)


# -- restarts and losses ------------------------------------------------------------------------


async def test_a_leader_that_was_restarted_leads_in_the_next_epoch(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    again = await leading(raw, "b1", token="new", message_end=100)
    follower = await leading(raw, "b2", token="new")

    assert again.leadership == row._replace(epoch=Epoch(2), version=row.version + 1, token="new")
    assert follower == again


async def test_a_leader_that_comes_back_with_less_is_refused_until_another_can_lead(
    raw: RawConnection,
) -> None:
    row = await led_by_two(raw)
    await follow(raw, "b2", incarnation=2)  # it was started again, and has not asked yet

    for _ in range(2):
        with pytest.raises(
            NotAllowedError, match="had 100 bytes of its logs on disk, and has 99: it is an older"
        ):
            await leading(raw, "b1", token="old", message_end=99)
    await leading(raw, "b2", token="b2-again", message_end=100)

    found = (await leading(raw, "b1", token="old", message_end=99)).leadership
    assert (found.leader, found.epoch, found.in_sync) == (B2, row.epoch + 1, (B2,))


async def test_a_follower_that_comes_back_with_less_is_not_in_sync_any_more(
    raw: RawConnection,
) -> None:
    row = await led_by_two(raw)
    await leading(raw, "b2", message_end=100)

    found = (await leading(raw, "b2", token="old", message_end=99)).leadership

    assert found == row._replace(version=row.version + 1, in_sync=(B1,))


async def test_a_process_may_have_its_own_log_cut(raw: RawConnection) -> None:
    row = await led_by_two(raw)
    await leading(raw, "b2", message_end=100)

    assert (await leading(raw, "b2", message_end=99)).leadership == row


async def test_who_lost_something_is_not_in_sync_any_more(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    found = (await leading(raw, "b2", is_fit=False)).leadership

    assert found == row._replace(version=row.version + 1, in_sync=(B1,))


async def test_a_leader_that_lost_something_is_replaced_if_anybody_has_everything(
    raw: RawConnection,
) -> None:
    await follow(raw, "b1", "b2")
    row = await founded(raw)
    alone = await leading(raw, "b1", token="new", is_fit=False)
    assert alone.leadership == row
    await raw.ask(said(row, B1, B2), InSyncChanged)

    found = (await leading(raw, "b1", token="new", is_fit=False)).leadership

    assert (found.leader, found.token, found.epoch) == (B2, "token-of-b2", 2)
    assert found.in_sync == (B2,)


# -- who is in sync -----------------------------------------------------------------------------


async def test_the_leader_says_who_is_in_sync(raw: RawConnection) -> None:
    await follow(raw, "b1", "b2")
    row = await founded(raw)

    answer = await raw.ask(said(row, B2, B1), InSyncChanged)

    assert answer == InSyncChanged(
        is_done=True, leadership=row._replace(version=2, in_sync=(B1, B2))
    )
    assert (await leading(raw, "b2")).leadership == answer.leadership


async def test_only_the_leader_that_saw_it_as_it_is_may_say_so(raw: RawConnection) -> None:
    row = await led_by_two(raw)
    right = said(row, B1)

    for wrong in (
        dataclasses.replace(right, token="old"),
        dataclasses.replace(right, epoch=right.epoch + 1),
        dataclasses.replace(right, version=right.version - 1),
    ):
        assert await raw.ask(wrong, InSyncChanged) == InSyncChanged(is_done=False, leadership=row)


async def test_nobody_unknown_is_in_sync(raw: RawConnection) -> None:
    row = await led_by_two(raw)
    await register(raw, "b3")

    for in_sync in ((), ("unknown",), (B3, "unknown")):
        with pytest.raises(InvalidRequestError, match="somebody has to be in sync"):
            await raw.ask(said(row, *in_sync), InSyncChanged)
    with pytest.raises(InvalidRequestError, match="nobody leads broker group h"):
        await raw.ask(ChangeInSync("h", "t", 1, 1, (B1,)), InSyncChanged)
    assert (await leading(raw, "b1")).leadership == row

    # Nor do they keep others from leaving.
    answer = await raw.ask(said(row, B1, B3, "unknown"), InSyncChanged)
    assert answer.is_done
    assert answer.leadership.in_sync == (B1,)


async def test_a_leader_that_leaves_itself_out_hands_over(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    answer = await raw.ask(said(row, B2), InSyncChanged)

    assert answer.is_done
    assert answer.leadership == Leadership(
        "g", Epoch(2), row.version + 1, B2, "token-of-b2", (B2,), 2
    )


async def test_nobody_is_handed_over_to_who_is_not_there(raw: RawConnection) -> None:
    row = await led_by_two(raw)
    await follow(raw, "b2", state=ServerState.LEAVING)

    answer = await raw.ask(said(row, B2), InSyncChanged)

    assert not answer.is_done
    assert (answer.leadership.leader, answer.leadership.epoch) == (B1, row.epoch)


async def test_a_database_that_is_older_than_what_brokers_were_told_elects_nobody(
    raw: RawConnection,
) -> None:
    row = await led_by_two(raw)

    # As after its file was put back from a backup: b2 led since, and b1 is started again.
    with pytest.raises(NotAllowedError, match="has version 2: it was restored from an older"):
        await leading(raw, "b2", version=row.version + 3)
    for token in (row.token, "new"):
        with pytest.raises(NotAllowedError, match=r"b2 .* 5 .* remove told\.json .* of b2"):
            await leading(raw, "b1", token=token, message_end=100)

    (shown,) = (await raw.status())["leaderships"]
    assert (shown["epoch"], shown["version"]) == (row.epoch, row.version)


async def test_once_the_brokers_that_were_told_more_forget_it_the_group_goes_on(
    raw: RawConnection,
) -> None:
    """As the refusal says: it names them, and their ``told.json`` is removed."""
    row = await led_by_two(raw)
    with pytest.raises(NotAllowedError, match=r"^b2 of broker group g"):
        await leading(raw, "b2", version=row.version + 3)
    with pytest.raises(NotAllowedError, match="b1, b2 of broker group g"):
        await leading(raw, "b1", version=row.version + 2)

    with pytest.raises(NotAllowedError, match=r"^b2 of broker group g"):
        await leading(raw, "b1", version=0)
    await leading(raw, "b2", version=0)
    led = await leading(raw, "b1", token="new")

    assert (led.leadership.leader, led.leadership.epoch) == (B1, row.epoch + 1)


async def test_who_was_told_more_and_is_removed_holds_up_nobody(
    running: RunningMeta, raw: RawConnection
) -> None:
    row = await led_by_two(raw)
    with pytest.raises(NotAllowedError, match=r"^b2 of broker group g"):
        await leading(raw, "b2", version=row.version + 3)
    with pytest.raises(NotAllowedError, match=r"^b2 of broker group g"):
        await leading(raw, "b1")

    await follow(raw, "b2", state=ServerState.LEAVING)
    await running.server.administration.remove_server("b2")

    assert (await leading(raw, "b1")).leadership.leader == B1


# -- waiting ------------------------------------------------------------------------------------


async def test_a_question_waits_until_something_changes(
    running: RunningMeta, raw: RawConnection
) -> None:
    other = await running.connect()
    row = await led_by_two(raw)
    request_id = await other.put(lead("b2", version=row.version, wait_ms=60_000))
    await waiting(raw, 1)

    changed = (await raw.ask(said(row, B1), InSyncChanged)).leadership

    assert expect(await other.answer_to(request_id), Led).leadership == changed
    await waiting(raw, 0)


async def test_a_broker_that_was_given_another_name_is_still_the_leader(
    raw: RawConnection,
) -> None:
    await follow(raw, "b1", "b2")
    row = await founded(raw)
    with pytest.raises(NotAllowedError, match="in use by b1"):
        await follow(raw, "a-new", directory=B1, incarnation=2, port=7999)
    await register(raw, "b1", broker_group="g", state=ServerState.LEAVING)
    await follow(raw, "a-new", directory=B1, incarnation=2, port=7999)

    found = await leading(raw, "a-new", directory=B1, token="new", message_end=100)

    assert (found.leadership.leader, found.leadership.epoch) == (B1, row.epoch + 1)
    assert (found.name, found.port) == ("a-new", 7999)


async def test_two_brokers_do_not_share_a_data_directory(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    # A copy that was started once more than the broker that it is of, and one started as often.
    with pytest.raises(NotAllowedError, match=r"is in use by b1 at .*: one of them is a copy"):
        await follow(raw, "b3", directory=B1, incarnation=2, port=7999)
    with pytest.raises(FencedError, match=r"is in use by b1 at .*: one of them is a copy"):
        await follow(raw, "b1", port=7999)

    assert (await leading(raw, "b1", message_end=100)).leadership == row


@pytest.mark.parametrize("changed", [{"broker_group": "h"}, {"directory": B1}, {"port": 7999}])
@pytest.mark.parametrize("name", ["b2", "b3"])
async def test_a_broker_that_was_refused_changes_nothing_when_it_leaves(
    raw: RawConnection, name: str, changed: dict[str, Any]
) -> None:
    row = await led_by_two(raw)
    before = (await raw.status())["servers"]
    said = {"broker_group": "g", "directory": B2, "state": ServerState.LEAVING} | changed
    if (name, *changed) == ("b3", "port"):
        said["port"] = 7450  # b2's directory, wherever it is

    with pytest.raises((NotAllowedError, FencedError)):
        await register(raw, name, **said)

    found = await raw.status()
    keys = ("name", "broker_group", "address", "state")
    assert [[each[key] for key in keys] for each in found["servers"]] == [
        [each[key] for key in keys] for each in before
    ]
    assert found["leaderships"][0]["version"] == row.version
    await follow(raw, "b2", incarnation=2)


@pytest.mark.parametrize("name", ["b2", "b3"])
async def test_a_broker_does_not_start_as_one_of_another_group(
    raw: RawConnection, name: str
) -> None:
    await led_by_two(raw)
    await register(raw, "b2", broker_group="g", state=ServerState.LEAVING)

    for state in (ServerState.READY, ServerState.FOLLOWING):
        with pytest.raises(NotAllowedError, match="has the messages of broker group g, and"):
            await register(raw, name, broker_group="h", directory=B2, incarnation=2, state=state)


async def test_a_question_is_answered_in_time_though_nothing_changed(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    found = await leading(raw, "b2", version=row.version, wait_ms=20)

    assert found.leadership == row


async def test_a_question_waits_no_longer_than_a_heartbeat(start: Start) -> None:
    raw = await (await start(replication={"lease": "200ms"})).connect()
    row = await led_by_two(raw)

    found = await leading(raw, "b1", version=row.version, wait_ms=3_600_000)

    assert (found.leadership, found.lease_ms) == (row, 200)


async def test_questions_of_a_connection_that_is_gone_are_forgotten(
    running: RunningMeta, raw: RawConnection
) -> None:
    other = await running.connect()
    row = await led_by_two(raw)
    for _ in range(100):
        await other.put(lead("b2", version=row.version, wait_ms=3_600_000))
    with pytest.raises(OverloadedError):
        await leading(other, "b2")
    await waiting(raw, 100)

    other.close()

    await waiting(raw, 0)
    assert (await raw.ask(said(row, B1), InSyncChanged)).is_done


async def test_a_meta_server_that_stops_answers_who_waits(
    running: RunningMeta, raw: RawConnection
) -> None:
    row = await led_by_two(raw)
    request_id = await raw.put(lead("b2", version=row.version, wait_ms=3_600_000))
    await waiting(await running.connect(), 1)

    await running.server.close()

    assert expect(await raw.answer_to(request_id), Led).leadership == row


# -- registration and routes --------------------------------------------------------------------


async def test_brokers_of_a_led_group_speak_several_times_in_a_lease(start: Start) -> None:
    raw = await (await start()).connect()
    follower = broker("b1", broker_group="g", state=ServerState.FOLLOWING)

    assert (await raw.ask(follower, Registered)).heartbeat_ms == 1000
    await leading(raw, "b1")
    leader = dataclasses.replace(follower, state=ServerState.READY, incarnation=2)
    assert (await raw.ask(leader, Registered)).heartbeat_ms == 1000
    assert (await raw.ask(broker("alone"), Registered)).heartbeat_ms == 5000


async def test_only_the_leader_registers_as_ready(raw: RawConnection) -> None:
    await led_by_two(raw)

    await register(raw, "b1", broker_group="g", incarnation=2)
    with pytest.raises(NotAllowedError, match=r"g is led by b1 at 127\.0\.0\.1:7450 in epoch 1"):
        await register(raw, "b2", broker_group="g", incarnation=2)
    with pytest.raises(NotAllowedError, match="may only follow"):
        await register(raw, "b3", broker_group="g")
    await follow(raw, "b1", incarnation=3)


async def test_only_the_leader_is_in_the_routes_and_followers_in_those_of_followers(
    raw: RawConnection,
) -> None:
    await register(raw, "alone", port=1)
    await follow(raw, "b1", port=7451)
    await follow(raw, "b2", port=7452)
    assert [each.port for each in (await route(raw, "orders")).partitions] == [1]
    row = await founded(raw)
    await register(raw, "b1", broker_group="g", port=7451, incarnation=2)

    # Two have to be in sync, and one is.
    everybody = (await route(raw, "*", "c")).partitions
    assert {(each.port, each.is_writable) for each in everybody} == {(1, True), (7451, False)}
    await raw.ask(said(row, B1, B2), InSyncChanged)

    placed = await route(raw, "paid")
    assert {(each.port, each.is_writable) for each in placed.partitions} == {
        (1, True),
        (7451, True),
    }
    for subject in ("paid", "*"):
        (follower,) = (await route(raw, subject, "c", RouteKind.FOLLOWERS)).partitions
        assert tuple(follower[:6]) == (subject, "g", "127.0.0.1", 7452, False, (0, 0))
    for subject in ("orders", "unknown"):
        assert (await route(raw, subject, "c", RouteKind.FOLLOWERS)).version == 0


async def test_where_order_is_strict_the_leader_is_named_even_if_it_is_away(
    running: RunningMeta, raw: RawConnection
) -> None:
    await follow(raw, "b1", port=7451)
    await follow(raw, "b2", port=7452)
    await leading(raw, "b1", message_end=1, min_in_sync=1)
    await register(raw, "b1", broker_group="g", port=7451, incarnation=2)
    await route(raw, "book")
    await running.server.administration.order_subject("book", OrderStrategy.STRICT)

    await register(
        raw, "b1", broker_group="g", port=7451, incarnation=2, state=ServerState.LEAVING
    )

    (named,) = (await route(raw, "book", "c")).partitions
    assert (named.port, named.is_writable) == (7451, False)


async def test_the_route_of_followers_can_be_watched(
    running: RunningMeta, raw: RawConnection
) -> None:
    await led_by_two(raw)
    await register(raw, "b1", broker_group="g", incarnation=2)
    before = await route(raw, "paid", "c", RouteKind.FOLLOWERS)
    watching = await running.connect()
    known = KnownRoute(RouteKind.FOLLOWERS, "paid", "c", before.version)
    request_id = await watching.put(Watch("me", "app", (known,), 60_000))

    created = await route(raw, "paid")

    assert [each.port for each in created.partitions] == [7450]
    (changed,) = expect(await watching.answer_to(request_id), Watched).changed
    assert changed.kind is RouteKind.FOLLOWERS
    assert changed.route == await route(raw, "paid", "c", RouteKind.FOLLOWERS)
    known = known._replace(version=changed.route.version)
    request_id = await watching.put(Watch("me", "app", (known,), 60_000))

    await follow(raw, "b2", state=ServerState.LEAVING)

    (changed,) = expect(await watching.answer_to(request_id), Watched).changed
    assert changed.route.partitions == ()


async def test_a_follower_that_lives_is_not_removed(
    running: RunningMeta, raw: RawConnection
) -> None:
    await led_by_two(raw)

    with pytest.raises(NotAllowedError, match=r"b2 at .* lives"):
        await running.server.administration.remove_server("b2")


async def test_the_status_tells_who_leads(raw: RawConnection) -> None:
    row = await led_by_two(raw)

    (found,) = (await raw.status())["leaderships"]

    assert found.pop("silent_ms") in {None, *range(600_000)}
    assert found == {
        "broker_group": "g",
        "epoch": 1,
        "version": row.version,
        "leader": "b1",
        "directory": B1,
        "in_sync": [B1, B2],
        "min_in_sync": 2,
    }

"""Subjects are created and placed once, and clients hear of what changes."""

import asyncio

import pytest

from pulque.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotAllowedError,
    RemoteProtocolError,
    UnavailableError,
    UnknownSubjectError,
    UnsupportedError,
)
from pulque.model.cluster import ServerState
from pulque.model.routes import Role, RouteKind
from pulque.testing.raw import RawConnection, expect
from pulque.wire.requests import Hello, Read, Route, Watch
from pulque.wire.responses import Registered, Routed, Watched, Welcome
from pulque.wire.routes import KnownRoute
from tests.unit.meta.running import (
    RunningMeta,
    Start,
    broker,
    follow,
    leading,
    register,
    route,
)

LONG_MS = 30_000
"""Longer than any test waits: whatever is answered was not answered by its time-out."""


def watch_of(
    subject: str,
    version: int,
    *,
    group: str = "",
    wait_ms: int = LONG_MS,
    kind: RouteKind = RouteKind.REALTIME,
) -> Watch:
    return Watch("client", "app", (KnownRoute(kind, subject, group, version),), wait_ms)


async def answer(raw: RawConnection, request_id: int) -> Watched:
    return expect(await raw.answer_to(request_id), Watched)


# -- creating -----------------------------------------------------------------------------------


@pytest.mark.accepts("001-13", "002-10", "004-33", "002-06")
async def test_a_first_send_creates_the_subject_on_two_groups(raw: RawConnection) -> None:
    await register(raw, "b1", "b2", "b3")

    first = await route(raw, "orders")

    assert [each.partition for each in first.partitions] == ["orders", "orders"]
    assert len({each.broker_group for each in first.partitions}) == 2
    assert [each.slots for each in first.partitions] == [(0, 512), (512, 1024)]


@pytest.mark.accepts("002-11")
async def test_a_subject_stays_where_it_is(raw: RawConnection) -> None:
    await register(raw, "b1")
    first = await route(raw, "orders")

    await register(raw, "b2", "b3")

    assert await route(raw, "orders") == first
    assert len((await route(raw, "refunds")).partitions) == 2


async def test_one_group_is_enough_if_there_is_no_other(raw: RawConnection) -> None:
    await register(raw, "b1")

    assert [each.slots for each in (await route(raw, "orders")).partitions] == [(0, 1024)]


async def test_without_a_broker_a_subject_has_to_wait(raw: RawConnection) -> None:
    with pytest.raises(UnavailableError, match="no broker takes messages now"):
        await route(raw, "orders")


async def test_who_only_looks_creates_nothing(raw: RawConnection) -> None:
    await register(raw, "b1")

    assert (await route(raw, "orders", "billing")).partitions == ()
    assert (await raw.status())["subjects"] == 0


async def test_many_are_created_together(raw: RawConnection) -> None:
    await register(raw, "b1", "b2", "b3", "b4")
    ids = [await raw.put(Route(f"s{n}")) for n in range(100)]
    routes = [expect(await raw.answer_to(each), Routed).route for each in ids]

    per_group = [each.broker_group for found in routes for each in found.partitions]
    assert sorted(per_group.count(group) for group in set(per_group)) == [50] * 4


async def test_the_same_is_created_once_for_all_who_want_it(raw: RawConnection) -> None:
    await register(raw, "b1", "b2", "b3", "b4")
    ids = [await raw.put(Route("orders")) for _ in range(50)]

    routes = {expect(await raw.answer_to(each), Routed).route for each in ids}

    assert len(routes) == 1


@pytest.mark.accepts("004-33")
async def test_subjects_may_have_to_be_created_beforehand(start: Start) -> None:
    running = await start(subjects={"create": "beforehand"})
    raw = await running.connect()
    assert not (await raw.ask(broker("b1"), Registered)).may_create
    with pytest.raises(UnknownSubjectError, match="created beforehand"):
        await route(raw, "orders")

    await running.server.administration.create_subject("orders", ["b1"])

    assert len((await route(raw, "orders")).partitions) == 1


@pytest.mark.accepts("003-40")
async def test_a_subject_that_is_not_allowed_is_refused(start: Start) -> None:
    raw = await (await start(subjects={"allowed": ["order.*", "refunds"]})).connect()
    await register(raw, "b1")

    await route(raw, "order.paid")
    await route(raw, "refunds")
    with pytest.raises(NotAllowedError, match=r"subjects\.allowed allows order\.\*, refunds"):
        await route(raw, "orders")


async def test_there_are_only_so_many_subjects(start: Start) -> None:
    raw = await (await start(limits={"max_subjects": 2})).connect()
    await register(raw, "b1")
    await route(raw, "a")
    await route(raw, "b")

    with pytest.raises(NotAllowedError, match=r"limits\.max_subjects"):
        await route(raw, "c")

    await route(raw, "a")


# -- by command ---------------------------------------------------------------------------------


@pytest.mark.accepts("002-13", "002-14", "002-07")
async def test_a_command_extends_a_subject_and_clients_hear_of_it(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1", "b2")
    before = await route(raw, "order.book")
    request_id = await raw.put(watch_of("order.book", before.version))

    await running.server.administration.extend_subject("order.book", 4)

    (changed,) = (await answer(raw, request_id)).changed
    first, second = [each.broker_group for each in before.partitions]
    assert [
        (each.partition, each.broker_group, each.slots) for each in changed.route.partitions
    ] == [
        ("order.book", first, (0, 0)),
        ("order.book", second, (0, 0)),
        ("order.book#1", first, (0, 256)),
        ("order.book#2", first, (256, 512)),
        ("order.book#3", second, (512, 768)),
        ("order.book#4", second, (768, 1024)),
    ]
    assert [each.is_writable for each in changed.route.partitions] == [False] * 2 + [True] * 4


@pytest.mark.accepts("002-03", "002-04", "004-33")
async def test_a_subject_is_created_on_chosen_groups(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "g1", "g2", "g3")

    await running.server.administration.create_subject("order.book", ["g1", "g1", "g2", "g2"])

    found = (await route(raw, "order.book")).partitions
    assert [each.broker_group for each in found] == ["g1", "g1", "g2", "g2"]
    assert len({each[:2] for each in found}) == 4


async def test_a_subject_that_is_extended_stays_where_it_was_placed(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "g1", "g2", "g3")
    commands = running.server.administration
    await commands.create_subject("order.book", ["g2"])

    for count in (2, 5):
        await commands.extend_subject("order.book", count)
        found = (await route(raw, "order.book")).partitions
        assert {each.broker_group for each in found} == {"g2"}

    await commands.extend_subject("order.book", 6, ["g3"])
    taking = [each for each in (await route(raw, "order.book")).partitions if each.is_writable]
    assert sorted(each.broker_group for each in taking) == ["g2"] * 5 + ["g3"]
    for group in ("g2", "g3"):
        await commands.mark_group(group, is_read_only=True)
    with pytest.raises(NotAllowedError, match="is on g2, g3, which take no messages now"):
        await commands.extend_subject("order.book", 7)


async def test_commands_that_make_no_sense_are_refused(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    await route(raw, "orders")
    commands = running.server.administration

    with pytest.raises(UnknownSubjectError):
        await commands.extend_subject("refunds", 4)
    with pytest.raises(InvalidRequestError, match="1 partitions that take messages, and 1"):
        await commands.extend_subject("orders", 1)
    with pytest.raises(InvalidRequestError, match="2 partitions are to be added, and 1 broker"):
        await commands.extend_subject("orders", 3, ["b1"])
    with pytest.raises(InvalidRequestError, match="there is no broker group 'b9'; there are b1"):
        await commands.create_subject("refunds", ["b9"])
    with pytest.raises(NotAllowedError, match="exists"):
        await commands.create_subject("orders")
    with pytest.raises(InvalidNameError):
        await commands.mark_subject("a b", is_read_only=True)
    with pytest.raises(NotAllowedError, match="lives"):
        await commands.remove_server("b1")


async def test_a_read_only_group_is_pulled_from_but_not_sent_to(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1", "b2")
    await route(raw, "orders")
    commands = running.server.administration

    for marks in ({"is_read_only": True}, {"is_read_only": False, "is_draining": True}):
        await commands.mark_group("b1", **marks)
        found = {each.broker_group: each for each in (await route(raw, "orders")).partitions}
        told = await raw.ask(broker("b1"), Registered)

        assert (found["b1"].is_writable, found["b2"].is_writable) == (False, True)
        assert told.is_read_only == marks["is_read_only"]
        assert told.is_draining == marks.get("is_draining", False)
        assert [each.broker_group for each in (await route(raw, "x")).partitions] == ["b2"]


async def test_a_read_only_subject_takes_no_sends_and_brokers_are_told(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    await route(raw, "order.paid")
    before = await raw.ask(broker("b1"), Registered)

    await running.server.administration.mark_subject("order.*", is_read_only=True)

    told = await raw.ask(broker("b1"), Registered)
    assert told.read_only == ("order.*",)
    assert told.marks_version != before.marks_version
    assert not (await route(raw, "order.paid")).partitions[0].is_writable
    await running.server.administration.mark_subject("order.*", is_read_only=False)
    assert (await route(raw, "order.paid")).partitions[0].is_writable


async def test_a_removed_server_is_forgotten_until_it_registers_anew(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1", "b2")
    await register(raw, "b1", state=ServerState.LEAVING)

    await running.server.administration.remove_server("b1")

    assert [each["name"] for each in (await raw.status())["servers"]] == ["b2"]
    await register(raw, "b1", directory="another")
    assert len((await raw.status())["servers"]) == 2


# -- watching -----------------------------------------------------------------------------------


@pytest.mark.accepts("002-09")
async def test_a_watch_hears_when_a_broker_comes_and_goes(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    watching = await running.connect()
    known = 0
    for port, state, writable in (
        (7450, ServerState.READY, [True]),
        (7451, ServerState.READY, [True]),
        (7451, ServerState.FULL, [False]),
        (7451, ServerState.LEAVING, []),
    ):
        request_id = await watching.put(watch_of("*", known, group="billing"))
        await watching.status()
        await register(raw, "b1", port=port, incarnation=port, state=state)
        (changed,) = (await answer(watching, request_id)).changed
        assert [each.is_writable for each in changed.route.partitions] == writable
        known = changed.route.version


async def test_a_watch_of_what_is_not_there_hears_when_it_is_created(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    watching = await running.connect()
    request_id = await watching.put(watch_of("orders", 0, group="billing"))
    await watching.status()

    created = await route(raw, "orders")

    (changed,) = (await answer(watching, request_id)).changed
    assert (changed.group, changed.route) == ("billing", created)


async def test_a_watch_ends_with_nothing_when_its_time_is_up(raw: RawConnection) -> None:
    await register(raw, "b1")
    known = await route(raw, "orders")

    watched = await raw.ask(watch_of("orders", known.version, wait_ms=1), Watched)

    assert watched == Watched(())
    assert (await raw.status())["watches"] == 0
    assert (await raw.status())["clients"] == 1


async def test_only_what_differs_is_told(raw: RawConnection) -> None:
    await register(raw, "b1")
    same, other = await route(raw, "same"), await route(raw, "other")
    known = (
        KnownRoute(RouteKind.REALTIME, "same", "", same.version),
        KnownRoute(RouteKind.REALTIME, "other", "g", other.version + 1),
        KnownRoute(RouteKind.DELAYED, "other", "", 0),
    )

    watched = await raw.ask(Watch("client", "app", known, LONG_MS), Watched)

    assert [(each.kind, each.group, each.route) for each in watched.changed] == [
        (RouteKind.REALTIME, "g", other)
    ]


async def test_watches_of_a_connection_that_is_gone_are_forgotten(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    gone = await running.connect()
    await gone.put(watch_of("orders", 0, group="g"))
    await gone.status()
    assert (await raw.status())["watches"] == 1

    gone.close()

    async with asyncio.timeout(10):
        while (await raw.status())["watches"]:  # noqa: ASYNC110  # nobody sets an event
            await asyncio.sleep(0.01)
    await route(raw, "orders")


async def test_who_waits_is_answered_when_the_server_stops(
    running: RunningMeta, raw: RawConnection
) -> None:
    await register(raw, "b1")
    request_id = await raw.put(watch_of("orders", 0, group="g"))
    await raw.status()

    await running.server.close()

    assert await answer(raw, request_id) == Watched(())


# -- what is not for a meta server --------------------------------------------------------------


async def test_the_welcome_says_what_it_is(raw: RawConnection) -> None:
    assert raw.welcome is not None
    assert (raw.welcome.role, raw.welcome.max_message) == (Role.META, 0)
    assert raw.welcome.cluster


async def test_messages_are_not_for_a_meta_server(raw: RawConnection) -> None:
    with pytest.raises(UnsupportedError, match="this is a meta server and does not know Read"):
        await raw.ask(Read("orders", 0, 1, 1, 0), Routed)
    with pytest.raises(UnsupportedError, match="ask a broker for its own"):
        await route(raw, "orders", kind=RouteKind.LOCAL)
    with pytest.raises(UnsupportedError, match="ask a broker for its own"):
        await raw.ask(watch_of("orders", 0, kind=RouteKind.LOCAL), Watched)


@pytest.mark.parametrize(
    ("subject", "group"), [("order.*", ""), ("", "g"), ("a b", ""), ("x", "%")]
)
async def test_names_that_are_none_are_refused(
    raw: RawConnection, subject: str, group: str
) -> None:
    with pytest.raises(InvalidNameError):
        await route(raw, subject, group)


async def test_a_watch_has_its_limit(start: Start) -> None:
    raw = await (await start(limits={"max_watched": 1})).connect()
    known = tuple(KnownRoute(RouteKind.REALTIME, f"s{n}", "", 0) for n in range(2))

    with pytest.raises(InvalidRequestError, match="2 routes in a watch; at most 1"):
        await raw.ask(Watch("client", "app", known, 1), Watched)


async def test_a_second_hello_ends_the_connection(raw: RawConnection) -> None:
    with pytest.raises(RemoteProtocolError):
        await raw.ask(Hello(1, 1, "me"), Welcome)


async def test_who_has_no_followers_is_told_where_others_of_the_subject_have_some(
    running: RunningMeta, raw: RawConnection
) -> None:
    await follow(raw, "b1", "b2")
    await leading(raw, "b1", message_end=1, min_in_sync=1)
    await register(raw, "b1", broker_group="g", incarnation=2)
    await register(raw, "alone")
    commands = running.server.administration
    await commands.create_subject("mixed", ["g", "alone"])
    await commands.create_subject("plain", ["alone"])

    async def alone(subject: str) -> dict[str, bool]:
        found = (await route(raw, subject)).partitions
        return {each.broker_group: each.is_alone for each in found}

    assert await alone("mixed") == {"g": False, "alone": True}
    assert await alone("plain") == {"alone": False}
    # Also while nobody of the group with followers serves.
    await register(raw, "b1", broker_group="g", incarnation=2, state=ServerState.LEAVING)
    assert await alone("mixed") == {"alone": True}

"""A broker registers at every meta server, hears how it stands, and needs none to serve."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pulque.errors import (
    ConfigError,
    DataDirectoryError,
    ErrorCode,
    NotAllowedError,
    OverloadedError,
    UnavailableError,
    UnknownSubjectError,
)
from pulque.model.names import PartitionName, Pattern
from pulque.model.routes import PartitionRoute, Role, RouteKind
from pulque.model.routes import Route as RouteOf
from pulque.testing.raw import RawConnection
from pulque.wire.registration import ServerState
from pulque.wire.requests import Route, Watch
from pulque.wire.responses import Outcome, Routed, Watched
from tests.unit.broker.fake_meta import FakeMeta, registered
from tests.unit.broker.running import Running, Start, eventually, numbered


@pytest.fixture
async def metas() -> AsyncIterator[list[FakeMeta]]:
    made = [FakeMeta(), FakeMeta()]
    for meta in made:
        await meta.start()
    yield made
    for meta in made:
        await meta.stop()


def cluster_of(metas: list[FakeMeta]) -> dict[str, object]:
    return {"meta": [meta.address for meta in metas]}


async def until_heard(meta: FakeMeta, count: int) -> None:
    wanted = len(meta.heard) + count

    async def is_heard() -> bool:
        return len(meta.heard) >= wanted

    await eventually(is_heard)


def route_to(*broker_groups: str) -> RouteOf:
    places = (PartitionRoute(PartitionName("orders"), each, "h", 1) for each in broker_groups)
    return RouteOf(Pattern("orders"), 7, tuple(places))


async def sent(running: Running, partition: str = "orders") -> Outcome:
    return await (await running.connect()).send(partition, numbered(1))


@pytest.mark.accepts("001-12", "004-18", "004-36")
async def test_a_broker_registers_at_every_meta_server_and_goes_on_doing_so(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster={**cluster_of(metas), "advertise": "shop.example:7000"})

    for meta in metas:
        await until_heard(meta, 3)
        first = meta.heard[0]
        assert (first.name, first.broker_group, first.role) == ("broker", "broker", Role.BROKER)
        assert (first.host, first.port) == ("shop.example", 7000)
        assert first.incarnation == 1
        assert first.directory
        assert {each.state for each in meta.heard} == {ServerState.READY}
    status = await (await running.connect()).status()
    assert status["cluster"]["registered_at"] == [meta.address for meta in metas]


async def test_without_an_address_to_advertise_it_tells_where_it_listens(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster={**cluster_of(metas), "group": "east"})

    told = metas[0].heard[0]
    assert f"pulque://{told.host}:{told.port}" == running.broker.url
    assert (told.name, told.broker_group) == ("broker", "east")


async def test_a_clean_stop_is_told_to_every_meta_server(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    await until_heard(metas[1], 1)

    await running.close()

    assert [meta.states[-1] for meta in metas] == [ServerState.LEAVING] * 2


async def test_a_restarted_broker_is_the_same_with_a_higher_incarnation(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    again = await running.restarted()
    await again.close()

    first, last = metas[0].heard[0], metas[0].heard[-1]
    assert first.directory == last.directory
    assert (first.incarnation, last.incarnation) == (1, 2)
    assert (first.cluster, last.cluster) == ("", "blue")


async def test_a_broker_that_no_meta_server_wants_does_not_start(
    start: Start, metas: list[FakeMeta]
) -> None:
    metas[1].standing = NotAllowedError("the name broker is taken by 10.0.0.7:7450")
    metas[0].standing = OverloadedError("ask the other one")

    with pytest.raises(ConfigError, match=r"taken by 10\.0\.0\.7:7450"):
        await start(cluster=cluster_of(metas))


async def test_a_broker_of_another_cluster_is_refused_with_the_remedy(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    await running.close()
    for meta in metas:
        meta.standing = registered(cluster="green")

    with pytest.raises(ConfigError, match=r"belongs to cluster blue.*empty data directory"):
        await start(cluster=cluster_of(metas))


async def test_a_damaged_note_of_the_cluster_is_told_with_the_remedy(
    start: Start, metas: list[FakeMeta], tmp_path: Path
) -> None:
    running = await start(cluster=cluster_of(metas))
    await running.close()
    note = tmp_path / "data" / "cluster.json"
    assert json.loads(note.read_text())["cluster"] == "blue"
    note.write_text("{")

    with pytest.raises(DataDirectoryError, match=r"cluster\.json cannot be read: restore it"):
        await start(cluster=cluster_of(metas))


async def test_a_broker_starts_and_serves_while_all_meta_servers_are_away(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        await meta.stop()
    running = await start(cluster=cluster_of(metas))

    assert (await sent(running)).code == ErrorCode.NONE
    await metas[0].start()
    await until_heard(metas[0], 1)


async def test_it_registers_again_when_a_meta_server_comes_back(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    assert (await sent(running)).code == ErrorCode.NONE
    for meta in metas:
        await meta.stop()
    assert (await sent(running)).code == ErrorCode.NONE

    for meta in metas:
        await meta.start()
        await until_heard(meta, 2)


# -- what the cluster says ----------------------------------------------------------------------


@pytest.mark.accepts("003-38")
@pytest.mark.parametrize("mark", ["is_read_only", "is_draining"])
async def test_a_broker_that_is_read_only_refuses_sends_and_serves_the_rest(
    start: Start, metas: list[FakeMeta], mark: str
) -> None:
    running = await start(cluster=cluster_of(metas), retry={"delays": "0s"})
    raw = await running.connect()
    await raw.send("orders", numbered(3))
    for meta in metas:
        meta.standing = registered(**{mark: True})  # type: ignore[arg-type]
    await until_heard(metas[0], 2)
    await until_heard(metas[1], 2)

    refused = await raw.send("orders", numbered(1))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={2: "later"})
    retried = await raw.pull("%retry%orders%g", timeout_ms=5000)

    assert refused.code == ErrorCode.READ_ONLY
    assert "broker broker is" in refused.text
    assert got.bodies == numbered(3)
    assert retried.bodies == [b"2"]
    route = (await raw.ask(Route("orders", "g", RouteKind.LOCAL), Routed)).route
    assert not any(each.is_writable for each in route.partitions)

    for meta in metas:
        meta.standing = registered()
    await until_heard(metas[0], 2)
    await until_heard(metas[1], 2)
    assert (await raw.send("orders", numbered(1))).code == ErrorCode.NONE


@pytest.mark.accepts("003-38")
async def test_a_subject_that_is_read_only_refuses_sends_at_all_levels(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.standing = registered(read_only=("orders", "audit.*"))
    running = await start(cluster=cluster_of(metas))

    codes = [
        (await sent(running, name)).code
        for name in ("orders", "orders#p7", "audit.log", "audits", "orders.new")
    ]

    assert codes == [ErrorCode.READ_ONLY] * 3 + [ErrorCode.NONE] * 2


async def test_what_the_cluster_said_holds_after_a_restart_without_it(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.standing = registered(is_draining=True)
    running = await start(cluster=cluster_of(metas))
    for meta in metas:
        await meta.stop()

    again = await running.restarted()
    outcome = await sent(again)
    await again.close()

    assert outcome.code == ErrorCode.READ_ONLY
    assert "is being drained" in outcome.text


# -- subjects that are new here -----------------------------------------------------------------


async def test_a_subject_of_other_brokers_is_not_stored_here(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.routes = lambda _: route_to("east", "west")
    running = await start(cluster=cluster_of(metas))

    outcome = await sent(running)

    assert outcome.code == ErrorCode.STALE_ROUTE
    assert "not served by broker group broker" in outcome.text
    assert (await (await running.connect()).status())["partition_count"] == 0


async def test_a_subject_that_is_stored_here_is_asked_about_once(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.routes = lambda _: route_to("east", "broker")
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()

    codes = [(await raw.send(name, numbered(2))).code for name in ("orders", "orders#p9") * 3]

    assert codes == [ErrorCode.NONE] * 6
    assert sum(len(meta.asked) for meta in metas) == 1


@pytest.mark.accepts("003-40")
async def test_an_unknown_subject_is_refused_if_first_sends_create_none(
    start: Start, metas: list[FakeMeta]
) -> None:
    unknown = UnknownSubjectError("there is no subject orders: create it first")
    for meta in metas:
        meta.standing = registered(may_create=False)
        meta.routes = lambda _: unknown
    running = await start(cluster=cluster_of(metas))

    outcomes = [await sent(running) for _ in range(5)]

    assert {each.code for each in outcomes} == {ErrorCode.UNKNOWN_SUBJECT}
    assert outcomes[0].text == "there is no subject orders: create it first"
    # Those that follow at once ask nobody: a flood of them is the broker's to bear.
    assert sum(len(meta.asked) for meta in metas) == 1


async def test_a_new_subject_waits_for_a_meta_server_if_first_sends_create_none(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.standing = registered(may_create=False)
    running = await start(cluster=cluster_of(metas))
    for meta in metas:
        await meta.stop()

    outcome = await sent(running)

    assert outcome.code == ErrorCode.STALE_ROUTE
    assert "no meta server can say now" in outcome.text


@pytest.mark.accepts("003-40")
async def test_only_the_subjects_that_the_settings_allow_may_be_sent_to(start: Start) -> None:
    running = await start(limits={"allowed_subjects": ["orders", "audit.*"]})

    outcomes = {
        name: (await sent(running, name)).code
        for name in ("orders", "orders#p7", "audit.log", "audit", "orders.new", "or%ders")
    }

    assert outcomes == {
        "orders": ErrorCode.NONE,
        "orders#p7": ErrorCode.NONE,
        "audit.log": ErrorCode.NONE,
        "audit": ErrorCode.NOT_ALLOWED,
        "orders.new": ErrorCode.NOT_ALLOWED,
        "or%ders": ErrorCode.INVALID_NAME,
    }


# -- the relay ----------------------------------------------------------------------------------


async def test_any_broker_relays_questions_for_routes(start: Start, metas: list[FakeMeta]) -> None:
    for meta in metas:
        meta.routes = lambda _: route_to("east", "broker")
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()

    found = (await raw.ask(Route("orders", "g", RouteKind.REALTIME), Routed)).route
    local = (await raw.ask(Route("orders", "g", RouteKind.LOCAL), Routed)).route

    assert found == route_to("east", "broker")
    assert [each.broker_group for each in local.partitions] == ["broker"]
    assert raw.welcome is not None
    assert (raw.welcome.cluster, raw.welcome.role) == ("blue", Role.BROKER)


async def test_a_subject_that_is_here_already_becomes_known_to_the_cluster(
    start: Start, metas: list[FakeMeta]
) -> None:
    alone = await start()
    await sent(alone)
    await alone.close()
    created: set[str] = set()

    def routes(request: Route) -> RouteOf:
        if not request.group:
            created.add(request.subject)
        return route_to("broker") if request.subject in created else route_to()

    for meta in metas:
        meta.routes = routes
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()

    here = await raw.ask(Route("orders", "g", RouteKind.REALTIME), Routed)
    elsewhere = await raw.ask(Route("audit", "g", RouteKind.REALTIME), Routed)

    assert here.route == route_to("broker")
    assert elsewhere.route.partitions == ()
    assert created == {"orders"}


async def test_a_route_is_answered_by_the_other_meta_server_if_one_is_away(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()
    await until_heard(metas[0], 1)
    await until_heard(metas[1], 1)
    await metas[0].stop()

    for number in range(4):
        found = await raw.ask(Route(f"s{number}", "", RouteKind.REALTIME), Routed)
        assert found.route.subject == f"s{number}"


async def test_while_all_meta_servers_are_away_a_route_is_what_it_was(
    start: Start, metas: list[FakeMeta]
) -> None:
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()
    before = await raw.ask(Route("orders", "", RouteKind.REALTIME), Routed)
    for meta in metas:
        await meta.stop()

    assert await raw.ask(Route("orders", "", RouteKind.REALTIME), Routed) == before
    with pytest.raises(UnavailableError):
        await raw.ask(Route("never.asked", "", RouteKind.REALTIME), Routed)
    await raw.send("here", numbered(1))
    (here,) = (await raw.ask(Route("here", "g", RouteKind.REALTIME), Routed)).route.partitions
    assert here == PartitionRoute(PartitionName("here"), "broker", "", 0)
    assert await raw.ask(Watch("c", "app", (), 50), Watched) == Watched(())


async def test_what_was_heard_for_one_client_serves_all_while_the_meta_servers_are_away(
    start: Start, metas: list[FakeMeta]
) -> None:
    for meta in metas:
        meta.routes = lambda request: route_to("east") if request.subject == "paid" else route_to()
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()
    sending = await raw.ask(Route("paid", "", RouteKind.REALTIME), Routed)
    waiting = await raw.ask(Route("unborn", "g", RouteKind.REALTIME), Routed)
    for meta in metas:
        await meta.stop()

    assert await raw.ask(Route("paid", "another", RouteKind.REALTIME), Routed) == sending
    assert await raw.ask(Route("unborn", "h", RouteKind.REALTIME), Routed) == waiting
    with pytest.raises(UnavailableError):
        await raw.ask(Route("unborn", "", RouteKind.REALTIME), Routed)
    with pytest.raises(UnavailableError):
        await raw.ask(Route("paid", "g", RouteKind.DELAYED), Routed)


async def test_what_a_meta_server_refuses_is_refused(start: Start, metas: list[FakeMeta]) -> None:
    for meta in metas:
        meta.routes = lambda _: UnknownSubjectError("no such subject")
    running = await start(cluster=cluster_of(metas))
    raw = await running.connect()

    with pytest.raises(UnknownSubjectError, match="no such subject"):
        await raw.ask(Route("orders", "", RouteKind.REALTIME), Routed)


async def test_watches_are_relayed(start: Start, metas: list[FakeMeta]) -> None:
    running = await start(cluster=cluster_of(metas))
    raw: RawConnection = await running.connect()

    await raw.ask(Watch("client", "shop", (), 1000), Watched)

    (heard,) = metas[0].asked + metas[1].asked
    assert isinstance(heard, Watch)
    assert (heard.client, heard.application) == ("client", "shop")

"""A name, and a broker group, have one living server; who is silent leaves, and may come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pulque.errors import FencedError, NotAllowedError
from pulque.model.cluster import GroupMarks, Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch
from pulque.model.routes import Role
from pulque.rules.membership import (
    Change,
    Heard,
    check_cluster,
    check_owner,
    clock_warning,
    decide,
    following_brokers,
    serving_brokers,
    serving_delays,
    usable_groups,
)

BEAT_MS = 5000


def server(
    name: str = "a",
    *,
    group: str = "",
    role: Role = Role.BROKER,
    port: int = 7450,
    directory: str = "d",
    incarnation: int = 1,
    state: ServerState = ServerState.READY,
) -> Server:
    return Server(name, group or name, role, "h", port, directory, incarnation, state)


def test_the_first_one_is_new() -> None:
    assert decide(None, server(), is_alive=False) is Change.NEW


def test_the_same_again_is_a_heartbeat() -> None:
    assert decide(server(), server(), is_alive=True) is Change.NOTHING


@pytest.mark.parametrize(
    "again",
    [
        server(incarnation=2),
        server(state=ServerState.FULL),
        server(state=ServerState.LEAVING),
        server(incarnation=5, port=1),
    ],
)
def test_a_restart_on_the_same_directory_is_let_in_at_once(again: Server) -> None:
    assert decide(server(), again, is_alive=True) is Change.STATE


def test_a_name_is_taken_while_its_server_lives() -> None:
    with pytest.raises(NotAllowedError, match=r"the name a is taken by the server at h:7450"):
        decide(server(), server(directory="other", incarnation=9), is_alive=True)


@pytest.mark.parametrize(
    ("known", "is_alive"), [(server(), False), (server(state=ServerState.LEAVING), True)]
)
def test_a_name_is_free_when_its_server_is_gone(known: Server, *, is_alive: bool) -> None:
    assert decide(known, server(directory="other"), is_alive=is_alive) is Change.STATE


def test_an_older_process_is_fenced() -> None:
    with pytest.raises(FencedError, match="incarnation 1, and 2"):
        decide(server(incarnation=2), server(), is_alive=True)


def test_a_removed_server_may_come_back() -> None:
    gone = server()._replace(is_removed=True)

    assert decide(gone, server(directory="other"), is_alive=True) is Change.NEW


def test_an_address_is_written_as_people_do() -> None:
    assert server()._replace(host="::1").address == "[::1]:7450"


@pytest.mark.parametrize("asked", ["", "ours"])
def test_a_server_of_this_cluster_is_let_in(asked: str) -> None:
    check_cluster(asked, "ours", "a")


def test_a_server_of_another_cluster_is_refused() -> None:
    with pytest.raises(
        NotAllowedError, match="cluster theirs, and this meta server to cluster ours"
    ):
        check_cluster("theirs", "ours", "a")


def test_a_second_broker_of_a_living_group_is_refused() -> None:
    heard = Heard(BEAT_MS)
    heard.hear("a", 0)
    second = server("b", group="a")

    with pytest.raises(NotAllowedError, match="held by a at h:7450"):
        check_owner([server("a")], second, heard, 15_000, {})

    check_owner([server("a")], second, heard, 15_001, {})
    check_owner([server("a")], server("b", group="a", role=Role.DELAY), heard, 0, {})


LED = Leadership("g", Epoch(3), 5, "d-a", "t", ("d-a", "d-b"), 2)
FOLLOWING = ServerState.FOLLOWING


def broker_of_g(name: str, state: ServerState = ServerState.READY) -> Server:
    return server(name, group="g", directory=f"d-{name}", state=state)


def living(*servers: Server) -> tuple[list[Server], Heard]:
    heard = Heard(BEAT_MS)
    for each in servers:
        heard.hear(each.name, 0)
    return list(servers), heard


@pytest.mark.parametrize("state", [ServerState.READY, ServerState.FULL])
def test_nobody_follows_one_that_stands_alone(state: ServerState) -> None:
    servers, heard = living(broker_of_g("a", state))

    with pytest.raises(NotAllowedError, match="held by a at h:7450, which stands alone: set repl"):
        check_owner(servers, broker_of_g("b", FOLLOWING), heard, 0, {})
    check_owner(servers, broker_of_g("b", FOLLOWING), heard, 15_001, {})


def test_followers_are_let_in_beside_each_other_and_beside_a_leader() -> None:
    servers, heard = living(broker_of_g("a", FOLLOWING))
    check_owner(servers, broker_of_g("b", FOLLOWING), heard, 0, {})

    servers, heard = living(broker_of_g("a"), broker_of_g("b", FOLLOWING))
    check_owner(servers, broker_of_g("c", FOLLOWING), heard, 0, {"g": LED})


def test_in_a_group_that_is_led_only_the_leader_serves() -> None:
    servers, heard = living(broker_of_g("a"), broker_of_g("b", FOLLOWING))

    check_owner(servers, broker_of_g("a"), heard, 0, {"g": LED})
    for leaderships, found in [
        (LED, "led by a at h:7450 in epoch 3: b may only follow"),
        (LED._replace(leader="d-x"), "led by data directory d-x in epoch 3"),
    ]:
        with pytest.raises(NotAllowedError, match=found):
            check_owner(servers, broker_of_g("b"), heard, 0, {"g": leaderships})


def test_one_that_stands_alone_is_refused_beside_a_follower() -> None:
    servers, heard = living(broker_of_g("a", FOLLOWING))

    with pytest.raises(NotAllowedError, match=r"held by a .* replication\.copies to 2 or more on"):
        check_owner(servers, broker_of_g("b"), heard, 0, {})


@given(
    states=st.fixed_dictionaries({name: st.sampled_from(ServerState) for name in "abc"}),
    leader=st.sampled_from("abc"),
    in_sync=st.sets(st.sampled_from("abc")),
    least=st.integers(1, 3),
)
def test_of_a_group_that_is_led_nobody_but_its_leader_is_in_the_routes(
    states: dict[str, ServerState], leader: str, in_sync: set[str], least: int
) -> None:
    servers, heard = living(*(broker_of_g(name, state) for name, state in states.items()))
    copies = tuple(sorted(f"d-{name}" for name in in_sync | {leader}))
    row = LED._replace(leader=f"d-{leader}", in_sync=copies, min_in_sync=least)

    found = serving_brokers(servers, {}, heard, 0, {"g": row})

    assert bool(found) == (states[leader] in {ServerState.READY, ServerState.FULL})
    if found:
        is_ready = states[leader] is ServerState.READY
        assert found["g"].is_writable == (is_ready and len(copies) >= least)


@given(apart_ms=st.integers(-100_000, 100_000))
def test_only_clocks_far_apart_are_warned_about(apart_ms: int) -> None:
    warning = clock_warning("a", 1_000_000 + apart_ms, 1_000_000, 10_000)

    assert bool(warning) == (abs(apart_ms) > 10_000)
    if warning:
        assert ("ahead" in warning) == (apart_ms > 0)


class Cluster(RuleBasedStateMachine):
    """Servers come, speak, fall silent and leave; a list of what they said is the oracle."""

    NAMES = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard(BEAT_MS)
        self.now_ms = 0
        self.servers: dict[str, Server] = {}
        self.marks: dict[str, GroupMarks] = {}
        self.said: list[tuple[int, Server]] = []

    @rule(
        name=NAMES,
        state=st.sampled_from(ServerState),
        role=st.sampled_from([Role.BROKER, Role.DELAY]),
    )
    def speak(self, name: str, state: ServerState, role: Role) -> None:
        self.servers[name] = server(name, state=state, role=role)
        self.heard.hear(name, self.now_ms)
        self.said.append((self.now_ms, self.servers[name]))

    @rule(pass_ms=st.sampled_from([1, 4_999, 5_000, 15_000]))
    def wait(self, pass_ms: int) -> None:
        self.now_ms += pass_ms

    @rule(name=NAMES, marks=st.builds(GroupMarks, st.booleans(), st.booleans()))
    def mark(self, name: str, marks: GroupMarks) -> None:
        self.marks[name] = marks

    @invariant()
    def serving_is_who_spoke_lately_and_does_not_leave(self) -> None:
        last = {each.name: (at, each) for at, each in self.said}
        lively = {
            name: each
            for name, (at, each) in last.items()
            if self.now_ms - at <= 15_000 and each.state is not ServerState.LEAVING
        }
        brokers = serving_brokers(self.servers.values(), self.marks, self.heard, self.now_ms, {})
        following = following_brokers(self.servers.values(), self.heard, self.now_ms)
        delays = serving_delays(self.servers.values(), self.heard, self.now_ms)

        lively_brokers = {n for n, each in lively.items() if each.role is Role.BROKER}
        assert set(following) == {
            name for name in lively_brokers if lively[name].state is ServerState.FOLLOWING
        }
        assert set(brokers) == lively_brokers - set(following)
        assert set(delays) == {n for n, each in lively.items() if each.role is Role.DELAY}
        marked = {name for name, marks in self.marks.items() if any(marks)}
        assert set(usable_groups(brokers)) == {
            name
            for name in brokers
            if lively[name].state is ServerState.READY and name not in marked
        }


TestCluster = pytest.mark.accepts("004-15")(Cluster.TestCase)

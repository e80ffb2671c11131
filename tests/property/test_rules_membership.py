"""A name, and a broker group, have one living server; who is silent leaves, and may come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pulque.errors import FencedError, NotAllowedError
from pulque.model.cluster import GroupMarks, Server, ServerState
from pulque.model.routes import Role
from pulque.rules.membership import (
    Change,
    Heard,
    check_cluster,
    check_owner,
    clock_warning,
    decide,
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
        server(port=7451),
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
        check_owner([server("a")], second, heard, 15_000)

    check_owner([server("a")], second, heard, 15_001)
    check_owner([server("a")], server("b", group="a", role=Role.DELAY), heard, 0)


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
        brokers = serving_brokers(self.servers.values(), self.marks, self.heard, self.now_ms)
        delays = serving_delays(self.servers.values(), self.heard, self.now_ms)

        assert set(brokers) == {n for n, each in lively.items() if each.role is Role.BROKER}
        assert set(delays) == {n for n, each in lively.items() if each.role is Role.DELAY}
        marked = {name for name, marks in self.marks.items() if any(marks)}
        assert set(usable_groups(brokers)) == {
            name
            for name in brokers
            if lively[name].state is ServerState.READY and name not in marked
        }


TestCluster = pytest.mark.accepts("004-15")(Cluster.TestCase)

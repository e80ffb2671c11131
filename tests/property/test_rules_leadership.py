"""Leaders are elected from those in sync alone, each in an epoch of its own, never in haste."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pulque.model.cluster import Placement, Serving
from pulque.model.leadership import Leadership
from pulque.model.names import PartitionName, Pattern
from pulque.model.positions import Epoch
from pulque.model.routes import Slots
from pulque.rules.leadership import (
    ElectionCandidate,
    Vigil,
    asked,
    beat_within,
    change_in_sync,
    elect,
    found,
    hand_over,
    is_short,
    replace_leader,
    route_of_followers,
)

LEASE_MS = 5000
NAMES = ("a", "b", "c", "d")
ROW = Leadership("g", Epoch(4), 9, "a", "token-a", ("a", "b", "c"), 2)


def candidate(
    name: str = "b",
    *,
    token: str = "",
    end: int = 0,
    is_fit: bool = True,
    is_alive: bool = True,
) -> ElectionCandidate:
    return ElectionCandidate(name, name, token or f"token-{name}", end, is_fit, is_alive)


candidates = st.lists(
    st.builds(
        candidate,
        st.sampled_from(NAMES),
        token=st.sampled_from(["t1", "t2"]),
        end=st.integers(0, 5),
        is_fit=st.booleans(),
        is_alive=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda each: each.directory,
)


# -- elections ----------------------------------------------------------------------------------


def test_the_first_leader_is_alone_in_sync() -> None:
    assert found("g", candidate("b"), 2) == Leadership("g", Epoch(1), 1, "b", "token-b", ("b",), 2)


@given(others=candidates)
def test_who_replaces_a_leader_lives_is_whole_and_was_in_sync(
    others: list[ElectionCandidate],
) -> None:
    able = {
        each.directory: each
        for each in others
        if each.directory in {"b", "c"} and each.is_alive and each.is_fit
    }

    elected = replace_leader(ROW, others)

    assert (elected is not None) == bool(able)
    if elected is not None:
        chosen = able[elected.leader]
        assert (elected.epoch, elected.version, elected.token) == (5, 10, chosen.token)
        assert elected.in_sync == ("b", "c")
        assert all(each.message_end <= chosen.message_end for each in able.values())


def test_among_equals_the_first_name_is_elected() -> None:
    equals = [candidate("c", end=7), candidate("b", end=7)]

    elected = replace_leader(ROW, equals)

    assert elected is not None
    assert elected.leader == "b"


def test_a_leader_hands_over_to_one_that_was_in_sync_and_not_to_one_that_only_now_is() -> None:
    alive = [candidate("b"), candidate("d", end=99)]

    elected = hand_over(ROW, ["d", "b"], alive)

    assert elected is not None
    assert (elected.leader, elected.in_sync) == ("b", ("b", "d"))
    assert hand_over(ROW, ["d"], alive) is None
    with pytest.raises(ValueError, match="d is not in sync"):
        elect(ROW, candidate("d"))
    with pytest.raises(ValueError, match="b is not in sync"):
        elect(ROW, candidate("b"), ["c"])


def test_the_leader_says_who_is_in_sync_and_is_one_of_them() -> None:
    assert change_in_sync(ROW, ["d", "a"]) == ROW._replace(version=10, in_sync=("a", "d"))
    with pytest.raises(ValueError, match="a leads"):
        change_in_sync(ROW, ["b"])


def test_a_leader_that_was_started_anew_leads_in_an_epoch_of_its_own() -> None:
    again = asked(ROW, candidate("a", token="new"), [])

    assert again is not None
    assert again[0] == ROW._replace(epoch=Epoch(5), version=10, token="new")


def test_a_question_changes_nothing_otherwise() -> None:
    assert asked(ROW, candidate("a"), [candidate("b")]) is None
    assert asked(ROW, candidate("b", token="new"), []) is None
    assert asked(ROW, candidate("d", is_fit=False), []) is None


def test_who_lost_something_is_out_of_sync_and_does_not_lead() -> None:
    out = asked(ROW, candidate("b", is_fit=False), [])
    replaced = asked(ROW, candidate("a", token="new", is_fit=False), [candidate("c")])
    stuck = asked(ROW, candidate("a", token="new", is_fit=False), [candidate("d")])

    assert out is not None
    assert out[0] == ROW._replace(version=10, in_sync=("a", "c"))
    assert replaced is not None
    assert (replaced[0].leader, replaced[0].epoch, replaced[0].in_sync) == ("c", 5, ("b", "c"))
    assert stuck is None


@pytest.mark.parametrize(("least", "is_lacking"), [(1, False), (3, False), (4, True)])
def test_a_group_is_short_when_fewer_are_in_sync_than_it_takes(
    least: int, *, is_lacking: bool
) -> None:
    assert is_short(ROW._replace(min_in_sync=least)) is is_lacking


class Group(RuleBasedStateMachine):
    """Brokers of a group ask, die and come back; whoever was told to lead is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.row = found("g", candidate("a", token="t0"), 1)
        self.reigns = {1: ("a", "t0")}
        """Who led in each epoch."""
        self.having_all = {"a"}
        """Who has what was confirmed, as the leaders said."""

    def take(self, wanted: Leadership | None) -> None:
        if wanted is None:
            return
        assert wanted.version == self.row.version + 1
        if (wanted.leader, wanted.token) != (self.row.leader, self.row.token):
            assert wanted.epoch == self.row.epoch + 1
            assert wanted.leader in self.having_all
            assert wanted.epoch not in self.reigns
            self.reigns[wanted.epoch] = (wanted.leader, wanted.token)
        else:
            assert wanted.epoch == self.row.epoch
        self.row = wanted

    @rule(asker=candidates, others=candidates)
    def ask(self, asker: list[ElectionCandidate], others: list[ElectionCandidate]) -> None:
        for each in asker:
            wanted = asked(self.row, each, others)
            self.take(wanted[0] if wanted else None)
            if not each.is_fit and each.directory != self.row.leader:
                self.having_all.discard(each.directory)

    @rule(others=candidates)
    def lose_the_leader(self, others: list[ElectionCandidate]) -> None:
        self.take(replace_leader(self.row, others))

    @precondition(lambda self: len(self.row.in_sync) < len(NAMES))
    @rule(name=st.sampled_from(NAMES))
    def catch_up(self, name: str) -> None:
        self.having_all.add(name)
        self.take(change_in_sync(self.row, {*self.row.in_sync, name}))

    @rule(name=st.sampled_from(NAMES))
    def fall_behind(self, name: str) -> None:
        if name != self.row.leader:
            self.take(change_in_sync(self.row, set(self.row.in_sync) - {name}))
            self.having_all.discard(name)

    @invariant()
    def in_sync_is_only_who_has_everything(self) -> None:
        assert self.row.leader in self.row.in_sync
        assert set(self.row.in_sync) <= self.having_all | {self.row.leader}
        assert list(self.row.in_sync) == sorted(self.row.in_sync)


TestGroup = Group.TestCase


# -- who is silent ------------------------------------------------------------------------------


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([1, 400, 500, 2_400, 2_500, 2_501, 6_000]),
            st.sampled_from([0, 0, 1, 300, 2_501]),
            st.sampled_from([False, False, False, True]),
        ),
        max_size=30,
    )
)
def test_silence_is_what_was_seen_without_a_gap(steps: list[tuple[int, int, bool]]) -> None:
    vigil = Vigil(LEASE_MS)
    now_ms, beats = 0, 0
    looks: list[tuple[int, int, int]] = []
    for pause_ms, reading_ms, is_heard in steps:
        began_ms = now_ms + pause_ms
        now_ms = began_ms + reading_ms
        beats += is_heard
        looks.append((began_ms, now_ms, beats))

        silent_ms = vigil.look({"g": beats}, began_ms, now_ms)["g"]

        # The oracle walks back over all looks, as far as they hang together.
        first = len(looks) - 1
        while (
            first
            and looks[first - 1][2] == beats
            and looks[first][1] - looks[first - 1][1] <= LEASE_MS // 2
        ):
            first -= 1
        assert silent_ms == max(began_ms - looks[first][1], 0)


def test_who_is_heard_of_within_every_lease_is_never_silent_for_one() -> None:
    vigil = Vigil(LEASE_MS)
    silent = [
        vigil.look({"g": at_ms // 4_900}, at_ms, at_ms)["g"] for at_ms in range(0, 60_000, 500)
    ]

    assert max(silent) < LEASE_MS


def test_whoever_was_stopped_begins_anew() -> None:
    vigil = Vigil(LEASE_MS)
    for at_ms in range(0, 4_501, 500):
        vigil.look({"g": 1}, at_ms, at_ms)

    assert vigil.look({"g": 1}, 100_000, 100_000) == {"g": 0}
    # Stopped in the middle of a look: what was read is as old.
    assert vigil.look({"g": 1}, 100_500, 200_000) == {"g": 0}
    assert vigil.look({"g": 1}, 200_500, 200_500) == {"g": 500}


def test_another_leader_has_a_lease_of_its_own() -> None:
    vigil = Vigil(LEASE_MS)
    vigil.look({"g": (1, 7), "h": (1, 7)}, 0, 0)

    assert vigil.look({"g": (2, 7), "h": (1, 7)}, 2_000, 2_000) == {"g": 0, "h": 2_000}
    assert vigil.look({"h": (1, 7)}, 4_000, 4_000) == {"h": 4_000}


def test_several_heartbeats_fit_in_a_lease() -> None:
    assert [beat_within(ms) for ms in (5000, 200, 1)] == [1000, 40, 1]


# -- routes -------------------------------------------------------------------------------------


def test_followers_are_named_for_each_partition_and_take_no_sends() -> None:
    followers = {
        "g": (Serving("g", "h1", 1, is_writable=False), Serving("g", "h2", 2, is_writable=False)),
        "other": (Serving("other", "h3", 3, is_writable=False),),
    }
    placed = [Placement(PartitionName("s"), group, Slots(0, 512)) for group in ("g", "alone")]

    of_subject = route_of_followers(Pattern("s"), placed, followers)
    of_all = route_of_followers(Pattern("*"), None, followers)

    assert [tuple(each) for each in of_subject.partitions] == [
        ("s", "g", "h1", 1, False, (0, 0)),
        ("s", "g", "h2", 2, False, (0, 0)),
    ]
    assert [each.port for each in of_all.partitions] == [1, 2, 3]
    assert {each.partition for each in of_all.partitions} == {"*"}
    assert route_of_followers(Pattern("s"), placed, {}).version == 0
    assert of_subject.version not in {0, of_all.version}


def test_who_hands_over_may_say_who_is_to_lead() -> None:
    alive = [candidate("b", end=9), candidate("c", end=1)]

    elected = hand_over(ROW, ["c", "b"], alive, preferred="c")
    assert elected is not None
    assert (elected.leader, elected.in_sync) == ("c", ("b", "c"))

    without = hand_over(ROW, ["c", "b"], alive[:1], preferred="c")
    assert without is not None
    assert without.leader == "b"


def test_a_leader_that_was_started_anew_makes_room_for_one_in_sync_that_has_more() -> None:
    anew = candidate("a", token="new", end=5)
    longer, outside = candidate("c", end=6), candidate("d", end=9)

    assert asked(ROW, anew, [anew, candidate("b", end=5)]) == (
        elect(ROW, anew),
        "the leader was started anew",
    )
    found = asked(ROW, anew, [anew, candidate("b", end=5), longer, outside])
    assert found is not None
    assert (found[0].leader, found[0].epoch, found[0].in_sync) == ("c", 5, ("b", "c"))

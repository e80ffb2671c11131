"""Who is in sync with a leader, what is confirmed by that, and how long it leads."""

import pytest

from pulque.model.leadership import EpochStart, Leadership
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.rules.replication import InSync, LogPoint, Tenancy, common_end, common_point

LAG_MS = 5000


def point(messages: int, actions: int = 0) -> LogPoint:
    return LogPoint(MessageOffset(messages), ActionOffset(actions))


def leadership(*in_sync: str, version: int = 1, epoch: int = 3, token: str = "t") -> Leadership:  # noqa: S107  # no secret
    members = tuple(sorted(("me", *in_sync)))
    return Leadership("g", Epoch(epoch), version, "me", token, members, 2)


def leader(*in_sync: str, start: LogPoint | None = None) -> InSync:
    return InSync(leadership(*in_sync), start or point(0), lag_ms=LAG_MS, now_ms=0)


def test_nothing_is_confirmed_that_one_of_those_in_sync_does_not_have() -> None:
    group = leader("a", "b")
    group.synced(point(100, 10))
    group.heard("a", point(100, 10), point(100, 10), 0, is_ready=True)

    assert group.confirmed == point(0)

    assert group.heard("b", point(60, 10), point(100, 10), 0, is_ready=True)
    assert group.confirmed == point(60, 10)


def test_what_a_follower_had_before_it_began_anew_confirms_nothing() -> None:
    group = leader("a")
    group.synced(point(40))
    group.heard("a", point(100), point(100), 0, is_ready=True)
    assert group.confirmed == point(40)
    group.gone("a")

    assert not group.synced(point(100))
    assert group.confirmed == point(40)
    assert group.heard("a", point(70), point(100), 0, is_ready=True)
    assert group.confirmed == point(70)


def test_the_leaders_own_disk_counts() -> None:
    group = leader("a")

    assert not group.heard("a", point(100), point(100), 0, is_ready=True)
    assert group.synced(point(40))
    assert group.confirmed == point(40)


def test_a_leader_that_is_in_sync_alone_confirms_by_itself() -> None:
    group = leader()

    assert group.synced(point(7, 7))
    assert group.confirmed == point(7, 7)
    assert group.is_short  # yet two have to be in sync for new messages


def test_whoever_does_not_catch_up_for_the_lag_is_to_leave() -> None:
    group = leader("a", "b")
    group.synced(point(100))
    for now_ms in range(0, LAG_MS + 1001, 1000):
        group.heard("a", point(100), point(100), now_ms, is_ready=True)

    assert group.wish(LAG_MS) is None
    assert group.wish(LAG_MS + 1) == ("a", "me")


def test_whoever_is_always_a_little_behind_a_busy_leader_stays() -> None:
    group = leader("a")
    end = 0
    for now_ms in range(0, 10 * LAG_MS, 100):
        synced, end = end, end + 1000
        group.synced(point(end))
        group.heard("a", point(synced), point(end), now_ms, is_ready=True)

        assert group.wish(now_ms) is None


def test_whoever_falls_further_and_further_behind_is_to_leave() -> None:
    group = leader("a")
    wishes = []
    for now_ms in range(0, 4 * LAG_MS, 100):
        group.synced(point(now_ms))
        group.heard("a", point(now_ms // 3), point(now_ms), now_ms, is_ready=True)
        wishes.append(group.wish(now_ms))

    assert wishes[-1] == ("me",)


def test_who_joins_has_all_that_is_confirmed_and_a_checkpoint() -> None:
    group = leader(start=point(50))
    group.synced(point(100))
    group.heard("a", point(99), point(100), 0, is_ready=True)
    assert group.wish(0) is None

    group.heard("a", point(100), point(100), 1, is_ready=False)
    assert group.wish(1) is None

    group.heard("a", point(100), point(100), 2, is_ready=True)
    assert group.wish(2) == ("a", "me")


def test_who_is_about_to_join_is_waited_for_already() -> None:
    group = leader()
    group.synced(point(100))
    group.heard("a", point(100), point(100), 0, is_ready=True)
    group.propose(("a", "me"))

    assert not group.synced(point(200))
    assert group.confirmed == point(100)

    assert group.decided(leadership(version=2))  # somebody else's change came first
    assert group.confirmed == point(200)


def test_who_is_about_to_leave_is_waited_for_until_the_meta_servers_agree() -> None:
    group = leader("a")
    group.propose(("me",))
    assert not group.synced(point(100))

    assert group.decided(leadership(version=2))
    assert group.confirmed == point(100)


def test_while_nobody_knows_what_became_of_a_proposal_both_sets_count_and_it_is_made_again() -> (
    None
):
    group = leader()
    group.synced(point(100))
    group.heard("a", point(100), point(100), 0, is_ready=True)
    group.propose(("a", "me"))
    group.unknown()

    assert not group.synced(point(200))
    assert not group.changed(leadership(version=1))  # an answer from before it
    assert group.confirmed == point(100)
    assert group.wish(0) == ("a", "me")

    group.changed(leadership("a", version=2))
    assert group.wish(0) is None
    assert group.leadership.in_sync == ("a", "me")


def test_a_leadership_of_another_epoch_confirms_nothing() -> None:
    group = leader("a")
    group.synced(point(100))

    assert not group.changed(leadership(version=9, epoch=4))
    assert not group.changed(leadership(version=9, token="another process"))
    assert group.confirmed == point(0)
    assert group.leadership.in_sync == ("a", "me")


def test_who_was_in_sync_and_lost_what_is_confirmed_is_to_leave_at_once() -> None:
    group = leader("a")
    group.synced(point(100))
    group.heard("a", point(100), point(100), 0, is_ready=True)
    group.gone("a")
    assert group.wish(1) is None  # it may only have been restarted

    group.heard("a", point(90), point(100), 2, is_ready=True)
    assert group.wish(2) == ("me",)
    assert group.confirmed == point(100)


def test_a_leadership_has_begun_when_all_that_there_was_is_confirmed() -> None:
    group = leader("a", start=point(100, 20))
    group.synced(point(130, 25))
    group.heard("a", point(99, 25), point(130, 25), 0, is_ready=True)
    assert not group.has_begun

    group.heard("a", point(100, 20), point(130, 25), 0, is_ready=True)
    assert group.has_begun


@pytest.mark.parametrize(
    ("ours", "our_end", "theirs", "their_end", "common"),
    [
        ([(1, 0)], 100, [(1, 0)], 80, 80),
        ([(1, 0)], 100, [(1, 0)], 120, 100),
        ([(1, 0), (2, 90)], 200, [(1, 0)], 120, 90),
        ([(1, 0), (2, 90)], 200, [(1, 0), (2, 90)], 150, 150),
        ([(1, 0), (3, 90)], 200, [(1, 0), (2, 70)], 150, 70),
        ([(1, 0), (2, 50), (3, 90)], 200, [(1, 0), (2, 50)], 150, 90),
        ([(1, 0), (2, 500), (3, 450)], 600, [(1, 0), (2, 500)], 700, 450),
        ([(1, 0)], 100, [(0, 0)], 100, None),
        ([(1, 0)], 100, [], 0, None),
    ],
)
def test_logs_are_the_same_up_to_the_end_of_the_last_leadership_that_both_know(
    ours: list[tuple[int, int]],
    our_end: int,
    theirs: list[tuple[int, int]],
    their_end: int,
    common: int | None,
) -> None:
    assert common_end(ours, our_end, theirs, their_end) == common
    assert common_end(theirs, their_end, ours, our_end) == common


def test_each_log_is_compared_by_itself() -> None:
    ours = [EpochStart(Epoch(1), MessageOffset(0), ActionOffset(0))]
    theirs = [*ours, EpochStart(Epoch(2), MessageOffset(70), ActionOffset(30))]

    assert common_point(ours, point(60, 40), theirs, point(90, 50)) == point(60, 30)


def test_a_leader_stops_before_the_lease_is_over_unless_it_is_heard() -> None:
    tenancy = Tenancy(1000)
    tenancy.heard(100)

    assert tenancy.holds(1000, ["a"])
    assert not tenancy.holds(1001, ["a"])

    tenancy.heard(500)
    tenancy.heard(200)  # an answer that came late
    assert tenancy.holds(1400, ["a"])


def test_followers_keep_a_leader_while_no_meta_server_is_there() -> None:
    tenancy = Tenancy(1000)
    tenancy.heard(0)
    tenancy.asked("a", 4000)

    assert tenancy.holds(4900, ["a"])
    assert not tenancy.holds(4901, ["a"])
    assert not tenancy.holds(4500, ["a", "b"])  # b could be elected

    assert tenancy.holds(10**9, [])  # nobody could

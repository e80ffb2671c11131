"""A consumer that is silent for longer than its lease is lost."""

import pytest

from pulque.model.names import ConsumerId, Group
from pulque.rules.lease import Leases

G, C, D = Group("g"), ConsumerId("c"), ConsumerId("d")


@pytest.mark.accepts("000-37")
def test_a_lease_runs_out_after_its_time_and_not_before() -> None:
    leases = Leases(1000)
    leases.renew(G, C, 500)

    assert leases.expired(1500) == []
    assert leases.expired(1501) == [(G, C)]


def test_a_lease_that_is_renewed_begins_anew() -> None:
    leases = Leases(1000)
    leases.renew(G, C, 0)
    leases.renew(G, C, 900)

    assert leases.expired(1900) == []


def test_each_consumer_of_each_group_has_a_lease_of_its_own() -> None:
    leases = Leases(1000)
    leases.renew(G, C, 0)
    leases.renew(Group("h"), C, 0)
    leases.renew(G, D, 600)

    assert sorted(leases.expired(1100)) == [("g", "c"), ("h", "c")]


def test_whoever_left_or_is_lost_is_not_lost_again() -> None:
    leases = Leases(1000)
    leases.renew(G, C, 0)

    leases.end(G, C)
    leases.end(G, D)

    assert leases.expired(10_000) == []
    assert len(leases) == 0

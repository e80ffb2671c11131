"""The rules of failover hold together, and none of them can be left out.

All states of small games are looked at: what was confirmed is in the log of every later leader,
nothing that was seen goes away, logs that follow one leader are the same, and never two brokers
serve at once. With any of the rules broken, the search finds the way to the damage.
"""

from typing import NamedTuple

import pytest

from tests.property import replication_lease_model as leases
from tests.property import replication_model as logs
from tests.property.replication_search import search

pytestmark = pytest.mark.slow

PAIR = logs.Size(brokers=2, sends=2, epochs=3, restarts=2, changes=1)
TRIO = logs.Size(brokers=3, sends=1, epochs=2, restarts=0, changes=1)
THIRD = logs.Size(brokers=3, sends=1, epochs=3, restarts=1, changes=1, outside=1, late=False)

LEASED_PAIR = leases.Size(brokers=2, epochs=2, restarts=1, changes=1, lease=1, outside=1)
LEASED_TRIO = leases.Size(brokers=3, epochs=2, restarts=0, changes=0, lease=1)
LEASED_ALL = leases.Size(brokers=2, epochs=2, restarts=1, changes=1, lease=1)


class Harm(NamedTuple):
    """What has to come of a broken rule, and in how many moves."""

    size: logs.Size
    problem: str
    moves: int


HARM = {
    "local_shrink": Harm(PAIR, "lacks it", 5),
    "expand_race": Harm(PAIR, "lacks it", 10),
    "early_expand": Harm(THIRD, "lacks it", 14),
    "no_cas_epoch": Harm(PAIR, "lacks it", 8),
    "cut_to_confirmed": Harm(PAIR, "lacks it", 9),
    "no_cut": Harm(PAIR, "is no copy of", 4),
    "list_first": Harm(PAIR, "is no copy of", 6),
    "unclean": Harm(PAIR, "lacks it", 6),
    "no_sync": Harm(PAIR, "lacks it", 8),
    "no_epoch_check": Harm(PAIR, "is no copy of", 8),
    "read_beyond": Harm(PAIR, "lacks it", 3),
    "follows_older": Harm(PAIR, "lacks it", 8),
    "old_token": Harm(PAIR, "is no copy of", 5),
}


@pytest.mark.parametrize("size", [PAIR, TRIO], ids=["two brokers", "three brokers"])
def test_what_was_confirmed_is_in_the_log_of_every_later_leader(size: logs.Size) -> None:
    found = search(logs.Game(size))

    assert found.problem == "", found.steps
    assert found.states > 50_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "size",
    [
        logs.Size(brokers=2, sends=2, epochs=4, restarts=2, changes=1),
        logs.Size(brokers=3, sends=1, epochs=2, restarts=1, changes=1),
    ],
    ids=["two brokers", "three brokers"],
)
def test_it_is_there_after_more_elections_and_restarts(size: logs.Size) -> None:
    found = search(logs.Game(size))

    assert found.problem == "", found.steps


@pytest.mark.parametrize("broken", logs.BROKEN)
def test_every_rule_about_logs_is_needed(broken: str) -> None:
    harm = HARM[broken]

    found = search(logs.Game(harm.size, broken))

    assert harm.problem in found.problem
    assert len(found.steps) == harm.moves, found.steps


@pytest.mark.parametrize("size", [LEASED_PAIR, LEASED_TRIO], ids=["two brokers", "three brokers"])
def test_never_two_brokers_serve_at_once(size: leases.Size) -> None:
    found = search(leases.Game(size))

    assert found.problem == "", found.steps
    assert found.states > 20_000


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "size",
    [
        leases.Size(brokers=2, epochs=3, restarts=1, changes=1, lease=1),
        leases.Size(brokers=2, epochs=2, restarts=1, changes=1, lease=2, outside=1),
    ],
    ids=["three epochs", "a longer lease"],
)
def test_never_two_serve_in_longer_games(size: leases.Size) -> None:
    found = search(leases.Game(size))

    assert found.problem == "", found.steps


@pytest.mark.parametrize("broken", leases.BROKEN)
def test_every_rule_about_leases_is_needed(broken: str) -> None:
    sizes = {"one_is_enough": LEASED_TRIO, "change_not_counted": LEASED_PAIR}

    found = search(leases.Game(sizes.get(broken, LEASED_ALL), broken))

    assert found.problem == "0 and 1 serve"

"""Order holds, whatever happens to consumers, brokers, the meta server and the partitions.

The short forms run with ``make test``; ``-m long`` runs all faults again and again, and
``PULQUE_TEST_SEED`` draws the same faults again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.testing.cluster import ClusterProcesses
from tests.robustness.network import Network, why_not
from tests.robustness.order_load import CUTS, FAULTS, Fault, OrderLoad

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

LONG_ROUNDS = 40
MACHINES = ("meta-1", "broker-1", "broker-2", "clients", "east", "west")
BROKER = {"consumption": {"lock": "2s"}}
META = {"ordered": {"timeout": "2s", "drain_check": "50ms"}}


@pytest.fixture
def network() -> Iterator[Network]:
    """Yield a machine for each server, two for consumers and one for all else."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network(MACHINES) as made:
        yield made


@pytest.fixture
def spread(network: Network, tmp_path: Path) -> Iterator[ClusterProcesses]:
    """Yield the same cluster, each of it on its own machine; the test is on another."""
    with ClusterProcesses(tmp_path / "cluster") as made:
        (tmp_path / "cluster").mkdir()
        for name in MACHINES[:3]:
            listen = {"host": network.addresses[name]}
            with network.inside(name):
                if name == "meta-1":
                    made.add_meta(name, {**META, "listen": listen})
                else:
                    made.add_broker(name, {**BROKER, "listen": listen})
        with network.inside("clients"):
            made.wait_until_known()
            yield made
            network.heal()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """Yield two brokers and a meta server that are soon tired of silence."""
    with ClusterProcesses.start(
        tmp_path / "cluster",
        brokers=2,
        broker_settings=BROKER,
        meta_settings=META,
    ) as found:
        yield found


def run(
    cluster: ClusterProcesses,
    folder: Path,
    faults: list[Fault],
    seed: int,
    *,
    is_strict: bool,
    network: Network | None = None,
) -> None:
    """Have messages flow, let things go wrong one after the other, and judge."""
    load = OrderLoad(cluster, folder / "load", is_strict=is_strict, seed=seed, network=network)
    with load:
        load.create_subject()
        for _ in range(2):
            load.add_producer()
        for _ in range(3):
            load.add_consumer()
        load.go_on()
        for fault in faults:
            print(fault.name)
            fault.strike(load)
            load.go_on()
        assert load.problems() == [], f"faults {[f.name for f in faults]}"


@pytest.mark.accepts("002-51", "002-25", "004-65")
def test_strict_order_holds_while_consumers_are_killed_and_paused(
    cluster: ClusterProcesses, tmp_path: Path, seed: int
) -> None:
    run(cluster, tmp_path, pick("killed", "paused"), seed, is_strict=True)


def test_strict_order_holds_while_servers_are_killed_and_partitions_split(
    cluster: ClusterProcesses, tmp_path: Path, seed: int
) -> None:
    run(cluster, tmp_path, pick("broker", "backlog", "meta"), seed, is_strict=True)


def test_strict_order_holds_in_a_storm_of_consumers_while_partitions_split_and_merge(
    cluster: ClusterProcesses, tmp_path: Path, seed: int
) -> None:
    faults = pick("storm", "split", "a broker is killed", "merged")
    run(cluster, tmp_path, faults, seed, is_strict=True)


@pytest.mark.xdist_group("network")
@pytest.mark.accepts("002-51")
def test_strict_order_holds_wherever_the_network_is_cut(
    spread: ClusterProcesses, network: Network, tmp_path: Path, seed: int
) -> None:
    faults = pick("consumers are cut off", "answers of a broker", "meta server", among=CUTS)
    run(spread, tmp_path, faults, seed, is_strict=True, network=network)


@pytest.mark.accepts("004-64")
def test_best_effort_order_holds_within_partitions_while_consumers_come_and_go(
    cluster: ClusterProcesses, tmp_path: Path, seed: int
) -> None:
    run(cluster, tmp_path, pick("come and go", "a consumer is killed"), seed, is_strict=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_strict", [True, False])
def test_order_holds_for_long(
    cluster: ClusterProcesses, tmp_path: Path, seed: int, *, is_strict: bool
) -> None:
    load = OrderLoad(cluster, tmp_path / "none", is_strict=is_strict, seed=seed)
    faults = [load.dice.choice(FAULTS) for _ in range(LONG_ROUNDS)]
    run(cluster, tmp_path, faults, seed, is_strict=is_strict)


@pytest.mark.long
@pytest.mark.xdist_group("network")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_strict", [True, False])
def test_order_holds_for_long_wherever_the_network_is_cut(
    spread: ClusterProcesses, network: Network, tmp_path: Path, seed: int, *, is_strict: bool
) -> None:
    load = OrderLoad(spread, tmp_path / "none", is_strict=is_strict, seed=seed)
    faults = [load.dice.choice([*FAULTS, *CUTS]) for _ in range(LONG_ROUNDS)]
    run(spread, tmp_path, faults, seed, is_strict=is_strict, network=network)


def pick(*words: str, among: list[Fault] = FAULTS) -> list[Fault]:
    """Return the first fault for each of some words."""
    return [next(fault for fault in among if word in fault.name) for word in words]

"""The network between clients, brokers and meta servers is cut, in every way that has a meaning.

Each of them is a process on a machine of its own, as far as the network goes. What is cut off
hears nothing and is told nothing: no connection is refused or reset. Confirmed = handled + dead.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque.errors import UnavailableError
from pulque.testing.cluster import ClusterProcesses
from tests.robustness.brokers import wait_until
from tests.robustness.crew import QUICK_BROKER, QUICK_META, Crew, Producer, at_work, settle
from tests.robustness.network import Network, why_not

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("network")]

MACHINES = ("meta-1", "meta-2", "broker-1", "broker-2", "clients")
CUT_S = 4.0
"""Longer than a lease, and than a broker may be silent; some time-outs of clients are longer."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network(MACHINES) as made:
        yield made


@pytest.fixture(scope="module")
def started(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcesses]:
    """Two meta servers and two brokers, each on a machine of its own."""
    with ClusterProcesses(tmp_path_factory.mktemp("network")) as made:
        for name in MACHINES[:-1]:
            listen = {"host": network.addresses[name]}
            with network.inside(name):
                if name.startswith("meta"):
                    no_admin = {"enabled": False}
                    made.add_meta(name, {**QUICK_META, "listen": listen, "admin": no_admin})
                else:
                    made.add_broker(name, {**QUICK_BROKER, "listen": listen})
        yield made


@pytest.fixture
def cluster(network: Network, started: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The same for each test, which is on the machine of the clients."""
    with network.inside("clients"):
        started.wait_until_known()
        yield started
    network.heal()


def serving(cluster: ClusterProcesses, meta: str) -> set[str]:
    """Return the brokers that a meta server has in its routes."""
    with pulque.connect(cluster[meta].url, timeout=20) as client:
        return {each["name"] for each in client.status()["servers"] if each["is_serving"]}


def go_on(crew: Crew, producer: Producer) -> None:
    """Wait until more is confirmed, and more is handled."""
    confirmed, handled = len(producer.confirmed), len(crew.handled())
    wait_until(
        lambda: len(producer.confirmed) > confirmed and len(crew.handled()) > handled,
        within=60,
        what="sending and handling go on",
    )


def cut_broker_from_clients(network: Network) -> None:
    network.cut("clients", "broker-1")


def cut_broker_from_everybody(network: Network) -> None:
    network.isolate("broker-1")


def lose_answers_of_a_broker(network: Network) -> None:
    """What is sent arrives and is stored; whoever sent it does not learn so."""
    network.cut("broker-1", "clients", one_way=True)


def cut_broker_from_meta_servers(network: Network) -> None:
    """Clients are told that it is away, and reach it all the same."""
    network.cut("broker-1", "meta-1")
    network.cut("broker-1", "meta-2")


def cut_clients_from_meta_servers(network: Network) -> None:
    network.cut("clients", "meta-1")
    network.cut("clients", "meta-2")


def cut_everybody_from_one_meta_server(network: Network) -> None:
    network.isolate("meta-1")


CUTS = (
    cut_broker_from_clients,
    cut_broker_from_everybody,
    lose_answers_of_a_broker,
    cut_broker_from_meta_servers,
    cut_clients_from_meta_servers,
    cut_everybody_from_one_meta_server,
)


def test_what_is_cut_is_lost_without_a_word(network: Network, cluster: ClusterProcesses) -> None:
    network.cut("clients", "broker-1")
    with pytest.raises(UnavailableError):
        pulque.connect(cluster["broker-1"].url, timeout=0.5)
    pulque.connect(cluster["broker-2"].url, timeout=20).close()


@pytest.mark.timeout(400)
def test_what_was_confirmed_is_handled_or_dead_wherever_the_network_was_cut(
    network: Network, cluster: ClusterProcesses, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    with at_work(cluster, tmp_path) as (crew, producer):
        for cut in draw.sample(CUTS, len(CUTS)):
            print(cut.__name__)
            go_on(crew, producer)
            cut(network)
            # Whoever is left goes on while it is cut, not only afterwards.
            go_on(crew, producer)
            time.sleep(CUT_S)
            go_on(crew, producer)
            network.heal()
            cluster.wait_until_known()
        settle(cluster, crew, producer)
    assert producer.refused == []


@pytest.mark.timeout(120)
def test_a_broker_that_meta_servers_cannot_hear_leaves_the_routes_and_comes_back(
    network: Network, cluster: ClusterProcesses
) -> None:
    cut_broker_from_meta_servers(network)
    for meta in ("meta-1", "meta-2"):
        wait_until(
            lambda meta=meta: serving(cluster, meta) == {"broker-2"},  # type: ignore[misc]
            within=30,
            what=f"{meta} leaves it out",
        )
    network.heal()
    cluster.wait_until_known()


@pytest.mark.timeout(120)
def test_a_broker_that_one_meta_server_hears_stays_in_the_routes_of_all(
    network: Network, cluster: ClusterProcesses
) -> None:
    network.cut("broker-1", "meta-1")
    silent_s = 3 * 0.5
    time.sleep(2 * silent_s)
    for meta in ("meta-1", "meta-2"):
        assert serving(cluster, meta) == {"broker-1", "broker-2"}

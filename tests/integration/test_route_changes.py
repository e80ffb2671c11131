"""What an operator does to routes while messages flow: marks, extension, a new broker, removal.

Everything goes through the administration API, at real processes under load, and afterwards
confirmed = handled + dead.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.cli.common.admin_client import AdminClient
from pulque.testing.cluster import ClusterProcesses
from tests.robustness.brokers import wait_until
from tests.robustness.crew import (
    QUICK_BROKER,
    QUICK_META,
    Crew,
    Producer,
    at_work,
    dead_letters,
    settle,
)
from tests.robustness.handling import SUBJECT

pytestmark = [pytest.mark.server, pytest.mark.slow]

LIMIT_S = 60.0


class Operator:
    """Changes a cluster, and sees what that does to the traffic."""

    def __init__(self, cluster: ClusterProcesses, crew: Crew, producer: Producer) -> None:
        self._cluster = cluster
        self._crew = crew
        self._producer = producer
        with pulque.connect(cluster.url, timeout=LIMIT_S) as client:
            self.api = AdminClient(str(client.status()["admin"]), LIMIT_S)

    def put(self, path: str, body: object) -> Any:
        return self.api.ask("PUT", path, body)

    def stored(self) -> dict[str, int]:
        """Return how many messages of the subject each broker stored."""
        found: dict[str, int] = {}
        with pulque.connect(self._cluster.broker_url, timeout=LIMIT_S) as client:
            for each in client.positions(SUBJECT):
                found[each.broker_group] = found.get(each.broker_group, 0) + each.end
        return found

    def go_on(self, bursts: int = 3) -> None:
        """Wait until more is confirmed, and more is handled."""
        confirmed, handled = len(self._producer.confirmed), len(self._crew.handled())
        wait_until(
            lambda: (
                len(self._producer.confirmed) >= confirmed + 20 * bursts
                and len(self._crew.handled()) > handled
            ),
            within=LIMIT_S,
            what="sending and handling go on",
        )

    def until_stored_at(self, *brokers: str) -> None:
        """Wait until each of these brokers was sent more."""
        before = self.stored()
        wait_until(
            lambda: all(self.stored().get(b, 0) > before.get(b, 0) for b in brokers),
            within=LIMIT_S,
            what=f"{brokers} are sent to",
        )

    def until_left_alone(self, broker: str) -> None:
        """Wait until a broker is not sent to any more, while others are."""

        def is_quiet() -> bool:
            before = self.stored().get(broker, 0)
            self.go_on()
            return self.stored().get(broker, 0) == before

        wait_until(is_quiet, within=LIMIT_S, what=f"{broker} is left alone")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    with ClusterProcesses.start(
        tmp_path / "cluster", brokers=2, meta_settings=QUICK_META, broker_settings=QUICK_BROKER
    ) as made:
        yield made


@pytest.mark.timeout(300)
def test_a_subject_is_extended_to_a_new_broker_and_an_old_one_removed_under_load(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    with at_work(cluster, tmp_path) as (crew, producer):
        operator = Operator(cluster, crew, producer)
        operator.go_on()

        operator.api.ask("POST", f"/subjects/{SUBJECT}/extend", {"partitions": 4})
        operator.until_stored_at("broker-1", "broker-2")
        cluster.add_broker("broker-3", QUICK_BROKER)
        cluster.wait_until_known()
        onto = {"partitions": 5, "broker_groups": ["broker-3"]}
        operator.api.ask("POST", f"/subjects/{SUBJECT}/extend", onto)
        operator.until_stored_at("broker-3")

        operator.put("/brokers/broker-1/drain", {"draining": True})
        operator.until_left_alone("broker-1")
        wait_until(
            lambda: operator.api.get("/brokers/broker-1")["lag"] == 0,
            within=LIMIT_S,
            what="everything of it is consumed",
        )
        buried = set(dead_letters(cluster))
        assert cluster["broker-1"].stop() == 0
        operator.api.ask("DELETE", "/brokers/broker-1")
        operator.until_stored_at("broker-2", "broker-3")

        settle(cluster, crew, producer, buried)
    assert producer.refused == []
    assert "broker-1" not in {row["name"] for row in operator.api.rows("/brokers")}


@pytest.mark.timeout(300)
def test_brokers_and_subjects_are_read_only_for_a_while_under_load(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    with at_work(cluster, tmp_path) as (crew, producer):
        operator = Operator(cluster, crew, producer)
        operator.go_on()

        operator.put("/brokers/broker-1/read-only", {"read_only": True})
        operator.until_left_alone("broker-1")
        # What it has is consumed all the same.
        wait_until(
            lambda: operator.api.get("/brokers/broker-1")["lag"] == 0,
            within=LIMIT_S,
            what="everything of it is consumed",
        )
        operator.put("/brokers/broker-1/read-only", {"read_only": False})
        operator.until_stored_at("broker-1", "broker-2")

        operator.put(f"/subjects/{SUBJECT}/read-only", {"read_only": True})

        def is_quiet() -> bool:
            before = operator.stored()
            time.sleep(1.0)
            return operator.stored() == before

        wait_until(is_quiet, within=LIMIT_S, what="nothing is stored any more")
        operator.put(f"/subjects/{SUBJECT}/read-only", {"read_only": False})
        operator.until_stored_at("broker-1", "broker-2")

        settle(cluster, crew, producer)
    # Whoever wanted to send meanwhile had to wait, and did.
    assert producer.refused == []

"""Servers and consumers of a cluster are killed in turn under load; then all is compared.

Confirmed = handled + dead, for a group that pulls from all brokers. ``PULQUE_FAULTS`` sets how
many faults there are (5 by default), ``PULQUE_TEST_SEED`` repeats a run.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pulque.testing.cluster import ClusterProcesses
from tests.robustness.brokers import wait_until
from tests.robustness.crew import (
    BURST,
    LEASE_S,
    QUICK_BROKER,
    QUICK_META,
    Crew,
    at_work,
    settle,
)
from tests.robustness.handling import is_poison

pytestmark = [pytest.mark.server, pytest.mark.slow]

FAULTS = int(os.environ.get("PULQUE_FAULTS", "5"))
AWAY_S = 60.0


def fail_somehow(
    draw: random.Random, cluster: ClusterProcesses, crew: Crew, seen: list[str]
) -> None:
    def kill(names: list[str], pause_s: float) -> None:
        for name in names:
            cluster[name].kill()
        time.sleep(pause_s)
        for name in names:
            cluster[name].restart()

    def stop_cleanly() -> None:
        broker = cluster[draw.choice(list(cluster.brokers))]
        assert broker.stop() == 0
        time.sleep(1)
        broker.restart()

    def pause() -> None:
        broker = cluster[draw.choice(list(cluster.brokers))]
        broker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        broker.send_signal(signal.SIGCONT)

    faults: dict[str, Callable[[], None]] = {
        "kill a broker": lambda: kill([draw.choice(list(cluster.brokers))], 1.0),
        "kill all meta servers": lambda: kill(list(cluster.metas), 2.0),
        "stop a broker": stop_cleanly,
        "pause a broker": pause,
        "kill a consumer": lambda: crew.kill_one(draw),
    }
    # Each kind comes before one comes again.
    name = draw.choice([each for each in faults if seen.count(each) == len(seen) // len(faults)])
    seen.append(name)
    print("fault:", name)
    faults[name]()


@pytest.mark.timeout(240 + 20 * FAULTS)
@pytest.mark.accepts("004-15", "004-19")
def test_what_was_confirmed_is_handled_or_dead_whatever_was_killed(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    with (
        ClusterProcesses.start(
            tmp_path, brokers=2, metas=2, meta_settings=QUICK_META, broker_settings=QUICK_BROKER
        ) as cluster,
        at_work(cluster, tmp_path) as (crew, producer),
    ):
        seen: list[str] = []
        for _ in range(FAULTS):
            time.sleep(draw.uniform(0.5, 1.5))
            fail_somehow(draw, cluster, crew, seen)
        settle(cluster, crew, producer)
    assert len(producer.confirmed) > BURST * FAULTS


def away(cluster: ClusterProcesses, folder: Path, seconds: float) -> None:
    """Kill all meta servers for a while; sends and pulls go on as if nothing were."""
    with at_work(cluster, folder) as (crew, producer):
        wait_until(lambda: bool(crew.handled()), within=60, what="the group is at work")
        for meta in cluster.metas.values():
            meta.kill()
        before = len(producer.confirmed)
        time.sleep(seconds)
        during = len(producer.confirmed)
        producer.end()
        good = {number for number in producer.confirmed if not is_poison(number)}
        wait_until(lambda: good <= crew.handled(), within=60, what="all is handled")
    assert producer.refused == []
    assert during > before


@pytest.mark.accepts("004-19")
def test_without_any_meta_server_sending_and_consuming_go_on(tmp_path: Path) -> None:
    with ClusterProcesses.start(
        tmp_path, brokers=2, meta_settings=QUICK_META, broker_settings=QUICK_BROKER
    ) as cluster:
        away(cluster, tmp_path, 5.0)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_any_meta_server_for_a_minute(tmp_path: Path) -> None:
    with ClusterProcesses.start(
        tmp_path, brokers=3, metas=2, meta_settings=QUICK_META, broker_settings=QUICK_BROKER
    ) as cluster:
        away(cluster, tmp_path, AWAY_S)

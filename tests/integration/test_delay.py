"""Delay servers as processes: killed, restarted, and with a clock that somebody sets."""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import pulque
from pulque.testing.cluster import ClusterProcesses

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("delay")
    with ClusterProcesses.start(folder, brokers=2) as made:
        yield made


def received(client: pulque.Client, subject: str, count: int, limit_s: float = 60) -> list[bytes]:
    """Pull until so many came, then a little longer to see whether more do."""
    bodies: list[bytes] = []
    deadline = time.monotonic() + limit_s
    with client.consumer(subject, group="g") as consumer:
        while len(bodies) < count and time.monotonic() < deadline:
            for message in consumer.pull(max_messages=1000, timeout=1):
                bodies.append(message.body)
                message.ack()
        for message in consumer.pull(max_messages=1000, timeout=0.5):
            bodies.append(message.body)
            message.ack()
    return bodies


@pytest.mark.accepts("001-47")
def test_a_killed_delay_server_loses_nothing_and_doubles_nothing(
    cluster: ClusterProcesses,
) -> None:
    delay = cluster.add_delay("delay-kill")
    sent = []
    with pulque.connect(cluster.url, timeout=60) as client:
        for turn in range(3):
            for i in range(100):
                body = b"%d/%d" % (turn, i)
                client.send("killed", body, delay=timedelta(milliseconds=500 + 15 * i))
                sent.append(body)
            time.sleep(0.7)
            delay.kill()
            delay.restart()
            cluster.wait_until_known()
        bodies = received(client, "killed", len(sent))
    delay.stop()

    assert sorted(bodies) == sorted(sent)


def test_the_clock_of_a_delay_server_is_set(cluster: ClusterProcesses, tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    meta = cluster.url.removeprefix("pulque://")
    module = "tests.integration.stepped_delay"
    data = str(tmp_path / "data")
    command = [sys.executable, "-m", module, str(ahead), "--data", data, "--meta", meta]
    with (
        (tmp_path / "stderr").open("wb") as log,
        subprocess.Popen(
            [*command, "--port", "0", "--set", "name=stepped"], stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready ")
            with pulque.connect(cluster.url, timeout=60) as client:
                set_back_and_forth(client, ahead)
        finally:
            process.terminate()
            assert process.wait(30) == 0
    assert "clock_stepped" in (tmp_path / "stderr").read_text()


def set_back_and_forth(client: pulque.Client, ahead: Path) -> None:
    wait_until_delays_are_taken(client)
    client.send("stepped", b"after an hour", delay=timedelta(minutes=59))
    client.send("stepped", b"after a year", delay=timedelta(days=364))
    for step_ms in (-HOUR_MS, -YEAR_MS, 0):
        ahead.write_text(str(step_ms))
        time.sleep(0.3)
    assert received(client, "stepped", 1, limit_s=1) == []
    ahead.write_text(str(HOUR_MS))
    assert received(client, "stepped", 1) == [b"after an hour"]
    ahead.write_text(str(YEAR_MS))
    assert received(client, "stepped", 1) == [b"after a year"]


def wait_until_delays_are_taken(client: pulque.Client, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            client.send("try", b"", delay=timedelta(days=1))
        except pulque.PulqueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return

"""Delay servers as processes: killed, restarted, and with a clock that somebody sets."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

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


@contextmanager
def stepped(cluster: ClusterProcesses, folder: Path) -> Iterator[Path]:
    """Run a delay server whose clock is ahead by what a file says, in ms; yield the file."""
    ahead = folder / "ahead"
    ahead.write_text("0")
    meta = cluster.url.removeprefix("pulque://")
    module = "tests.integration.stepped_delay"
    data = str(folder / "data")
    command = [sys.executable, "-m", module, str(ahead), "--data", data, "--meta", meta]
    with (
        (folder / "stderr").open("wb") as log,
        subprocess.Popen(
            [*command, "--port", "0", "--set", "name=stepped"],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TZ": "Europe/Berlin"},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready ")
            yield ahead
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_the_clock_of_a_delay_server_is_set(cluster: ClusterProcesses, tmp_path: Path) -> None:
    with stepped(cluster, tmp_path) as ahead, pulque.connect(cluster.url, timeout=60) as client:
        set_back_and_forth(client, ahead)
    assert "clock_stepped" in (tmp_path / "stderr").read_text()


def test_the_hour_that_is_twice_comes_twice(cluster: ClusterProcesses, tmp_path: Path) -> None:
    """In Berlin, where the server believes to be, 2027-10-31 02:30 is there twice."""
    berlin = ZoneInfo("Europe/Berlin")
    summer = datetime(2027, 10, 31, 2, 30, tzinfo=berlin, fold=0)
    winter = summer.replace(fold=1)
    with stepped(cluster, tmp_path) as ahead, pulque.connect(cluster.url, timeout=60) as client:
        wait_until_delays_are_taken(client)
        client.send("twice", b"winter", at=winter)
        client.send("twice", b"summer", at=summer)
        set_clock(ahead, summer - timedelta(minutes=2))
        assert received(client, "twice", 1, limit_s=1) == []
        set_clock(ahead, summer)
        assert received(client, "twice", 1) == [b"summer"]
        set_clock(ahead, winter)
        assert received(client, "twice", 1) == [b"winter"]


def set_clock(ahead: Path, now: datetime) -> None:
    ahead.write_text(str(int((now.timestamp() - time.time()) * 1000)))


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

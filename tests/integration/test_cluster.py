"""Brokers and meta servers as real processes find each other, and go on when some are away."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import pulque
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import BrokerProcessError, ServerProcess
from tests.robustness.brokers import wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("cluster")]

META = {"cluster": {"heartbeat": "300ms"}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses.start(folder, brokers=2, metas=2, meta_settings=META) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: ClusterProcesses) -> ClusterProcesses:
    """A cluster of two brokers and two meta servers that all run."""
    for name in started:
        if not started[name].is_running:
            started[name].restart()
    # A subject that is first sent to before that would stay with fewer brokers.
    started.wait_until_known()
    return started


def status_of(server: ServerProcess) -> dict[str, object]:
    with pulque.connect(server.url, timeout=20) as client:
        return client.status()


def sent_to(cluster: ClusterProcesses) -> dict[str, int]:
    return {
        name: int(str(status_of(broker)["messages_sent"]))
        for name, broker in cluster.brokers.items()
        if broker.is_running
    }


@pytest.mark.accepts("001-12", "004-15", "004-18")
def test_brokers_register_at_every_meta_server_and_share_what_is_sent(
    cluster: ClusterProcesses,
) -> None:
    metas = [meta.url.removeprefix("pulque://") for meta in cluster.metas.values()]
    for broker in cluster.brokers.values():
        told = status_of(broker)["cluster"]
        assert isinstance(told, dict)
        wait_until(
            lambda broker=broker: status_of(broker)["cluster"]["registered_at"] == metas,  # type: ignore[misc,index]
            within=20,
            what="it is registered at both",
        )

    before = sent_to(cluster)
    for home in (cluster.url, cluster.broker_url, cluster["broker-2"].url):
        with pulque.connect(home, timeout=20) as client:
            for number in range(10):
                client.send("orders", b"%d" % number)

    counts = {name: count - before[name] for name, count in sent_to(cluster).items()}
    assert sum(counts.values()) == 30
    assert all(counts.values()), counts


@pytest.mark.accepts("004-15")
def test_what_is_sent_goes_on_when_a_broker_is_killed_and_comes_back(
    cluster: ClusterProcesses,
) -> None:
    with pulque.connect(cluster.url, timeout=30) as client:
        client.send("orders", b"first")
        cluster["broker-1"].kill()
        for number in range(20):
            client.send("orders", b"%d" % number)
        cluster["broker-1"].restart()
        before = sent_to(cluster)["broker-1"]

        def is_back() -> bool:
            client.send("orders", b"again")
            return sent_to(cluster)["broker-1"] != before

        wait_until(is_back, within=60, what="the broker takes messages again")


def test_meta_servers_that_are_all_away_stop_nothing(cluster: ClusterProcesses) -> None:
    with pulque.connect(cluster.broker_url, timeout=20) as client:
        client.send("orders", b"before")
        for meta in cluster.metas.values():
            meta.kill()
        for number in range(50):
            client.send("orders", b"%d" % number)
        with pulque.connect(cluster.broker_url, timeout=20) as another:
            another.send("orders", b"a client that comes meanwhile")


def test_a_broker_restarts_while_all_meta_servers_are_away(cluster: ClusterProcesses) -> None:
    before = status_of(cluster["broker-1"])
    for meta in cluster.metas.values():
        meta.kill()

    cluster["broker-1"].stop()
    cluster["broker-1"].restart()

    after = status_of(cluster["broker-1"])
    assert isinstance(before["cluster"], dict)
    assert after["cluster"] == {**before["cluster"], "registered_at": []}
    assert after["partition_count"] == before["partition_count"]


def test_a_second_broker_of_the_same_name_is_refused_with_the_address_of_the_first(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    metas = ",".join(meta.url.removeprefix("pulque://") for meta in cluster.metas.values())
    told = subprocess.run(
        [
            *(sys.executable, "-m", "pulque", "broker", "--data", str(tmp_path / "other")),
            *("--port", "0", "--set", "name=broker-1", "--set", f"cluster.meta={metas}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )

    assert told.returncode == 2
    assert told.stdout == ""
    assert cluster["broker-1"].url.removeprefix("pulque://") in told.stderr


def test_a_broker_of_another_cluster_is_refused_with_the_remedy(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    cluster["broker-1"].stop()
    with ClusterProcesses.start(tmp_path / "other", brokers=0) as other:
        theirs = {"storage": {"directory": str(cluster.folder / "broker-1")}}
        with pytest.raises(BrokerProcessError, match="cluster") as told:
            other.add_broker("broker-1", theirs)

    assert "ended with code 2" in str(told.value)


# -- pulque up ----------------------------------------------------------------------------------


def up(tmp_path: Path, *arguments: str) -> ServerProcess:
    command = ["up", "--data", str(tmp_path / "data"), *arguments]
    process = ServerProcess(command, log=tmp_path / "stderr", timeout=60)
    process.restart()
    return process


def test_up_is_a_meta_server_and_a_broker_in_one_process(tmp_path: Path) -> None:
    process = up(tmp_path)
    try:
        assert psutil.Process(process.pid).children() == []
        with pulque.connect(process.url, timeout=20) as client:
            client.send("orders", b"a")
            with client.consumer("orders", group="g") as consumer:
                message = next(iter(consumer))
                message.ack()
            told = client.status()["cluster"]
        assert message.body == b"a"
        assert told["id"]
        assert len(told["registered_at"]) == 1
        assert process.stop() == 0

        process.restart()
        with pulque.connect(process.url, timeout=20) as client:
            assert client.status()["cluster"]["id"] == told["id"]
    finally:
        process.close()
    assert (tmp_path / "data" / "meta" / "meta.sqlite").exists()


def test_up_takes_over_a_directory_of_a_broker_that_stood_alone(tmp_path: Path) -> None:
    command = ["broker", "--data", str(tmp_path / "data")]
    alone = ServerProcess(command, log=tmp_path / "stderr", timeout=60)
    alone.restart()
    with pulque.connect(alone.url, timeout=20) as client:
        client.send("orders", b"from before")
    alone.close()

    process = up(tmp_path)
    try:
        with (
            pulque.connect(process.url, timeout=20) as client,
            client.consumer("orders", group="g") as consumer,
        ):
            assert next(iter(consumer)).body == b"from before"
    finally:
        process.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(
        each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_up_with_brokers_is_a_cluster_of_processes_that_end_together(
    tmp_path: Path, number: int
) -> None:
    process = up(tmp_path, "--brokers", "2")
    try:
        children = children_of(process.pid)
        assert len(children) == 4, "a meta server, two brokers and a delay server"
        assert process.url.count(",") == 1
        with pulque.connect(process.url, timeout=20) as client:
            for each in range(10):
                client.send("orders", b"%d" % each)
        process.send_signal(number)
        code = process.wait()
        wait_until(lambda: all_gone(children), within=60, what="no process is left")
    finally:
        process.close()

    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    logs = (tmp_path / "stderr").read_text()
    assert logs.count("broker_stopped") == 2


@pytest.mark.slow
def test_a_broker_of_up_may_be_killed(tmp_path: Path) -> None:
    process = up(tmp_path, "--brokers", "2")
    try:
        brokers = [each for each in children_of(process.pid) if "broker" in each.cmdline()]
        with pulque.connect(process.url, timeout=60) as client:
            client.send("orders", b"a")
            brokers[1].kill()
            for each in range(20):
                client.send("orders", b"%d" % each)
        assert process.is_running
        wait_until(
            lambda: "ended with -9" in (tmp_path / "stderr").read_text(),
            within=20,
            what="it is told who ended",
        )
    finally:
        process.close()


def test_up_says_which_broker_did_not_start(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        told = subprocess.run(
            [sys.executable, "-m", "pulque", "up", "--brokers", "1", "--port", str(free_port)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=os.environ,
        )

    assert told.returncode != 0
    assert told.stdout == ""
    assert "another process listens there" in told.stderr
    assert "broker-1 did not start" in told.stderr


def test_what_a_cluster_says_is_in_the_log_of_a_broker(cluster: ClusterProcesses) -> None:
    lines = [json.loads(line) for line in cluster["broker-1"].stderr.splitlines()]

    assert "standing_changed" in {line["event"] for line in lines}

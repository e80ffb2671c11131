"""Running out of descriptors stops new connections, and nothing else."""

import resource
import socket

import psutil
import pytest

from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import StartBroker, wait_until
from tests.robustness.raw import RawClient, address_of

pytestmark = pytest.mark.server


def limit(broker: BrokerProcess, descriptors: int) -> None:
    _, most = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (descriptors, most))


def connect(url: str, count: int) -> list[socket.socket]:
    return [socket.create_connection(address_of(url), 2) for _ in range(count)]


def accepts(url: str) -> bool:
    try:
        with RawClient(url, timeout=1) as client:
            return bool(client.status())
    except Exception:  # noqa: BLE001  # whatever it is, it is a no
        return False


def test_the_log_goes_on_when_clients_take_all_descriptors(start_broker: StartBroker) -> None:
    broker = start_broker(
        storage__segment_size="64KiB",
        storage__segment_batches=3,
        storage__checkpoint_interval="1s",
        storage__checkpoint_records=5,
        limits__handshake_timeout="2s",
    )
    with RawClient(broker.url) as client:
        limit(broker, 64)
        crowd = connect(broker.url, 80)
        for number in range(20):
            assert client.send("a", [str(number).encode()]).first_sequence == number
            assert client.pull("a", expected=number).deliveries
        for each in crowd:
            each.close()
        wait_until(lambda: accepts(broker.url), within=5, what="connections are taken again")

    assert "broker_failed" not in broker.stderr
    assert "Traceback" not in broker.stderr


def test_connections_are_accepted_again_after_none_was_left(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"x"])
        limit(broker, psutil.Process(broker.pid).num_fds())
        crowd = connect(broker.url, 5)
        assert client.send("a", [b"y"]).first_sequence == 1
        limit(broker, 1024)
        wait_until(lambda: accepts(broker.url), within=5, what="connections are taken again")
        for each in crowd:
            each.close()

    assert broker.is_running

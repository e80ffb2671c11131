"""What a broker needs while it works: its own files, its clients, and memory for no backlog."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pulque
from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import Footprint

pytestmark = pytest.mark.server

# Python loads this file before the program; the hook writes down what the process asks for.
WATCHER = """
import json, os, sys

_log = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def _note(event, arguments):
    if event in ("import", "open", "socket.connect", "sqlite3.connect", "subprocess.Popen"):
        place = [each for each in arguments if isinstance(each, (str, int, tuple))]
        os.write(_log, json.dumps([event, place], default=str).encode() + b"\\n")

sys.addaudithook(_note)
"""
DATABASES = {
    *(
        "sqlite3",
        "_sqlite3",
        "sqlalchemy",
        "aiosqlite",
        "asyncpg",
        "psycopg",
        "psycopg2",
        "duckdb",
    ),
    *("redis", "valkey", "pymemcache", "memcache", "pymongo", "pymysql", "MySQLdb", "dbm", "lmdb"),
}


@pytest.fixture
def watched(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> BrokerProcess:
    """A broker that writes down its imports, and the files and addresses that it opens."""
    folder = tmp_path / "watcher"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WATCHER)
    package = Path(pulque.__file__).parents[1]
    environ = {"PYTHONPATH": f"{folder}:{package}", "WATCHED": str(tmp_path / "watched")}
    return start_broker(environ=environ)


def events(tmp_path: Path) -> Iterator[tuple[str, list[Any]]]:
    for line in (tmp_path / "watched").read_text().splitlines():
        name, arguments = json.loads(line)
        yield name, arguments


@pytest.mark.accepts("000-04")
def test_a_broker_opens_no_database_and_no_cache_server(
    watched: BrokerProcess, tmp_path: Path
) -> None:
    with pulque.connect(watched.url) as client, client.producer(acks="disk") as producer:
        producer.send_many("orders", [b"%d" % number for number in range(5000)]).result(30)
        with client.consumer("orders", "g") as consumer:
            handled = 0
            while handled < 5000:
                for message in consumer.pull(500, timeout=10):
                    if message.attempt == 1 and int(message.body) % 100 == 0:
                        message.nack("later", delay=0)
                    else:
                        message.ack()
                        handled += 1
        process = psutil.Process(watched.pid)
        sockets = process.net_connections(kind="all")
        files = {Path(each.path) for each in process.open_files()}

    port = int(watched.url.rpartition(":")[2])
    assert {each.laddr.port for each in sockets if each.family.name != "AF_UNIX"} == {port}
    # A pair of its own joins the loop and its threads: such a socket has no name.
    assert not [each for each in sockets if each.family.name == "AF_UNIX" and each.raddr]
    own = {watched.data.with_name("data.stderr"), tmp_path / "watched"}
    assert not [path for path in files - own if not path.is_relative_to(watched.data)]
    seen = list(events(tmp_path))
    imported = {str(found[0]).partition(".")[0] for name, found in seen if name == "import"}
    assert {"pulque", "asyncio"} <= imported, "nothing was watched"
    assert imported & DATABASES == set()
    assert not [each for each in seen if each[0] not in ("import", "open")]


BODY = b"x" * 64
CHUNK = 1000  # in a batch
EARLY, LATE = 200_000, 1_000_000
IDLE_GROUPS = 5


@pytest.mark.slow
@pytest.mark.accepts("000-02")
def test_a_million_waiting_messages_and_idle_groups_cost_no_memory(
    broker_process: BrokerProcess,
) -> None:
    with pulque.connect(broker_process.url) as client, client.producer(acks="memory") as producer:

        def send(count: int) -> None:
            for _ in range(count // CHUNK):
                producer.send_many("orders", [BODY] * CHUNK).result(60)

        send(CHUNK)
        for number in range(IDLE_GROUPS):
            with client.consumer("orders", f"idle{number}") as consumer:
                (message,) = consumer.pull(1, timeout=10)
                message.ack()
        send(EARLY - CHUNK)  # now the cache of the newest batches is full
        footprint = Footprint(broker_process.pid)
        send(LATE - EARLY)

        grown = footprint.grown_mib
        print(f"{footprint.base_mib:.1f} MiB, {grown:.1f} MiB more")
        waiting = {each.group: each.lag for each in client.groups("orders")}
    assert waiting == {f"idle{number}": LATE - 1 for number in range(IDLE_GROUPS)}
    # 21 bytes for each message would be 16 MiB.
    assert grown < 16, f"{LATE - EARLY} messages cost {grown:.1f} MiB"

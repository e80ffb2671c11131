"""A web server that loads its application once and forks: no answered request is lost."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

import pulque
from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

PATIENCE = 30.0
REQUESTS = 60
APPLICATION = """
import os
import pulque

client = pulque.connect(name="shop", timeout=10)
client.send("orders", b"preloaded")


def application(environ, start_response):
    receipt = client.send("orders", environ["QUERY_STRING"].encode())
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {receipt.id}".encode()]
"""


@pytest.fixture
def server(broker_process: BrokerProcess, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shop.py").write_text(APPLICATION)
    log = tmp_path / "gunicorn.log"
    options = ("--preload", "--workers=3", "--bind=127.0.0.1:0", "--no-control-socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", *options, f"--log-file={log}", "shop"], cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + PATIENCE
        found = None
        while found is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
            found = re.search(
                r"Listening at: (http://\S+:\d+)", log.read_text() if log.exists() else ""
            )
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_workers_of_gunicorn_store_what_they_confirm(server: str) -> None:
    def order(number: int) -> list[str]:
        with urlopen(f"{server}/?{number}", timeout=PATIENCE) as answer:  # noqa: S310
            return str(answer.read().decode()).split()

    workers, ids, sent = set[str](), set[str](), 0
    deadline = time.monotonic() + PATIENCE
    while len(workers) < 2:
        assert time.monotonic() < deadline, f"only worker {workers} answers"
        with ThreadPoolExecutor(6) as threads:
            for worker, message_id in threads.map(order, range(sent, sent + REQUESTS)):
                workers.add(worker)
                ids.add(message_id)
        sent += REQUESTS

    assert len(ids) == sent
    with pulque.connect(timeout=10) as client:
        stored = [message.body for message in client.read("orders", max_messages=sent + 2)]
    assert sorted(stored) == sorted([b"preloaded", *(str(n).encode() for n in range(sent))])

"""``kill -9`` of a broker under groups of every mode: a real process, real files."""

import threading
import time
from collections import Counter
from typing import Any

import pytest

import pulque
from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

COUNT = 3000
KILLS = 3
PATIENCE_S = 60


class Worker(threading.Thread):
    """Consumes until it is told that it has all, or to stop."""

    def __init__(self, url: str, name: str, wishes: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._wishes = {"consumer_id": name, **wishes}
        self.handed: Counter[int] = Counter()
        self.wants_end = False

    def run(self) -> None:
        with (
            pulque.connect(self._url, name="worker") as client,
            client.consumer("orders", max_messages=50, **self._wishes) as consumer,
        ):
            while not self.wants_end:
                try:
                    messages = consumer.pull(timeout=0.2)
                except pulque.UnavailableError:
                    continue
                self.handed.update(int(message.body) for message in messages)
                consumer.ack_all(messages)


@pytest.mark.timeout(180)
def test_every_group_gets_what_it_wants_over_kills(broker_process: BrokerProcess) -> None:
    broker = broker_process
    red = {"tags": ["red"]}
    workers = {
        "red-1": Worker(broker.url, "red-1", {"group": "red", **red}),
        "red-2": Worker(broker.url, "red-2", {"group": "red", **red}),
        "once": Worker(broker.url, "once", {"group": "once", "mode": "once", **red}),
        "reader": Worker(broker.url, "reader", {"broadcast": True}),
        "picky": Worker(broker.url, "picky", {"broadcast": True, **red}),
    }
    for worker in workers.values():
        worker.start()
    sent: set[int] = set()
    with pulque.connect(broker.url) as client:
        for number in range(COUNT):
            tags = ["red"] if number % 10 == 0 else ["grey"]
            client.send("orders", b"%d" % number, tags=tags, timeout=PATIENCE_S)
            sent.add(number)
            if number % (COUNT // (KILLS + 1)) == COUNT // (KILLS + 1) - 1 and number < COUNT - 1:
                broker.kill()
                broker.restart()
    reds = {number for number in sent if number % 10 == 0}

    def shared() -> set[int]:
        return {*workers["red-1"].handed, *workers["red-2"].handed}

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (
        shared() >= reds
        and set(workers["reader"].handed) >= sent
        and set(workers["picky"].handed) >= reds
    ):
        time.sleep(0.1)
    for worker in workers.values():
        worker.wants_end = True
    for worker in workers.values():
        worker.join(PATIENCE_S)

    assert shared() == reds
    assert set(workers["reader"].handed) == sent
    assert set(workers["picky"].handed) == reds
    once = workers["once"].handed
    assert set(once) <= reds
    assert set(once.values()) == {1}, "handed out twice"
    # What was on its way when the broker was killed may be gone: that is what once means.
    assert len(once) > len(reds) // 2

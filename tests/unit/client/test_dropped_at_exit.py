"""What a dropped client still had to say is said before the program ends."""

import subprocess
import sys
import threading
import warnings

import pytest

import pulque
from pulque.testing.broker import InProcessBroker
from pulque.wire import requests
from tests.unit.client.fake_broker import Drop, FakeBroker
from tests.unit.client.test_dropped import (
    PATIENCE,
    client_threads,
    connections,
    drop,
    drop_producer,
    wait_until,
)

PROGRAM = """
import atexit, gc, sys
import pulque

# Called before what the client does at the end of the process: it was registered after that.
atexit.register(lambda: print("ending", flush=True))

def work():
    client = pulque.connect(sys.argv[1])
    client.producer(linger=60).send_many("orders", [b"one", b"two"])

work()
gc.collect()
"""


def test_a_dropped_producer_sends_what_it_has() -> None:
    left = 4

    def refuse(request: requests.Request) -> None:
        # A program that does not wait has ended long before the last of them.
        nonlocal left
        if isinstance(request, requests.Send) and left:
            left -= is_ending.is_set()
            raise Drop(handled=False)

    is_ending = threading.Event()
    with FakeBroker() as broker:
        broker.fault = refuse
        program = [sys.executable, "-W", "ignore", "-c", PROGRAM, broker.url]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ending\n"
            is_ending.set()
            assert process.wait(PATIENCE) == 0

        assert broker.partition("orders").end == 2, "messages were lost"
        assert broker.messages("orders") == [b"one", b"two"]


def test_a_warning_that_is_an_error_leaves_no_thread_and_no_socket(
    pulque_broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pulque.connect(pulque_broker.url) as other:
        other.send("warm", b"up")  # whatever the broker starts when it is first used
    before = client_threads(), connections(pulque_broker)
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: raised.append(found.exc_type))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        drop(drop_producer, pulque_broker.url)

    assert ResourceWarning in raised
    wait_until(lambda: (client_threads(), connections(pulque_broker)) == before)
    with pulque.connect(pulque_broker.url) as other:
        assert [each.body for each in other.read("orders")] == [b"one"]

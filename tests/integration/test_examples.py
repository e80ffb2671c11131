"""Every example runs, ends by itself and prints what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *, within: float = 60) -> list[str]:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=within,
        env=dict(os.environ),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def test_first_consumer_gets_what_first_producer_sent(broker_process: BrokerProcess) -> None:
    sent = run_example("first_producer.py")
    received = run_example("first_consumer.py")

    assert broker_process.is_running
    assert sent[0].endswith("as tea.ordered/0")
    assert sent[1] == "sent 999 more"
    assert received == ["table-4 one green tea", *(f"- tea {n}" for n in range(1, 1000))]


@pytest.mark.usefixtures("broker_process")
def test_async_twin_receives_what_it_sends() -> None:
    assert run_example("async_twin.py") == ["received 100, the last one was coffee 99"]


@pytest.mark.usefixtures("broker_process")
def test_batch_consumer_stores_everything() -> None:
    assert run_example("batch_consumer.py")[-1].endswith(", 1000 in all")


@pytest.mark.usefixtures("broker_process")
def test_filters_and_modes_show_who_gets_what() -> None:
    assert run_example("filters.py") == [
        "stove: tea",
        "stove: soup",
        "bell, once: soup",
        "screen-1: tea, ice, soup",
        "screen-2: tea, ice, soup",
    ]


@pytest.mark.usefixtures("broker_process")
def test_retries_show_a_second_attempt() -> None:
    assert run_example("retries.py") == [
        "attempt 1: the bank does not answer, 4 euros not charged",
        "attempt 2: charged 4 euros",
    ]


@pytest.mark.usefixtures("broker_process")
def test_the_application_serves_what_it_sends_itself() -> None:
    assert run_example("app.py") == ["served 20 cakes, number 7 at the second attempt"]


@pytest.mark.usefixtures("broker_process")
def test_a_seat_is_sold_once() -> None:
    assert run_example("effectively_once.py") == ["sold", "was sold before", "seats sold: 1"]


@pytest.mark.usefixtures("broker_process")
def test_priorities_put_the_urgent_first() -> None:
    assert run_example("priorities.py") == [
        "priority 9: a kidney",
        "priority 4: a parcel",
        "priority 0: a postcard",
    ]


@pytest.mark.usefixtures("broker_process")
def test_orders_are_handled_in_order_and_beside_each_other() -> None:
    assert run_example("ordered.py") == [
        "at once: ['order-17 created', 'order-18 created']",
        "order-17 then was paid, shipped",
    ]


@pytest.mark.usefixtures("broker_process")
def test_patterns_cover_what_comes_later() -> None:
    assert run_example("patterns.py") == ["sensor.kitchen 21.5", "sensor.cellar 9.0"]


@pytest.mark.usefixtures("broker_process")
def test_time_travel_reads_again_from_an_instant_on() -> None:
    assert run_example("time_travel.py") == [
        "handled ['home', 'prices', 'order']",
        "a reset would read 2 messages again",
        "again ['prices', 'order']",
    ]


@pytest.mark.usefixtures("up_process")
def test_delayed_messages_come_when_they_are_due() -> None:
    assert run_example("delayed.py") == [
        "a reminder is due in 2 s; another one was cancelled: CANCELLED",
        "waiting now: ['water the plants']",
        "not early: water the plants",
    ]


@pytest.mark.timeout(450)
def test_the_demo_loses_nothing_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PULQUE_URL", raising=False)
    lines = run_example("demo.py", within=400)  # Spark takes most of it

    told = "\n".join(lines)
    assert "lost: 0" in told
    assert "with the reasons of 3 attempts" in told
    assert "20,000 messages came again" in told
    assert "'tea for later' came" in told
    assert "cancelled in time: CANCELLED; the kitchen got 1 of 2" in told
    assert "tea.ordered/0, stored at" in told
    assert "exact: sent = stored = settled + dead + waiting" in told
    assert "ended cleanly, with code 0" in told


def test_every_example_is_short_and_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in here, path.name
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 40 or path.name == "demo.py", path.name

"""What is replayed is what was archived, once, and says where it comes from."""

from collections import Counter
from pathlib import Path

import pytest

import pulque
from pulque.cli.app import run as run_command
from pulque.cli.common.options import Tools
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker

pytest.importorskip("deltalake")
from pulque.pipeline.archive.message_archiver import Archiver, run_here
from pulque.pipeline.lake.replay import ORIGIN_HEADER, count_messages, replay
from pulque.pipeline.query import Question


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Two subjects, of three priorities, one message retried and one dead."""
    where = str(tmp_path / "lake")
    with InProcessBroker(tmp_path / "data") as broker, pulque.connect(broker.url) as client:
        for number in range(30):
            client.send(
                ("order.paid", "refund")[number % 2],
                str(number).encode(),
                key=f"key-{number}",
                tags=["red"],
                headers={"number": str(number)},
                priority=4 + number % 3,
            )
        with client.consumer("order.paid", "billing") as consumer:
            first, second, *rest = consumer.pull(15, timeout=5)
            first.nack("again", delay=0)
            second.reject("never")
            consumer.ack_all(rest)
            consumer.settle()
            (again,) = consumer.pull(1, timeout=5)
            again.ack()
        client.seal()
        list(Archiver(where, str(tmp_path / "data"), "b", lambda: run_here).run())
    return where


def stored(client: pulque.Client, subject: str) -> list[pulque.Message]:
    found = client.positions(subject)
    return [m for each in found for m in client.read(subject, partition=each.partition)]


def test_each_goes_to_its_own_subject_with_all_its_parts(
    lake: str, pulque_client: pulque.Client
) -> None:
    done = replay(lake, Question(), pulque_client)

    assert done.messages == {"order.paid": 15, "refund": 15}
    found = stored(pulque_client, "order.paid") + stored(pulque_client, "refund")
    assert sorted(int(message.body) for message in found) == list(range(30))
    for message in found:
        number = message.body.decode()
        assert (message.key, message.tags) == (f"key-{number}", ("red",))
        assert message.priority == 4 + int(number) % 3
        assert message.headers["number"] == number
        assert len(message.headers[ORIGIN_HEADER]) == 32
        assert message.headers[ORIGIN_HEADER] != message.id


def test_some_go_to_another_subject(lake: str, pulque_client: pulque.Client) -> None:
    counted: list[int] = []
    question = Question(subject="order.*")
    done = replay(
        lake, question, pulque_client, target="again", rate=1000.0, on_sent=counted.append
    )

    assert done.total == sum(counted) == 15
    assert sorted(int(m.body) for m in stored(pulque_client, "again")) == list(range(0, 30, 2))


def test_a_dry_run_counts_what_a_replay_sends(lake: str, pulque_client: pulque.Client) -> None:
    question = Question(headers={"number": "7"})

    assert count_messages(lake, question).messages == Counter(refund=1)
    assert count_messages(lake, question) == replay(lake, question, pulque_client, target="t")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(
    lake: str, pulque_client: pulque.Client, rate: float
) -> None:
    with pytest.raises(UsageError, match="messages per second above 0 is allowed"):
        replay(lake, Question(), pulque_client, rate=rate)


def test_the_command_tells_what_it_did(
    lake: str, pulque_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["pipeline", "replay", "--lake", lake, "--url", pulque_url, "--target", "t"]
    tools = Tools(connect=pulque.connect)

    assert run_command([*common, "--subject", "refund", "--dry-run"], tools) == 0
    assert "15 messages, 25 bytes of bodies would be sent" in capsys.readouterr().out
    assert run_command([*common, "--key", "key-4", "-o", "json"], tools) == 0
    told = capsys.readouterr().out
    assert told == '{"messages": {"order.paid": 1}, "body_bytes": 1, "dry_run": false}\n'
    assert run_command([*common, "--subject", "nothing"], tools) == 4
    capsys.readouterr()
    assert run_command([*common, "--all", "--rate", "0", "--dry-run"], tools) == 2
    assert "a rate of 0; a number of messages per second above 0" in capsys.readouterr().err
    assert run_command(common, tools) == 2
    assert run_command([*common, "--all", "--key", "key-4"], tools) == 2
    assert "which messages?" in capsys.readouterr().err
    assert run_command([*common, "--all", "--dry-run"], tools) == 0

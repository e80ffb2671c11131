"""Resets, from the client and the command line, and what busy consumers make of them."""

import json
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest

import pulque
from pulque import aio
from pulque.cli.app import run
from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import Tools
from pulque.errors import UnknownGroupError, UnknownSubjectError, UsageError
from pulque.testing.broker import InProcessBroker
from pulque.testing.process import BrokerProcess
from tests.integration.test_subjects import bodies, take, take_async
from tests.nothing import check_nothing_comes

pytestmark = pytest.mark.server
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(stored_at_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=stored_at_ms)


def send_spaced(
    client: pulque.Client, broker: InProcessBroker, count: int
) -> list[pulque.Receipt]:
    """Send so many messages, a second apart."""
    receipts = []
    for number in range(count):
        receipts.append(client.send("orders", b"%d" % number))
        broker.advance_time(1)
    return receipts


def command(*arguments: str) -> int:
    return run(arguments, Tools(connect=pulque.connect))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# -- the client ---------------------------------------------------------------------------------


@pytest.mark.accepts("003-27", "004-11")
def test_a_group_travels_to_an_instant_and_back(
    pulque_client: pulque.Client, pulque_broker: InProcessBroker
) -> None:
    receipts = send_spaced(pulque_client, pulque_broker, 10)
    with pulque_client.consumer("orders", "billing") as consumer:
        take(consumer, 10)
        consumer.settle()

        (row,) = pulque_client.reset("orders", "billing", moment(receipts[6].stored_at_ms))
        assert (row.position, row.target, row.reread, row.skipped, row.held) == (10, 6, 4, 0, 0)
        assert bodies(take(consumer, 4)) == [b"6", b"7", b"8", b"9"]
        consumer.settle()
        pulque_client.reset("orders", "billing", moment(receipts[6].stored_at_ms + 1))
        assert bodies(take(consumer, 3)) == [b"7", b"8", b"9"]
        consumer.settle()
        pulque_client.reset("orders", "billing", "earliest")
        assert len(take(consumer, 2)) == 2
        consumer.settle()
        (row,) = pulque_client.reset("orders", "billing", moment(receipts[9].stored_at_ms))
        assert row.skipped == 9 - row.position
        assert bodies(take(consumer, 1)) == [b"9"]


def test_a_dry_run_tells_and_does_nothing(pulque_client: pulque.Client) -> None:
    for number in range(5):
        pulque_client.send("orders", b"%d" % number)
    with pulque_client.consumer("orders", "billing") as consumer:
        take(consumer, 5)
        consumer.settle()

        (row,) = pulque_client.reset("orders", "billing", 2, dry_run=True)

        assert (row.partition, row.position, row.target, row.reread) == ("orders", 5, 2, 3)
        check_nothing_comes(pulque_client, consumer)


async def test_the_asynchronous_twin_travels_too(pulque_aio_client: aio.Client) -> None:
    client = pulque_aio_client
    for number in range(5):
        await client.send("orders", b"%d" % number, priority=number % 2 * 9)
    async with client.consumer("orders", "billing") as consumer:
        await take_async(consumer, 5)
        await consumer.settle()

        rows = await client.reset("orders", "billing", "earliest")

        assert sum(row.reread for row in rows) == 5
        assert sorted(bodies(await take_async(consumer, 5))) == [b"0", b"1", b"2", b"3", b"4"]
        await consumer.settle()
        states = await client.groups("orders")
        assert {(state.group, state.lag) for state in states} == {("billing", 0)}


@pytest.mark.accepts("003-27")
def test_a_consumer_that_waits_notices_at_once(pulque_client: pulque.Client) -> None:
    pulque_client.send("orders", b"0")
    with pulque_client.consumer("orders", "billing") as consumer:
        take(consumer, 1)
        consumer.settle()
        got: list[bytes] = []
        waiter = threading.Thread(target=lambda: got.extend(bodies(consumer.pull(timeout=60))))
        waiter.start()
        deadline = time.monotonic() + 30
        while not pulque_client.status()["pulls_waiting"]:
            assert time.monotonic() < deadline, "the consumer never waited"
        pulque_client.reset("orders", "billing", "earliest")
        waiter.join(30)

    assert got == [b"0"]


def test_a_busy_consumer_abandons_what_it_holds(pulque_client: pulque.Client) -> None:
    for number in range(6):
        pulque_client.send("orders", b"%d" % number)
    with pulque_client.consumer("orders", "billing") as consumer:
        held = consumer.pull(4, timeout=20)
        (row,) = pulque_client.reset("orders", "billing", "latest")
        assert row.held == 4
        consumer.ack_all(held)
        pulque_client.send("orders", b"new")

        assert bodies(take(consumer, 1)) == [b"new"]
        assert consumer.abandoned == 4
        assert all(message.is_abandoned for message in held)
        assert consumer.held <= 1
    (state,) = pulque_client.groups("orders", group="billing")
    assert (state.next_sequence, state.lag) == (7, 0)


def test_one_consumer_of_a_broadcast_can_be_set_back(pulque_client: pulque.Client) -> None:
    pulque_client.send("prices", b"1")
    with (
        pulque_client.consumer("prices", consumer_id="a") as a,
        pulque_client.consumer("prices", consumer_id="b") as b,
    ):
        for consumer in (a, b):
            assert bodies(take(consumer, 1)) == [b"1"]
            consumer.settle()
        pulque_client.reset("prices", "#a", "earliest")

        assert bodies(take(a, 1)) == [b"1"]
        check_nothing_comes(pulque_client, b)


def test_groups_tell_who_holds_what(pulque_client: pulque.Client) -> None:
    for number in range(5):
        pulque_client.send("order.paid", b"%d" % number)
    with pulque_client.consumer("order.*", "billing", consumer_id="me") as consumer:
        consumer.pull(3, timeout=20)

        (state,) = pulque_client.groups("order.*", group="billing")

        assert (state.partition, state.group, state.mode) == ("order.paid", "billing", "shared")
        assert (state.next_sequence, state.end, state.lag, state.held) == (3, 5, 5, 3)
        ((name, held, silent),) = state.consumers
        assert (name, held) == ("me", 3)
        assert silent is not None
        assert silent >= 0


@pytest.mark.parametrize(
    "to",
    ["Earliest", "", -1, 2**63, True, None, 1.5, datetime(2026, 1, 1), EPOCH - timedelta(1)],  # noqa: DTZ001
)
def test_a_place_that_there_is_not_is_refused(pulque_client: pulque.Client, to: object) -> None:
    pulque_client.send("orders", b"0")

    with pytest.raises(UsageError, match=r"^to is|time zone"):
        pulque_client.reset("orders", "billing", to)  # type: ignore[arg-type]


def test_unknown_groups_and_subjects_are_refused(pulque_client: pulque.Client) -> None:
    pulque_client.send("orders", b"0")

    with pytest.raises(UnknownGroupError, match="group billing never consumed orders"):
        pulque_client.reset("orders", "billing", "earliest")
    with pytest.raises(UnknownSubjectError, match="order"):
        pulque_client.reset("order", "billing", "earliest")
    assert pulque_client.groups("order") == []


@pytest.mark.accepts("003-27")
def test_a_reset_survives_kill_9_right_after_its_answer(broker_process: BrokerProcess) -> None:
    with pulque.connect(broker_process.url) as client:
        for number in range(10):
            client.send("orders", b"%d" % number)
        with client.consumer("orders", "billing") as consumer:
            take(consumer, 10)
            consumer.settle()
            client.reset("orders", "billing", 3)
            broker_process.kill()
            broker_process.restart()

            assert bodies(take(consumer, 7)) == [b"%d" % number for number in range(3, 10)]
            consumer.settle()
        (state,) = client.groups("orders", group="billing")
        assert (state.next_sequence, state.lag) == (10, 0)


# -- the command line ---------------------------------------------------------------------------


@pytest.fixture
def consumed(pulque_client: pulque.Client, pulque_broker: InProcessBroker) -> Iterable[None]:
    """A group that has handled ten messages, a second apart."""
    send_spaced(pulque_client, pulque_broker, 10)
    with pulque_client.consumer("orders", "billing", consumer_id="me") as consumer:
        take(consumer, 10)
        consumer.settle()
        yield


@pytest.mark.usefixtures("consumed")
@pytest.mark.parametrize(("to", "target"), [("earliest", 0), ("latest", 10), ("4", 4), ("52w", 0)])
def test_the_command_resets_a_group(
    capsys: pytest.CaptureFixture[str], to: str, target: int
) -> None:
    reset = ("group", "reset", "orders", "--group", "billing", "--to", to)

    assert command(*reset) == ExitCode.OK
    lines = lines_of(capsys)
    assert lines[0].split()[:3] == ["partition", "now", "target"]
    assert lines[1].split()[:3] == ["orders", "10", str(target)]
    assert command(*reset, "--yes") == ExitCode.OK
    lines = lines_of(capsys)
    assert lines[0].split()[:3] == ["partition", "was", "target"]
    assert lines[1].split()[:3] == ["orders", "10", str(target)]
    assert command(*reset, "--dry-run", "-o", "json") == ExitCode.OK
    (row,) = [json.loads(line) for line in lines_of(capsys)]
    assert row["target"] == target


@pytest.mark.usefixtures("consumed")
def test_the_command_takes_an_instant_with_its_zone(
    capsys: pytest.CaptureFixture[str], pulque_client: pulque.Client
) -> None:
    stored = pulque_client.read("orders", 7, max_messages=1)[0].stored_at_ms
    text = moment(stored).isoformat(timespec="milliseconds")
    reset = ("group", "reset", "orders", "--group", "billing", "--to")

    assert command(*reset, text) == ExitCode.OK
    assert lines_of(capsys)[1].split() == ["orders", "10", "7", "3", "0", "0"]
    assert command(*reset, text.removesuffix("+00:00")) == ExitCode.USAGE
    assert "which time zone?" in capsys.readouterr().err
    assert command(*reset, "2026-11-16") == ExitCode.USAGE
    assert "Write 2026-11-16T00:00Z for UTC" in capsys.readouterr().err
    assert command(*reset, "2026-11-16T00:00Z", "--dry-run") == ExitCode.OK


@pytest.mark.parametrize("to", ["yesterday", "12:00", "-5", "1e3", "2h-", "２"])  # noqa: RUF001
def test_the_command_refuses_what_is_no_place(
    capsys: pytest.CaptureFixture[str], to: str, pulque_url: str
) -> None:
    del pulque_url
    ended = command("group", "reset", "orders", "--group", "billing", f"--to={to}")

    assert ended == ExitCode.USAGE
    assert "earliest, latest, a sequence" in capsys.readouterr().err


@pytest.mark.usefixtures("consumed")
def test_the_commands_show_groups(
    capsys: pytest.CaptureFixture[str], pulque_client: pulque.Client
) -> None:
    pulque_client.send("orders", b"10")

    assert command("group", "list", "orders") == ExitCode.OK
    header, row = lines_of(capsys)
    assert header.split() == ["group", "mode", "partitions", "lag", "held", "consumers"]
    assert row.split()[:2] == ["billing", "shared"]
    assert command("group", "show", "billing", "-o", "json") == ExitCode.OK
    states = [json.loads(line) for line in lines_of(capsys)]
    assert [state["partition"] for state in states] == ["orders"]
    assert states[0]["consumers"][0]["consumer"] == "me"
    assert command("group", "show", "billing") == ExitCode.OK
    assert any("s ago" in line for line in lines_of(capsys))


@pytest.mark.usefixtures("pulque_url")
def test_the_commands_say_when_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("group", "list") == ExitCode.NOTHING
    assert command("group", "show", "nobody") == ExitCode.FAILED
    assert "UnknownGroupError: group nobody never consumed" in capsys.readouterr().err
    ended = command("group", "reset", "orders", "--group", "g", "--to", "latest")
    assert ended == ExitCode.FAILED
    assert "UnknownSubjectError: no message was ever sent to orders" in capsys.readouterr().err

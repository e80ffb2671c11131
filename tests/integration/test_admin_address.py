"""``--url`` is enough: every command of the administration API finds it by way of any server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import pulque
from pulque.cli.app import app, run
from pulque.cli.common.options import Tools
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import BrokerProcess, UpProcess

pytestmark = pytest.mark.server

LIMIT = 30.0
TOOLS = Tools(connect=pulque.connect)
COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "broker list": ([], 0, "ready"),
    "broker show": (["{broker}"], 0, "incarnation"),
    "broker read-only": (["{broker}", "--off"], 0, "{broker} takes sends"),
    "broker drain": (["{broker}", "--off"], 0, "{broker} takes sends"),
    "broker lead": (["{broker}"], 1, "error: InvalidRequestError: broker group {broker} has no"),
    "broker remove": (["{broker}"], 1, "error: NotAllowedError: "),
    "client list": ([], 0, "application-of-a-test"),
    "cluster show": ([], 0, "brokers.ready"),
    "cluster export": ([], 0, '"subject": "orders"'),
    "cluster import": (["{definitions}"], 0, "would be created: made"),
    "config set": ([], 0, "first-send"),
    "config show": (["--server", "cluster"], 0, "first-send"),
    "dead count": ([], 4, "there are no dead letters"),
    "group lag": (["billing"], 0, "orders"),
    "group ordered": (["orders"], 4, "no group consumes orders in order"),
    "group skip": (
        ["orders", "--group", "g", "--broker-group", "none", "--sequence", "0"],
        1,
        "error: UnknownServerError: there is no broker group",
    ),
    "subject list": ([], 0, "orders"),
    "subject show": (["orders"], 0, "orders takes sends"),
    "subject create": (["orders"], 0, "orders has "),
    "subject extend": (["orders", "--partitions", "1024"], 0, "orders has 1024 partitions"),
    "subject merge": (["orders", "--partitions", "1"], 0, "orders has 1 partitions"),
    "subject order": (["orders", "best-effort"], 0, "orders keeps order: best-effort"),
    "subject read-only": (["orders", "--off"], 0, "orders takes sends again"),
}


def with_admin(command: Any, path: str = "") -> Iterator[str]:
    """Yield the commands below one that take ``--admin``."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from with_admin(inner, f"{path} {name}".strip())
    if any(each.name == "admin" for each in command.params):
        yield path


def test_every_command_of_the_api_is_tried() -> None:
    assert sorted(with_admin(typer.main.get_command(app))) == sorted(COMMANDS)


def urls_of(server: str, folder: Path) -> Iterator[str]:
    """Yield where commands are to be pointed at."""
    if server == "up":
        with UpProcess.start(folder / "up") as up:
            yield up.url
        return
    with ClusterProcesses.start(folder / "cluster", brokers=1) as cluster:
        yield cluster.url if server == "meta" else cluster.broker_url


@pytest.fixture(scope="module", params=["meta", "broker", "up"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    for found in urls_of(request.param, folder):
        with pulque.connect(found, timeout=LIMIT, name="application-of-a-test") as client:
            client.send("orders", b"tea")
            with client.consumer("orders", "billing", consumer_id="c") as consumer:
                assert consumer.pull(timeout=LIMIT)
                yield found


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a command that finds nothing in the environment; returns its code and all it said."""
    for name in ("PULQUE_ADMIN", "PULQUE_URL"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str]:
        code = run(arguments, TOOLS)
        return code, "".join(capsys.readouterr())

    return call


def test_a_url_is_enough(
    url: str, command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    definitions = tmp_path / "definitions.json"
    definitions.write_text('{"subjects": [{"subject": "made"}]}')
    with pulque.connect(url) as client:
        broker = next(iter(client.statuses()))
    names = {"broker": broker, "definitions": str(definitions)}

    for name, (arguments, code, said) in COMMANDS.items():
        told = [each.format(**names) for each in arguments]
        got, text = command(*name.split(), *told, "--url", url)
        assert (got, said.format(**names) in text) == (code, True), (name, text)


def test_the_environment_is_enough(
    url: str, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULQUE_URL", url)

    assert command("subject", "list")[0] == 0


def test_an_address_that_is_given_counts_more(
    url: str, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "http://127.0.0.1:1"
    assert command("subject", "list", "--url", url, "--admin", away)[0] == 3

    monkeypatch.setenv("PULQUE_ADMIN", away)
    # A flag counts more than a variable …
    assert command("subject", "list", "--url", url)[0] == 0
    # … and of two variables, the one that is only about the API.
    monkeypatch.setenv("PULQUE_URL", url)
    code, said = command("subject", "list")
    assert (code, away in said) == (3, True)


def test_a_lone_broker_says_what_is_missing(
    command: Callable[..., tuple[int, str]], start_broker: Callable[..., BrokerProcess]
) -> None:
    lone = start_broker()

    code, said = command("subject", "list", "--url", lone.url)

    address = lone.url.removeprefix("pulque://")
    assert (code, said.count("\n")) == (3, 1)
    assert said.startswith("error: UnavailableError: no administration API is known: the broker ")
    assert f"at {address} (" in said
    assert ") stands alone" in said
    assert "`pulque meta`" in said


def test_meta_servers_that_are_away_are_named(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    with ClusterProcesses.start(tmp_path, brokers=1) as cluster:
        (meta,) = cluster.metas.values()
        meta.kill()

        code, said = command("cluster", "show", "--url", cluster.broker_url)

    assert code == 3
    assert f"names meta servers at {meta.url.removeprefix('pulque://')}" in said


def test_a_meta_server_without_the_api_is_named(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    settings = {"admin": {"enabled": False}}
    with ClusterProcesses.start(tmp_path, brokers=0, meta_settings=settings) as cluster:
        code, said = command("cluster", "show", "--url", cluster.url)
        assert (code, "has no API (admin.enabled is false)" in said) == (3, True)

        cluster.add_meta("meta-2")
        assert command("cluster", "show", "--url", cluster.url)[0] == 0


def test_without_anything_the_usual_places_are_asked(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulque.client.connection.url.DEFAULT_URL", "pulque://127.0.0.1:1")
    monkeypatch.setattr("pulque.cli.common.admin_client.DEFAULT_ADMIN", "http://127.0.0.1:2")

    code, said = command("cluster", "show")

    assert code == 3
    assert "http://127.0.0.1:2" in said
    assert all(each in said for each in ("127.0.0.1:7450", "PULQUE_URL", "PULQUE_ADMIN"))

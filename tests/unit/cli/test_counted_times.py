"""Instants on the command line may be counted from now, in every command alike."""

from datetime import UTC, datetime, timedelta

import pytest

import pulque
from pulque.cli.app import run
from pulque.cli.common.options import Tools
from pulque.cli.pipeline.options import parse_instant
from pulque.errors import UsageError

TOOLS = Tools(connect=pulque.connect)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--since", "2h"], 0),
        (["--since", "2h", "--until", "1h"], 4),
        (["--since", "2000-01-01T00:00:00Z"], 0),
        (["--since", "yesterday"], 2),
    ],
    ids=str,
)
def test_messages_are_found_by_how_long_ago_they_were_stored(
    pulque_client: pulque.Client, pulque_url: str, options: list[str], code: int
) -> None:
    pulque_client.send("orders", b"tea", key="k")

    assert run(["message", "find", "orders", *options, "--url", pulque_url], TOOLS) == code


def test_delayed_messages_are_sent_and_listed_by_how_far_ahead_they_are(
    pulque_client: pulque.Client, pulque_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["send", "orders", "tea", "--at", "2h", "--url", pulque_url], TOOLS) == 0
    (found,) = pulque_client.delayed().next()
    assert abs(found.due_at - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)

    capsys.readouterr()
    assert run(["delay", "list", "--until", "1h", "--url", pulque_url], TOOLS) in {0, 4}
    assert found.id not in capsys.readouterr().out
    assert run(["delay", "list", "--until", "3h", "--url", pulque_url], TOOLS) == 0
    assert found.id in capsys.readouterr().out


def test_the_history_is_asked_by_how_long_ago() -> None:
    found = parse_instant("2h", "--since")
    assert found is not None
    assert abs(datetime.now(UTC) - timedelta(hours=2) - found) < timedelta(minutes=1)
    with pytest.raises(UsageError, match="2h for 2 hours ago"):
        parse_instant("yesterday", "--since")

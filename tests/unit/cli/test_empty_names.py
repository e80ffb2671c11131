"""An empty name, which a shell makes of a variable that is not set, does not mean all."""

import pytest

import pulque
from pulque.cli.app import run
from pulque.cli.common.options import Tools

TOOLS = Tools(connect=pulque.connect)


@pytest.mark.parametrize(
    "command",
    [
        ["group", "list", ""],
        ["group", "show", "kitchen", "--subject="],
        [
            "group",
            "reset",
            "orders",
            "--group",
            "kitchen",
            "--to",
            "latest",
            "--partition=",
            "--yes",
        ],
        ["delay", "list", ""],
    ],
    ids=" ".join,
)
def test_an_empty_name_is_refused(
    pulque_client: pulque.Client,
    pulque_url: str,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    pulque_client.send("orders", b"tea")
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        consumer.pull(timeout=5)

        assert run([*command, "--url", pulque_url], TOOLS) == 2
        assert "is empty" in capsys.readouterr().err
        (state,) = pulque_client.groups("orders", group="kitchen")
        assert state.lag == 1

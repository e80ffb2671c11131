"""The reference pages say what the code says."""

import re

import pytest

from pulque.broker.config import BrokerSettings
from pulque.cli.common.exit_codes import ExitCode
from pulque.delay.config import DelaySettings
from pulque.meta.config import MetaSettings
from pulque.settings.schema import settings_of
from tools.reference import pages

COMMANDS, SETTINGS, OPENAPI, WIRE = pages().items()


@pytest.mark.parametrize(
    "page", [COMMANDS, SETTINGS, OPENAPI, WIRE], ids=lambda page: page[0].name
)
def test_the_committed_page_is_up_to_date(page: tuple[object, str]) -> None:
    path, text = page

    assert path.read_text(encoding="utf-8") == text, "run: python -m tools.reference"  # type: ignore[attr-defined]


def test_every_setting_has_a_row() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", SETTINGS[1], re.MULTILINE)

    servers = (BrokerSettings, MetaSettings, DelaySettings)
    assert rows == [key for each in servers for key in settings_of(each)]


def test_every_command_and_exit_code_is_there() -> None:
    headings = re.findall(r"^## (pulque.*)$", COMMANDS[1], re.MULTILINE)

    assert {
        "pulque up",
        "pulque broker",
        "pulque broker seal",
        "pulque meta",
        "pulque delay",
        "pulque send",
        "pulque pull",
        "pulque tail",
        "pulque run",
        "pulque status",
        "pulque log dump",
        "pulque log verify",
        "pulque bench send",
        "pulque bench pull",
        "pulque bench e2e",
        "pulque config show",
        "pulque config check",
        "pulque version",
    } <= set(headings)
    assert all(f"| {code.value} | " in COMMANDS[1] for code in ExitCode)

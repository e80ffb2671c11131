"""``pulque run`` finds the application that is meant, or says what it found instead."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.cli.app import run
from pulque.cli.common.options import Tools
from pulque.cli.run import find_application
from pulque.errors import ConfigError, PulqueError, UsageError

SHOP = """
import pulque

app = pulque.App()
named = pulque.App(name="shop")
empty = pulque.App()
thing = {}


class Inner:
    app = named


@app.subscribe("orders", group="g")
@named.subscribe("orders", group="g")
def handle(message): ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shop_app.py").write_text(SHOP)
    (tmp_path / "broken_app.py").write_text("1 / 0")
    (tmp_path / "needy_app.py").write_text("import not_there_at_all")
    (tmp_path / "plain_app.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("shop_app", "broken_app", "needy_app", "plain_app"):
        sys.modules.pop(name, None)


def test_an_application_is_found_in_this_folder_and_gets_a_name() -> None:
    assert find_application("shop_app:app").name == "shop_app"
    assert find_application("shop_app:named").name == "shop"
    assert find_application("shop_app:Inner.app").name == "shop"


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("shop_app", UsageError, "'shop_app' is not MODULE:APP; shop.handlers:app would be"),
        ("shop_app:", UsageError, "is not MODULE:APP"),
        (":app", UsageError, "is not MODULE:APP"),
        ("shop_app.py:app", UsageError, "there is no module shop_app.py"),
        ("./shop_app.py:app", UsageError, "is not MODULE:APP"),
        ("nowhere_app:app", UsageError, "there is no module nowhere_app; looked in"),
        ("nowhere_app.within:app", UsageError, "there is no module nowhere_app; looked in"),
        ("shop_app:apps", UsageError, "shop_app has no 'apps'; its applications: app, named, em"),
        ("plain_app:app", UsageError, "plain_app has no 'app'; it has no application"),
        ("shop_app:thing", UsageError, "shop_app:thing is a dict, no pulque.App"),
        ("shop_app:empty", UsageError, "shop_app:empty has no handlers"),
        ("needy_app:app", ConfigError, "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("broken_app:app", ConfigError, "broken_app cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_is_no_application_is_named(path: str, kind: type[PulqueError], text: str) -> None:
    with pytest.raises(kind) as raised:
        find_application(path)
    assert text in str(raised.value)


def test_the_command_ends_with_2_and_shows_where_an_import_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["run", "broken_app:app"], Tools(connect=lambda: None)) == 2

    told = capsys.readouterr().err
    assert 'broken_app.py", line 1' in told
    assert told.splitlines()[-1].startswith("error: ConfigError: broken_app cannot be imported")


def test_a_wrong_url_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "shop_app:app", "--url", "http://x"], Tools(connect=lambda: None)) == 2
    assert "error: ConfigError: url is 'http://x'" in capsys.readouterr().err

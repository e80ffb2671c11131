"""The plugin as users meet it: in a pytest of its own."""

import importlib
import re
import tomllib

import pytest

from tests.repo.tree import DOCS, ROOT

_FILE = re.compile(r"<!-- run: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
_PLUGIN = ("-p", "pulque.testing.plugin")


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("page", "tests"), [("testing", 8), ("asyncio", 8)], ids=["testing", "asyncio"]
)
def test_the_examples_of_the_guide_run(pytester: pytest.Pytester, page: str, tests: int) -> None:
    text = (DOCS / "guide" / f"{page}.md").read_text(encoding="utf-8")
    for name, program in _FILE.findall(text):
        (pytester.path / name).write_text(program, encoding="utf-8")

    scope = "asyncio_default_fixture_loop_scope=function"
    result = pytester.runpytest_subprocess(
        "-p", "pytest_asyncio.plugin", *_PLUGIN, "--asyncio-mode=auto", "-o", scope, "-W", "error"
    )

    result.assert_outcomes(passed=tests)


def test_all_code_of_the_asyncio_page_is_run() -> None:
    text = (DOCS / "guide" / "asyncio.md").read_text(encoding="utf-8")

    assert len(_FILE.findall(text)) == text.count("```python") == 6


def test_the_program_under_test_finds_the_broker_by_itself(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import os
        import pulque

        def test_it(pulque_broker):
            with pulque.connect() as client:
                client.send("orders", b"tea")
                with client.consumer("orders", group="kitchen") as consumer:
                    (message,) = consumer.pull(timeout=10)
                    message.ack()
            assert os.environ["PULQUE_URL"] == pulque_broker.url
            assert os.listdir(os.environ["PULQUE_STATE_DIR"])

        def test_it_is_gone_afterwards():
            assert "PULQUE_URL" not in os.environ
    """)

    result = pytester.runpytest_subprocess(*_PLUGIN)

    result.assert_outcomes(passed=2)


def test_tests_do_not_see_each_others_messages(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("turn", [1, 2])
        def test_it(pulque_client, turn):
            assert pulque_client.read("orders") == []
            pulque_client.send("orders", b"tea")
    """)

    result = pytester.runpytest_subprocess(*_PLUGIN)

    result.assert_outcomes(passed=2)


def test_nothing_of_the_broker_is_imported_before_a_fixture_is_used(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import sys

        def test_it():
            heavy = {"pydantic", "structlog", "pulque.broker", "pulque.storage"}
            assert not heavy & set(sys.modules)
    """)

    result = pytester.runpytest_subprocess(*_PLUGIN)

    result.assert_outcomes(passed=1)


def test_the_package_says_where_its_plugin_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plugins = project["entry-points"]["pytest11"]

    # pytest refuses a module that comes under two names, from here and from a conftest.
    assert all(name == module for name, module in plugins.items())
    for module in plugins.values():
        assert hasattr(importlib.import_module(module), "pulque_broker")

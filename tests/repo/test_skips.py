"""A test that skips itself fails the run, unless its reason is on the list."""

import pytest

from tests.repo.tree import ROOT

SAMPLE = """
import pytest

def test_that_passes(): pass

def test_for_root(): pytest.skip("only root can mount a small disk")

def test_of_a_program(): pytest.skip("strace is not installed")

@pytest.mark.skipif(True, reason="PostgreSQL is not installed")
def test_of_a_database(): pass

@pytest.fixture
def network(): pytest.skip("the command ip is not installed")

def test_of_a_network(network): pass

@pytest.mark.xfail(reason="known")
def test_known_to_fail(): assert False
"""
MODULE = """
import pytest
pytest.importorskip("nothing_of_that_name")

def test_of_a_module(): pass
"""


def run_pytest(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """Run a module under the plugin in a process of its own."""
    pytester.makeini(f"[pytest]\npythonpath = {ROOT}\n")
    pytester.makeconftest('pytest_plugins = ["tests.skips"]')
    pytester.makepyfile(test_sample=source)
    return pytester.runpytest_subprocess(*options)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_only_listed_reasons_pass(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run_pytest(pytester, SAMPLE, *options)

    result.assert_outcomes(passed=1, skipped=1, failed=1, errors=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*was skipped: PostgreSQL is not installed. Only the reasons in tests/skips.py*",
            "1 skipped, as tests/skips.py allows: only root can mount a small disk",
        ]
    )
    for program in ("the command ip", "strace"):
        result.stdout.fnmatch_lines([f"*was skipped: {program} is not installed.*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_module_that_skips_itself_fails(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run_pytest(pytester, MODULE, *options)

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_sample.py was skipped: *nothing_of_that_name*"])


def test_the_suite_has_the_plugin(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.has_plugin("tests.skips")

"""What every test has: a seed that can be repeated, hypothesis profiles, the acceptance marks."""

import os
import re
import secrets
import signal

import hypothesis
import pytest

pytest_plugins = ["tests.acceptance_plugin", "pulque.testing.plugin", "pytester"]

_SEED = "PULQUE_TEST_SEED"
_PROFILE = "PULQUE_HYPOTHESIS_PROFILE"

# No deadline: on a busy machine of two cores it finds the neighbours, not bugs.
hypothesis.settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", max_examples=150, deadline=None, print_blob=True)
hypothesis.settings.register_profile("night", max_examples=10_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get(_PROFILE, "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in its background like that; what tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Through the environment, so that the workers of xdist inherit what their controller drew.
    drawn = config.option.hypothesis_seed or str(secrets.randbelow(2**32))
    config.option.hypothesis_seed = os.environ.setdefault(_SEED, drawn)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PlainNames())


class _PlainNames:
    """Takes the group that xdist adds (``test_a@spark``) off again: `--last-failed` knows none."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = re.sub(r"@\w+$", "", report.nodeid)


def pytest_report_header() -> str:
    profile = os.environ.get(_PROFILE, "dev")
    return (
        f"random tests: {_SEED}={os.environ[_SEED]} repeats this run; hypothesis profile {profile}"
    )


@pytest.fixture
def seed() -> int:
    """The seed of every random test in this run; printed, so that a failure shows it."""
    value = int(os.environ[_SEED])
    print(f"{_SEED}={value}")
    return value

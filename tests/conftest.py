"""What every test has: a seed that can be repeated, hypothesis profiles, the acceptance marks."""

import os
import secrets
import signal

import hypothesis
import pytest

pytest_plugins = [
    "tests.acceptance_plugin",
    "tests.skips",
    "pulque.testing.plugin",
    "pytester",
]

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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is random, for `make explore`."""
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if is_property or "seed" in getattr(item, "fixturenames", ()):
        item.add_marker("random")


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

"""Brokers that are attacked: real processes on loopback, on any free port."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import StartBroker, starter


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Start brokers with settings of their own; all of them end with the test."""
    yield from starter(tmp_path)


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    """A broker with the usual settings."""
    return start_broker()

"""A fake broker, and clients of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from tests.unit.client.fake_broker import FakeBroker


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client:
        yield client

"""Real processes on loopback; each test has its own, on any free port."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess, UpProcess
from tests.integration.postgres import Postgres


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """Start brokers with options of their own; all of them end with the test."""
    started: list[BrokerProcess] = []

    def start(name: str = "data", **options: object) -> BrokerProcess:
        process = BrokerProcess.start(tmp_path / name, **options)  # type: ignore[arg-type]
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


@pytest.fixture
def broker_process(
    start_broker: Callable[..., BrokerProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> BrokerProcess:
    """A broker that serves; PULQUE_URL and the clients' state folder are set for this test."""
    process = start_broker()
    monkeypatch.setenv("PULQUE_URL", process.url)
    monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path / "state"))
    return process


@pytest.fixture
def up_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UpProcess]:
    """All that ``pulque up`` starts; PULQUE_URL and the clients' state folder are set."""
    with UpProcess.start(tmp_path / "up") as process:
        monkeypatch.setenv("PULQUE_URL", process.url)
        monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path / "state"))
        yield process


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL for this run."""
    server = Postgres()
    yield server
    server.close()

"""Databases for the checker, and messages to check."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import Engine, create_engine

from pulque.model.batch import seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence

_ORDERS = PartitionName("orders")


@pytest.fixture
def new_message() -> Callable[[], Message]:
    numbers = count()

    def make() -> Message:
        packer = BatchPacker()
        packer.add(b"tea")
        ids = next(numbers).to_bytes(16, "big")
        data = packer.encode(seed=seed_of(_ORDERS), ids=ids, created_at_ms=0)
        batch = StoredBatch(
            data, partition=_ORDERS, first_sequence=ConsumeSequence(0), stored_at_ms=0
        )
        return Message(batch, 0)

    return make


@pytest.fixture
def message(new_message: Callable[[], Message]) -> Message:
    return new_message()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL of our own, reached by a socket file only."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("PostgreSQL (initdb, postgres) is not installed")
    folder = Path(tempfile.mkdtemp(prefix="pulque-pg-"))
    user = _unprivileged(folder)
    data = folder / "data"
    try:
        options = ["--auth=trust", "--username=pulque", "--no-sync"]
        subprocess.run(
            ["initdb", "-D", str(data), *options], check=True, capture_output=True, user=user
        )
        server = subprocess.Popen(
            ["postgres", "-D", str(data), "-k", str(folder), "-F", "-c", "listen_addresses="],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user,
        )
        try:
            url = f"postgresql+psycopg://pulque@/postgres?host={folder}"
            _wait_for(url)
            yield url
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _unprivileged(folder: Path) -> str | None:
    """Return whom to run as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    try:
        shutil.chown(folder, "postgres")
    except LookupError:
        pytest.skip("this is root, and there is no user postgres to run PostgreSQL as")
    return "postgres"


def _wait_for(url: str, limit_s: float = 30.0) -> None:
    engine = create_engine(url)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with engine.connect():
                break
        except sqlalchemy.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    engine.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty database."""
    if request.param == "sqlite":
        made = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 30})
    else:
        made = create_engine(request.getfixturevalue("postgresql"))
        with made.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
    yield made
    made.dispose()

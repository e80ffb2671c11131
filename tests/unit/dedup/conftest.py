"""Databases for the checker, and messages to check."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url

from pulque.model.batch import seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from tests.integration.postgres import Postgres

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
def postgresql() -> Iterator[Postgres]:
    """A PostgreSQL for this run."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty database."""
    if request.param == "sqlite":
        made = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 30})
    else:
        server: Postgres = request.getfixturevalue("postgresql")
        url = make_url(server.new_database())
        made = create_engine(url.set(drivername="postgresql+psycopg", password=server.password))
    yield made
    made.dispose()

"""One Spark session for all tests of a run, and a broker for each of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from pulque.pipeline.session import spark_session
from pulque.testing.broker import InProcessBroker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            # One worker of xdist has the session: a second one takes longer than all tests.
            item.add_marker(pytest.mark.xdist_group("spark"))
            # Spark's own Python leaves sockets and files to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session(
        "local[2]",
        name="tests",
        settings={
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            # Tests are over before the better compiler pays: half the time goes into it.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
    )
    yield session
    session.stop()


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as found:
        yield found

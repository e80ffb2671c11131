"""A session of Spark Connect, whose client has no JVM, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

WORK = """
import sys
from pyspark.sql.utils import is_remote
from pulque.pipeline.archive.message_archiver import Archived, Archiver, run_on_spark
from pulque.pipeline.session import spark_session

url, data, lake = sys.argv[1:]
spark = spark_session()
assert is_remote()
assert spark_session() is spark
assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
read = spark.read.format("pulque").options(url=url, subscribe="orders").load()
assert sorted(int(row.body) for row in read.collect()) == list(range(50))
for each in Archiver(lake, data, "tested", lambda: run_on_spark(spark)).run():
    assert isinstance(each, Archived), each
"""


@pytest.mark.timeout(600)
def test_a_session_of_spark_connect_reads_and_archives(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    from pulque.pipeline.query import Question, ask

    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker:
        with pulque.connect(broker.url) as client:
            client.send_many("orders", [b"%d" % number for number in range(50)])
            client.seal()
        # The port of the server is drawn under SPARK_TESTING.
        environment = {**os.environ, "SPARK_REMOTE": "local[1]", "SPARK_TESTING": "1"}
        done = subprocess.run(
            [sys.executable, "-c", WORK, broker.url, str(data), str(lake)],
            check=False,
            capture_output=True,
            text=True,
            timeout=500,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
    assert len(ask(str(lake), Question(subject="orders"))) == 50

"""The same read on a standalone cluster: a master and two workers, each a process."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pulque
from pulque.testing.process import BrokerProcess

pyspark = pytest.importorskip("pyspark")

pytestmark = [pytest.mark.long, pytest.mark.server]

_JOB = """
import sys
from pulque.pipeline.session import spark_session
spark = spark_session(sys.argv[1], settings={
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m", "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "1"})
frame = spark.read.format("pulque").options(
    url=sys.argv[2], subscribe="order.*", minPartitions="4").load()
total = frame.selectExpr("count(message_id) c", "sum(length(body)) s").first()
# The driver is one of them.
executors = len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1
print("FOUND", total.c, total.s, executors)
spark.stop()
"""


@contextmanager
def process(folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    """Run one of Spark's own classes; yield where its log is."""
    home = Path(pyspark.__file__).parent
    log = folder / f"{name}.log"
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(Path(pulque.__file__).parents[1])]),
        "SPARK_WORKER_DIR": str(folder / f"{name}.work"),
    }
    with log.open("wb") as output:
        running = subprocess.Popen(
            [str(home / "bin" / "spark-class"), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield log
    finally:
        running.terminate()
        running.wait(30)


def wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found is not None:
            return found.group(0)
        time.sleep(0.2)
    raise AssertionError(f"no {pattern} in:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.timeout(300)
def test_a_cluster_reads_all_messages_on_all_its_workers(tmp_path: Path) -> None:
    deploy = "org.apache.spark.deploy"
    listen = ("--host", "127.0.0.1", "--webui-port", "0")
    with (
        BrokerProcess.start(tmp_path / "data") as broker,
        process(tmp_path, "master", f"{deploy}.master.Master", *listen, "--port", "0") as log,
    ):
        with pulque.connect(broker.url) as client:
            for subject in ("order.paid", "order.sent"):
                client.send_many(subject, [b"x" * 10] * 2000)
        url = wait_for(log, r"spark://127\.0\.0\.1:\d+")
        worker = (f"{deploy}.worker.Worker", *listen, "--cores", "1", "--memory", "600m", url)
        with (
            process(tmp_path, "one", *worker) as first,
            process(tmp_path, "two", *worker) as second,
        ):
            for each in (first, second):
                wait_for(each, "Successfully registered with master")
            done = subprocess.run(
                [sys.executable, "-c", _JOB, url, broker.url],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
    assert "FOUND 4000 40000 2" in done.stdout, done.stdout + done.stderr[-3000:]

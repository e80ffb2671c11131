"""The commands of the pipeline: what they need, how they go on, and how they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pulque
from pulque.cli.app import run
from pulque.cli.common.options import Tools
from pulque.testing.broker import InProcessBroker

FOLLOW = """
import sys
from pulque.cli.pipeline import archive as pipeline_archive
from pulque.cli.app import run_process
from pulque.pipeline.archive.message_archiver import run_here

pipeline_archive._runner = lambda _: lambda: run_here  # the same work, without Spark
sys.exit(run_process(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["archive", "--lake", "lake", "--data", "."], "pyarrow"),
        (["query", "--lake", "lake"], "pyarrow"),
        (["compact", "--lake", "."], "deltalake"),
        (["expire", "--lake", ".", "--older-than", "7d"], "pyarrow"),
        (["report", "--lake", "lake", "--html", "report.html"], "jinja2"),
        (["report", "--lake", "lake", "--html", "report.html"], "matplotlib"),
    ],
)
def test_what_is_not_installed_is_told(arguments: list[str], missing: str) -> None:
    script = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "from pulque.cli.app import run_process\n"
        "sys.exit(run_process(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "pipeline", *arguments],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert b"pip install 'pulque[pipeline]'" in done.stderr


def test_following_goes_on_until_it_is_told_to_stop(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        client.send("orders", b"first")
        client.seal()
        arguments = ["pipeline", "archive", "--lake", str(lake), "--data", str(data)]
        options = ["--follow", "--interval", "0.1", "-o", "json"]
        follower = subprocess.Popen(
            [sys.executable, "-c", FOLLOW, *arguments, *options],
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        try:
            assert follower.stdout is not None
            first = json.loads(follower.stdout.readline())
            assert (first["state"], first["base"], first["messages"]) == ("archived", 0, 1)
            follower.send_signal(signal.SIGHUP)  # which no long-running command ends at
            client.send("orders", b"second")
            client.seal()
            second = json.loads(follower.stdout.readline())
            assert (second["state"], second["messages"]) == ("archived", 1)
            follower.send_signal(signal.SIGTERM)
            assert follower.wait(60) == 0
        finally:
            follower.kill()
            follower.wait(60)
            if follower.stdout is not None:
                follower.stdout.close()
    assert (data / "archived").exists()


def test_a_directory_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deltalake")
    arguments = ["--lake", str(tmp_path / "lake"), "--data", str(tmp_path / "none")]
    assert run(["pipeline", "archive", *arguments], Tools(connect=pulque.connect)) == 2
    assert "--broker" in capsys.readouterr().err
    arguments += ["--broker", "west"]
    assert run(["pipeline", "archive", *arguments], Tools(connect=pulque.connect)) == 1
    assert "neither a data directory" in capsys.readouterr().err

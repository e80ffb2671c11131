"""Commands over the client and the administration API say the same of the same things."""

import json
from datetime import datetime
from typing import Any

import pytest

import pulque
from pulque.cli.app import run
from pulque.cli.common.options import Tools
from tests.unit.admin.conftest import Api


def rows(capsys: pytest.CaptureFixture[str], url: str, *arguments: str) -> list[dict[str, Any]]:
    tools = Tools(connect=pulque.connect)
    assert run([*arguments, "--url", url, "-o", "json"], tools) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_groups_and_dead_letters(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    url = api.brokers["b1"].url
    with pulque.connect(url) as client:
        client.send_many("same", [b"1", b"\xff", b"3", b"4"])
        with client.consumer("same", "readers", consumer_id="r") as consumer:
            for message in consumer.pull(2, timeout=5.0):
                message.reject("no \x1b[31m use")
            consumer.settle()

            listed = (await api.get("/groups", subject="same"))["items"]
            assert rows(capsys, url, "group", "list", "same") == listed
            (shown,) = rows(capsys, url, "group", "show", "readers", "--subject", "same")
            (lag,) = (await api.get("/groups/readers/lag", subject="same"))["items"]
            for name in ("group", "partition", "mode", "next_sequence", "end", "lag", "held"):
                assert shown[name] == lag[name], name
            (mine,), (theirs,) = shown["consumers"], lag["consumers"]
            assert (mine["consumer"], mine["held"]) == (theirs["consumer"], theirs["held"])

    of = ("same", "--group", "readers")
    letters = rows(capsys, url, "dead", "list", *of)
    page = (await api.get("/dead/same/readers"))["items"]
    assert len(letters) == len(page) == 2
    for one, other in zip(letters, page, strict=True):
        for name in ("id", "sequence", "key", "tags", "headers"):
            assert one[name] == other[name], name
        assert one["attempt"] == other["attempts"]
        assert instant(one["stored_at"]) == instant(other["died_at"])
        whole = await api.get(f"/dead/same/readers/b1/{one['sequence']}")
        assert (one.get("body"), one.get("body_base64")) == (whole["body"], whole["body_base64"])
        assert one["headers"]["pulque.reason"] == other["reason"]
        assert one["headers"]["pulque.dead"] == other["why"]

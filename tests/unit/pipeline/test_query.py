"""A question gives what a look at every message would give."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pulque
from pulque.cli.app import run as run_command
from pulque.cli.common.options import Tools
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker

pytest.importorskip("deltalake")
from pulque.pipeline import query
from pulque.pipeline.archive.message_archiver import Archiver, run_here
from pulque.pipeline.lake.table import Table
from pulque.pipeline.query import Question, ask, candidates

SUBJECTS = ("order.paid", "order.sent", "refund", "orders")
Row = dict[str, Any]


class Lake(NamedTuple):
    where: str
    rows: list[Row]
    """All messages, the oldest first."""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Messages of three days, eight hours apart."""
    place = tmp_path_factory.mktemp("asked")
    with InProcessBroker(place / "data") as broker, pulque.connect(broker.url) as client:
        for turn in range(9):
            for number in range(20):
                headers = {"turn": str(turn), "odd": "yes"} if number % 2 else None
                subject = SUBJECTS[(turn + number) % len(SUBJECTS)]
                body = f"{turn}-{number}".encode()
                client.send(subject, body, key=f"key-{number}", headers=headers)
            client.seal()
            broker.advance_time(8 * 3600)
        list(Archiver(str(place / "lake"), str(place / "data"), "b", lambda: run_here).run())
    rows = Table(str(place / "lake")).open().to_pyarrow_table().to_pylist()
    rows.sort(key=lambda row: (row["stored_at"], row["partition"], row["sequence"]))
    assert len(rows) == 180
    return Lake(str(place / "lake"), rows)


def by_arrow(lake: str, question: Question) -> list[Row]:
    """The way for files that are not on this machine."""
    table = Table(lake)
    found = candidates(table.open(), question)
    rows: list[Row] = query._ask_arrow(table, found, question).to_pylist() if found else []  # noqa: SLF001
    return rows


def middle(lake: Lake) -> datetime:
    found: datetime = lake.rows[90]["stored_at"]
    return found


CASES: list[tuple[Callable[[Lake], Question], Callable[[Lake, Row], bool]]] = [
    (
        lambda lake: Question(id=lake.rows[77]["message_id"]),
        lambda lake, row: row["message_id"] == lake.rows[77]["message_id"],
    ),
    (lambda _: Question(id="0" * 32), lambda *_: False),
    (lambda _: Question(id="f" * 32), lambda *_: False),
    (lambda _: Question(key="key-7"), lambda _, row: row["key"] == "key-7"),
    (lambda _: Question(key="no'such"), lambda *_: False),
    (lambda _: Question(subject="orders"), lambda _, row: row["subject"] == "orders"),
    (
        lambda _: Question(subject="order.*", limit=7),
        lambda _, row: row["subject"].startswith("order."),
    ),
    (lambda lake: Question(begin=middle(lake)), lambda lake, r: r["stored_at"] >= middle(lake)),
    (lambda lake: Question(end=middle(lake)), lambda lake, r: r["stored_at"] < middle(lake)),
    (
        lambda lake: Question(begin=middle(lake), end=middle(lake) + timedelta(hours=9)),
        lambda lake, r: middle(lake) <= r["stored_at"] < middle(lake) + timedelta(hours=9),
    ),
    (
        lambda _: Question(headers={"turn": "3", "odd": "yes"}, key="key-5"),
        lambda _, row: row["body"] == b"3-5",
    ),
    (lambda _: Question(headers={"none": "such"}), lambda *_: False),
    (lambda _: Question(begin=datetime(2090, 1, 1, tzinfo=UTC)), lambda *_: False),
    (lambda _: Question(limit=5), lambda *_: True),
]


@pytest.mark.parametrize("way", [ask, by_arrow])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_answers_are_what_a_look_at_every_message_gives(
    lake: Lake, case: int, way: Callable[[str, Question], list[Row]]
) -> None:
    question, is_meant = CASES[case][0](lake), CASES[case][1]
    expected = [row for row in lake.rows if is_meant(lake, row)][: question.limit]

    answer = way(lake.where, question)
    assert answer == [{name: row[name] for name in query._SHOWN} for row in expected]  # noqa: SLF001


def test_files_that_cannot_hold_an_answer_are_not_opened(lake: Lake) -> None:
    table = Table(lake.where).open()
    everything = len(candidates(table, Question()))

    assert len(candidates(table, Question(id=lake.rows[77]["message_id"]))) < everything / 4
    assert len(candidates(table, Question(subject="orders"))) <= everything / 2
    day = lake.rows[0]["stored_at"].replace(hour=0, minute=0, second=0, microsecond=0)
    one_day = Question(begin=day, end=day + timedelta(days=1))
    assert len(candidates(table, one_day)) < everything


@pytest.mark.parametrize("options", [{"id": "xyz"}, {"id": "A" * 32}, {"limit": 0}])
def test_what_cannot_be_asked_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Question(**options)


def command(*arguments: str) -> int:
    return run_command(["pipeline", "query", *arguments], Tools(connect=pulque.connect))


def test_the_command_prints_what_it_found(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    row = lake.rows[100]
    assert command("--lake", lake.where, "--id", row["message_id"]) == 0
    assert row["message_id"] in capsys.readouterr().out
    assert command("--lake", lake.where, "--key", "key-3", "-n", "4", "-o", "json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all('"key": "key-3"' in line for line in lines)
    assert command("--lake", lake.where, "--key", "nobody's") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--id", "zz"], "not a message id"),
        (["--from", "yesterday"], "--from 'yesterday': allowed are"),
        (["--header", "novalue"], "NAME=VALUE"),
    ],
)
def test_a_wrong_question_is_told_in_words(
    lake: Lake, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert command("--lake", lake.where, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_lake_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--lake", str(tmp_path), "--key", "a") == 2
    assert "pulque pipeline archive makes it" in capsys.readouterr().err

"""``pulque pipeline query``: look messages up in a lake, without Spark."""

import base64
from datetime import datetime
from typing import Annotated, Any

import typer

from pulque.cli.common.options import OutputOption
from pulque.cli.common.output import (
    Output,
    instant,
    nothing_there,
    print_json,
    print_table,
    print_warning,
)
from pulque.cli.pipeline.options import (
    BeginOption,
    EndOption,
    HeaderOption,
    IdOption,
    KeyOption,
    LakeOption,
    SubjectOption,
    parse_header,
    parse_instant,
    pipeline_extra,
)

__all__ = ["query"]

_COLUMNS = ("stored_at", "message_id", "subject", "partition", "sequence", "key", "body")
_BODY_SHOWN = 60


def query(
    *,
    lake: LakeOption,
    message_id: IdOption = None,
    key: KeyOption = None,
    subject: SubjectOption = None,
    begin: BeginOption = None,
    end: EndOption = None,
    header: HeaderOption = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="At most so many, oldest first.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print messages of an archive that match all that is given.

    Instants are ISO 8601, in UTC unless they say otherwise, or milliseconds since 1970. Bodies are
    text in JSON if they are UTF-8, else base64. Exits with 4 if nothing matches.
    """
    with pipeline_extra():
        from pulque.pipeline.query import Question, ask, quarantined

        question = Question(
            id=message_id,
            key=key,
            subject=subject,
            begin=parse_instant(begin, "--from"),
            end=parse_instant(end, "--to"),
            headers=dict(map(parse_header, header or [])),
            limit=limit,
        )
        rows = ask(lake, question)
        left_out = quarantined(lake, question)
    if output is Output.JSON:
        for row in rows:
            print_json(_in_json(row))
    elif rows:
        print_table(_COLUMNS, [[_cell(row[name]) for name in _COLUMNS] for row in rows])
    if left_out:
        print_warning(
            f"{left_out} messages of these subjects and this time cannot be decoded; "
            "their batches are in the table quarantine"
        )
    if not rows:
        raise nothing_there("no such messages are archived")


def _in_json(row: dict[str, Any]) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in row.items() if value is not None}
    if row["headers"] is not None:
        values["headers"] = dict(row["headers"])
    try:
        values["body"] = row["body"].decode()
    except UnicodeDecodeError:
        del values["body"]
        values["body_base64"] = base64.b64encode(row["body"]).decode()
    return values


def _plain(value: Any) -> Any:
    return _shown(value) if isinstance(value, datetime) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        text = value.decode(errors="backslashreplace")
        return text if len(text) <= _BODY_SHOWN else f"{text[:_BODY_SHOWN]}…"
    return str(_plain(value))


def _shown(value: datetime) -> str:
    return instant(round(value.timestamp() * 1000))

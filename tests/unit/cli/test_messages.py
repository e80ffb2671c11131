"""A message is printed with all that there is to say about it."""

import json

import pytest

from pulque.cli.common.message_output import (
    MessageOutput,
    message_fields,
    message_line,
    print_message,
)
from tests.unit.cli.fakes import stored


def test_json_has_every_field_of_a_message() -> None:
    (message,) = stored(b"tea", key="k", order_key="o", tags=["a", "b"], headers={"h": "v"})

    assert message_fields(message) == {
        "id": message.id,
        "subject": "orders",
        "partition": "orders",
        "broker_group": "",
        "sequence": 3,
        "key": "k",
        "order_key": "o",
        "tags": ["a", "b"],
        "headers": {"h": "v"},
        "body": "tea",
        "attempt": 1,
        "priority": 4,
        "created_at": "2023-11-14T22:13:20.007Z",
        "stored_at": "2023-11-14T22:13:20.007Z",
    }


def test_a_body_that_is_no_text_is_base64() -> None:
    (message,) = stored(b"\xff\x00")
    fields = message_fields(message)

    assert fields["body_base64"] == "/wA="
    assert "body" not in fields


def test_a_line_shows_only_what_is_there() -> None:
    plain, tagged = stored(b"tea")[0], stored(b"tea", key="a b", tags=["x"], headers={"h": ""})[0]

    assert message_line(plain) == "2023-11-14T22:13:20.007Z orders/3 tea"
    assert message_line(tagged).endswith('orders/3 key="a b" tags=x h="" tea')


def test_a_long_body_is_cut_in_a_line() -> None:
    (message,) = stored(b"x" * 5000)

    assert message_line(message).endswith(" … (5000 bytes)")
    assert len(message_line(message)) < 1200


def test_a_line_for_people_is_one_line_that_steers_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = "\x1b]0;owned\x07\n\u202e"
    (message,) = stored(evil.encode() + b"\xff\x9b", key=evil, tags=[evil], headers={evil: evil})
    print_message(message, MessageOutput.TABLE)

    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.removesuffix("\n").isprintable()


def test_json_of_an_evil_message_is_one_safe_line(capsys: pytest.CaptureFixture[str]) -> None:
    (message,) = stored("\x1b[31m\n\x9b".encode())
    print_message(message, MessageOutput.JSON)

    out = capsys.readouterr().out
    assert json.loads(out)["body"] == "\x1b[31m\n\x9b"
    assert out.removesuffix("\n").isprintable()


def test_raw_is_the_body_and_a_line_end(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (message,) = stored(b"\xff\x1b")
    print_message(message, MessageOutput.RAW)

    assert capfdbinary.readouterr().out == b"\xff\x1b\n"

"""Nothing that was printed can steer a terminal, and JSON stays JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.cli.common.output import instant, json_text, print_table, rows_of
from pulque.settings.foreign import escaped, quoted

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=_JSON, encoding=st.sampled_from(["utf-8", "ascii", "latin-1", None]))
def test_json_is_one_safe_line_that_means_the_same(value: object, encoding: str | None) -> None:
    text = json_text(value, encoding)

    assert json.loads(text) == value
    assert text.isprintable()
    text.encode(encoding or "ascii")


def test_json_keeps_what_the_terminal_can_show() -> None:
    assert json_text({"n": "niño 你好 😀"}, "utf-8") == '{"n": "niño 你好 😀"}'
    assert json_text("niño", "ascii") == '"ni\\u00f1o"'
    assert (
        json_text("\x1b[31m\x9b\u202e😀", "ascii") == '"\\u001b[31m\\u009b\\u202e\\ud83d\\ude00"'
    )


@given(text=st.text())
def test_escaped_text_is_printable_and_plain_text_stays(text: str) -> None:
    assert escaped(text).isprintable()
    if text.isprintable():
        assert escaped(text) == text


def test_a_quoted_value_is_cut() -> None:
    assert quoted("\x1b") == r"'\x1b'"
    assert len(quoted("x" * 1000)) == 80


@pytest.mark.parametrize(
    ("at_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_007, "2023-11-14T22:13:20.007Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (2**63 - 1, "9223372036854775807ms"),
    ],
)
def test_an_instant_is_iso_8601_in_utc(at_ms: int, text: str) -> None:
    assert instant(at_ms) == text


def test_a_table_without_a_terminal_has_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "value"), [("a", "x" * 300), ("long name", "\x1b[31m\ny")])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "value"]
    assert lines[1] == "a          " + "x" * 300
    assert lines[2] == "long name  \\x1b[31m\\ny"


def test_nested_values_become_rows() -> None:
    report = {"a": 1, "b": {"c": "x", "d": {}}, "e": [1]}

    assert list(rows_of(report)) == [("a", "1"), ("b.c", "x"), ("b.d", "{}"), ("e", "[1]")]

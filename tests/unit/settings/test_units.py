"""A duration or a size that is written is read back as it was."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from pulque.settings.units import Size, parse_duration, parse_number, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("10s", 10),
        ("10 sec", 10),
        ("2m", 120),
        ("2min", 120),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1.5h", 5400),
        ("7d", 7 * 86400),
        ("2w", 14 * 86400),
        ("0s", 0),
        ("P7D", 7 * 86400),
        ("P1W", 7 * 86400),
        ("PT1H30M", 5400),
        ("PT0.5S", 0.5),
        ("P1DT1S", 86401),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "10",
        10,
        1.5,
        True,
        None,
        "-5s",
        "5 parsecs",
        "5m3m",
        "3m1h",
        "P",
        "PT",
        "P1Y",
        "1h junk",
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="written like 7d"):
        parse_duration(value)


def test_a_duration_longer_than_a_century_is_refused() -> None:
    with pytest.raises(ValueError, match="36500d"):
        parse_duration("99999999w")


@given(milliseconds=st.integers(0, 36_500 * 86_400_000))
def test_a_shown_duration_is_read_back(milliseconds: int) -> None:
    duration = timedelta(milliseconds=milliseconds)

    assert parse_duration(show_duration(duration)) == duration


@given(size=st.integers(0, 2**53))
def test_a_shown_size_is_read_back(size: int) -> None:
    assert TypeAdapter(Size).validate_python(show_size(size)) == ByteSize(size)


@pytest.mark.parametrize("value", [True, 1.5, None, [], "many", -1])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"size|byte"):
        TypeAdapter(Size).validate_python(value)


@pytest.mark.parametrize("value", [True, 1.5, None, []])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_number(value)

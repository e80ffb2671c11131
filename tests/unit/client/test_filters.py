"""Filters as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulque.client.arguments.filter_expressions import parse_filter
from pulque.errors import UsageError

tags = st.lists(st.text("abcü.-_:#%", min_size=1, max_size=5), min_size=1, max_size=5)
spaces = st.sampled_from(["", " ", "  "])


@given(tags=tags, operator=st.sampled_from(["||", "&&"]), space=spaces)
def test_tags_are_read_as_they_were_written(tags: list[str], operator: str, space: str) -> None:
    any_of, all_of = parse_filter(space + f"{space}{operator}{space}".join(tags) + space)

    assert any_of + all_of == tags
    assert not (all_of if operator == "||" or len(tags) == 1 else any_of)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 1),
        ("  ", 3),
        ("||", 1),
        ("a ||", 5),
        ("a b", 3),
        ("a | b", 3),
        ("a ||| b", 3),
        ("a && b || c", 8),
        ("&& a", 1),
        ("a || && b", 6),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_position(text: str, position: int) -> None:
    with pytest.raises(UsageError, match=f"position {position}:"):
        parse_filter(text)


@given(text=st.text("ab|& ", max_size=12))
def test_nothing_else_ever_happens(text: str) -> None:
    try:
        any_of, all_of = parse_filter(text)
    except UsageError:
        return
    assert any_of or all_of

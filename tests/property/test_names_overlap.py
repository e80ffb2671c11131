"""Two patterns overlap if, and only if, some subject is covered by both."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pulque.model.names import overlap, parse_pattern, parse_subject, patterns_of

PARTS = ("a", "b", "ab")
SUBJECTS = [
    parse_subject(".".join(parts))
    for depth in (1, 2, 3, 4)
    for parts in product(PARTS, repeat=depth)
]
"""Deeper than any pattern below by one: whatever two of them share shows here."""
paths = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(".".join)
patterns = st.one_of(paths, paths.map("{}.*".format), st.just("*")).map(parse_pattern)


@given(one=patterns, other=patterns)
def test_patterns_overlap_if_they_share_a_subject(one: str, other: str) -> None:
    a, b = parse_pattern(one), parse_pattern(other)
    shared = [each for each in SUBJECTS if {a, b} <= set(patterns_of(each))]

    assert overlap(a, b) == overlap(b, a) == bool(shared)

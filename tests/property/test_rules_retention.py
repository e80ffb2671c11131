"""Retention takes the oldest segments, as few as its two limits allow and no fewer.

The oracle tries every number of segments, from none on.
"""

from hypothesis import given
from hypothesis import strategies as st

from pulque.rules.retention import SegmentAge, expired_segments

sizes = st.lists(st.integers(0, 100), max_size=8)


@given(
    sizes=sizes,
    steps=st.lists(st.integers(0, 50), min_size=8, max_size=8),
    now_ms=st.integers(0, 500),
    retention_ms=st.integers(0, 200),
    retention_bytes=st.none() | st.integers(0, 400),
)
def test_as_many_go_as_must_and_not_one_more(
    sizes: list[int],
    steps: list[int],
    now_ms: int,
    retention_ms: int,
    retention_bytes: int | None,
) -> None:
    ends = [sum(steps[: at + 1]) for at in range(len(sizes))]
    sealed = [SegmentAge(size, end) for size, end in zip(sizes, ends, strict=True)]

    def is_enough(gone: int) -> bool:
        rest = sealed[gone:]
        is_young = all(now_ms - each.ended_at_ms <= retention_ms for each in rest)
        is_small = retention_bytes is None or sum(each.size for each in rest) <= retention_bytes
        return is_young and is_small

    found = expired_segments(
        sealed, now_ms=now_ms, retention_ms=retention_ms, retention_bytes=retention_bytes
    )

    assert found == next(gone for gone in range(len(sealed) + 1) if is_enough(gone))

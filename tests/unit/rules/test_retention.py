"""Which segments may go, by example."""

import pytest

from pulque.rules.retention import SegmentAge, expired_segments

SEALED = [SegmentAge(100, 1000), SegmentAge(200, 2000), SegmentAge(300, 3000)]


@pytest.mark.parametrize(
    ("now_ms", "expired"), [(0, 0), (1500, 0), (1501, 1), (2501, 2), (3500, 2), (3501, 3)]
)
def test_segments_go_when_their_newest_message_is_too_old(now_ms: int, expired: int) -> None:
    found = expired_segments(SEALED, now_ms=now_ms, retention_ms=500, retention_bytes=None)

    assert found == expired


@pytest.mark.parametrize(
    ("retention_bytes", "expired"), [(600, 0), (599, 1), (500, 1), (499, 2), (300, 2), (0, 3)]
)
def test_the_oldest_go_until_the_rest_is_small_enough(retention_bytes: int, expired: int) -> None:
    found = expired_segments(SEALED, now_ms=0, retention_ms=10**9, retention_bytes=retention_bytes)

    assert found == expired


def test_without_sealed_segments_nothing_goes() -> None:
    assert expired_segments([], now_ms=10**9, retention_ms=0, retention_bytes=0) == 0

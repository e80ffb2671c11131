"""What can wait is done when little comes."""

from pulque.delay.housekeeping import IdleDetector

MIB = 1024 * 1024


def test_a_little_does_not_matter() -> None:
    lull = IdleDetector(7 * MIB, after_ms=5000)

    assert all(lull.is_now(7 * MIB + turn * MIB, turn * 250) for turn in range(1, 100))


def test_much_is_followed_by_some_seconds_of_waiting() -> None:
    lull = IdleDetector(0, after_ms=5000)

    assert not lull.is_now(2 * MIB, 1000)
    assert not lull.is_now(2 * MIB, 5999)
    assert lull.is_now(2 * MIB, 6000)
    assert lull.is_now(2 * MIB + 10, 6250)


def test_more_in_the_meantime_begins_it_anew() -> None:
    lull = IdleDetector(0, after_ms=5000)

    assert not lull.is_now(2 * MIB, 1000)
    assert not lull.is_now(4 * MIB, 5000)
    assert not lull.is_now(4 * MIB, 9999)
    assert lull.is_now(4 * MIB, 10_000)

"""A manual clock moves when it is told, and only forward."""

import pytest

from pulque.clock import Clock
from pulque.testing.clock import ManualClock


def test_both_times_advance_together() -> None:
    clock: Clock = ManualClock(5_000)
    assert isinstance(clock, ManualClock)
    before = clock.monotonic_ms()

    clock.advance(250)

    assert clock.now_ms() == 5_250
    assert clock.monotonic_ms() == before + 250


def test_setting_the_wall_clock_back_leaves_the_monotonic_one_alone() -> None:
    clock = ManualClock(5_000)

    clock.set_now_ms(10)

    assert clock.now_ms() == 10
    assert clock.monotonic_ms() == 0


def test_time_does_not_go_back() -> None:
    clock = ManualClock()

    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)

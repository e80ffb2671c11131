"""Every random test of a run follows from one seed, hypothesis included."""

import os

from hypothesis import core, given, settings
from hypothesis import strategies as st


def test_the_seed_is_the_one_that_the_run_announced(seed: int) -> None:
    assert str(seed) == os.environ["PULQUE_TEST_SEED"]


def test_hypothesis_starts_from_the_same_seed(seed: int) -> None:
    assert core.global_force_seed == seed


def test_hypothesis_repeats_itself_within_a_run() -> None:
    assert drawn() == drawn()


def drawn() -> list[int]:
    numbers: list[int] = []

    @settings(max_examples=5)
    @given(number=st.integers())
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers

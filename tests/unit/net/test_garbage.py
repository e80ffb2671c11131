"""Full collections look at what is new; what survived one is looked at again when that is due."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from pulque.net.garbage import ShortCollections

WHOLE_EVERY_S = 600.0


class Node:
    """Refers to another one, and to that by itself to make a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    node = Node()
    node.other = Node()
    node.other.other = node
    return node


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def begin(now_s: list[float]) -> Iterator[Callable[[int], ShortCollections]]:
    """Return a function that keeps collections short, with whole ones past so many objects."""
    begun: list[ShortCollections] = []

    def start(least: int = 10**9) -> ShortCollections:
        begun.append(ShortCollections(lambda: now_s[0], least=least))
        begun[0].begin()
        return begun[0]

    yield start
    begun[0].end()


def test_what_survived_a_full_collection_is_not_looked_at_again(
    begin: Callable[[], ShortCollections],
) -> None:
    before, after = cycle(), None
    begin()
    after = cycle()
    gc.collect()

    looked_at = {id(each) for each in gc.get_objects()}
    assert id(before) not in looked_at
    assert id(after) not in looked_at
    assert id(cycle()) not in looked_at


def test_a_cycle_that_is_younger_than_the_last_collection_is_freed(
    begin: Callable[[], ShortCollections],
) -> None:
    begin()
    gone = weakref.ref(cycle())
    gc.collect()

    assert gone() is None


def test_what_is_frozen_is_freed_when_nobody_refers_to_it(
    begin: Callable[[], ShortCollections],
) -> None:
    node = Node()
    begin()
    gone = weakref.ref(node)
    del node

    assert gone() is None


def test_a_frozen_cycle_is_freed_after_ten_minutes(
    begin: Callable[[], ShortCollections], now_s: list[float]
) -> None:
    node = cycle()
    begin()
    gone = weakref.ref(node)
    del node
    now_s[0] = WHOLE_EVERY_S - 1
    gc.collect()
    assert gone() is not None

    now_s[0] = WHOLE_EVERY_S
    gc.collect()
    assert gone() is None


def test_frozen_cycles_are_freed_when_twice_as_much_is_frozen(
    begin: Callable[[int], ShortCollections],
) -> None:
    collections = begin(0)
    node = cycle()
    gc.collect()
    gone = weakref.ref(node)
    del node
    many = [Node() for _ in range(gc.get_freeze_count())]
    for _ in range(64):
        gc.collect()

    assert gone() is None
    assert collections.whole == 2
    del many


def test_a_process_that_grows_little_has_no_whole_collection(
    begin: Callable[[int], ShortCollections],
) -> None:
    collections = begin(0)
    for _ in range(100):
        gc.collect()

    assert collections.whole == 1

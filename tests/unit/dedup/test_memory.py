"""The checker of one process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pulque.dedup import MemoryChecker
from pulque.errors import UnavailableError, UsageError
from pulque.model.message import Message
from tests.forks import in_child

NewMessage = Callable[[], Message]


def handles(checker: MemoryChecker, message: Message) -> bool:
    with checker.once(message) as is_first:
        return is_first


def test_a_message_is_handled_once(message: Message, new_message: NewMessage) -> None:
    checker = MemoryChecker()

    assert handles(checker, message)
    assert not handles(checker, message)
    assert handles(checker, new_message())


def test_what_failed_may_be_handled_again(message: Message) -> None:
    checker = MemoryChecker()
    with pytest.raises(OSError, match="no milk"), checker.once(message):
        raise OSError("no milk")

    assert handles(checker, message)
    assert not handles(checker, message)


def test_a_failure_in_the_block_of_a_duplicate_changes_nothing(message: Message) -> None:
    checker = MemoryChecker()
    handles(checker, message)
    with pytest.raises(OSError, match="no milk"), checker.once(message):
        raise OSError("no milk")

    assert not handles(checker, message)


def test_of_two_at_once_the_second_is_told_to_come_later(message: Message) -> None:
    checker = MemoryChecker()
    with (
        checker.once(message) as is_first,
        pytest.raises(UnavailableError, match="another thread"),
        checker.once(message),
    ):
        pass

    assert is_first
    assert not handles(checker, message)


def test_many_threads_handle_it_once(message: Message) -> None:
    checker = MemoryChecker()
    handled = []
    start = threading.Barrier(8)

    def try_it() -> None:
        start.wait()
        try:
            if handles(checker, message):
                handled.append(1)
        except UnavailableError:
            pass

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert handled == [1]


def test_the_one_that_did_not_come_up_for_longest_is_forgotten(new_message: NewMessage) -> None:
    checker = MemoryChecker(size=2)
    first, second, third = new_message(), new_message(), new_message()
    handles(checker, first)
    handles(checker, second)
    assert not handles(checker, first)  # so the second is the oldest now
    handles(checker, third)

    assert len(checker) == 2
    assert not handles(checker, first)
    assert handles(checker, second)


def test_what_is_old_is_forgotten(message: Message) -> None:
    now = [0.0]
    checker = MemoryChecker(keep=60, monotonic=lambda: now[0])
    handles(checker, message)
    now[0] = 59.9
    assert not handles(checker, message)
    now[0] = 60.0
    assert handles(checker, message)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"keep": 0.0}, {"keep": float("nan")}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="more than 0"):
        MemoryChecker(**wrong)


def test_a_child_of_fork_waits_for_no_thread_of_its_parent(new_message: NewMessage) -> None:
    checker = MemoryChecker()
    begun, handled = new_message(), new_message()
    assert checker.begin(begun)
    assert handles(checker, handled)

    with checker._lock:  # noqa: SLF001  # as another thread may
        # What another thread has begun is begun in the parent alone.
        assert in_child(lambda: (checker.begin(begun), checker.begin(handled))) == (True, False)
    with pytest.raises(UnavailableError, match="another thread"):
        checker.begin(begun)

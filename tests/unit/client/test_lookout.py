"""Looking for an answer before sleeping for it: only where answers come soon, and not for long."""

import socket
import threading

from pulque.client.connection.busy_poll import LONGEST_LOOK, Lookout


class Socket:
    """Has an answer after so many looks, each of which takes a while."""

    def __init__(self, after: int, each: float = LONGEST_LOOK / 10) -> None:
        self.now = 50.0
        self.looks = 0
        self._after = after
        self._each = each

    def read(self, flags: int) -> int:
        assert flags == socket.MSG_DONTWAIT
        self.looks += 1
        self.now += self._each
        return 8 if self.looks > self._after else 0

    def clock(self) -> float:
        return self.now

    def lookout(self, *, took: float = 0.0, is_worthwhile: bool = True) -> Lookout:
        """Return one whose last answer took so long."""
        made = Lookout(self.read, now=self.clock, is_worthwhile=is_worthwhile)
        made.answered(self.now - took)
        return made


def test_an_answer_that_comes_soon_is_read_as_soon_as_it_is_there() -> None:
    found = Socket(after=4)
    lookout = found.lookout()

    lookout.look(lookout.ask())

    assert found.looks == 5


def test_it_looks_for_no_longer_than_is_worth_it() -> None:
    found = Socket(after=1000)
    lookout = found.lookout()

    lookout.look(lookout.ask())

    assert 8 <= found.looks <= 12


def test_a_first_answer_is_slept_for() -> None:
    found = Socket(after=4)
    lookout = Lookout(found.read, now=found.clock, is_worthwhile=True)

    lookout.look(lookout.ask())

    assert found.looks == 0


def test_where_the_last_answer_took_long_the_next_is_slept_for() -> None:
    found = Socket(after=4)
    lookout = found.lookout(took=2 * LONGEST_LOOK)

    lookout.look(lookout.ask())

    assert found.looks == 0


def test_with_one_core_every_answer_is_slept_for() -> None:
    found = Socket(after=4)
    lookout = found.lookout(is_worthwhile=False)

    lookout.look(lookout.ask())

    assert found.looks == 0


def test_one_thread_looks_at_a_time() -> None:
    other = Socket(after=4)
    lookout = other.lookout()

    def read(flags: int) -> int:
        del flags
        thread = threading.Thread(target=lookout.look, args=(lookout.ask(),))
        thread.start()
        thread.join()
        return 8

    first = Lookout(read, now=other.clock, is_worthwhile=True)
    first.answered(first.ask())
    first.look(first.ask())
    looks_meanwhile = other.looks
    lookout.look(lookout.ask())

    assert (looks_meanwhile, other.looks) == (0, 5)

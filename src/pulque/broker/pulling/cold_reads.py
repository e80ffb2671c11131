"""Reads that wait for the disk: in threads, and never many for one group.

One group that works through an old backlog must neither take all threads nor stand before the
others: each group has one read at a time, groups come in turn, and a thread is always left for
the other work that waits for the disk.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

from pulque.broker.pulling.pull_plan import PullPlan, PullPlanner
from pulque.broker.pulling.waiting_pulls import WaitingPull
from pulque.errors import PulqueError, StorageError
from pulque.model.names import Group

__all__ = ["ColdFound", "ColdPull", "ColdRead", "ColdReads"]

T = TypeVar("T")
ColdFound = PullPlan | PulqueError | None
"""A plan with all that was read for it, or what went wrong, or that it was disturbed."""


class ColdRead(Protocol[T]):
    """One read, in three steps."""

    def begin(self) -> bool:
        """Say whether it is still wanted, when its turn has come."""
        ...

    def run(self) -> T:
        """Read; called in a thread. Must not raise."""
        ...

    def finish(self, found: T) -> None:
        """Go on with what was read."""
        ...


class ColdReads(Generic[T]):
    """The reads that wait, and those that threads are at.

    Args:
        executor: Has the threads.
        most: How many reads may be under way.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor = executor
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._lines: dict[Group, deque[ColdRead[T]]] = {}
        """The reads that wait, by group; the groups in order of their turns."""
        self._reading: set[Group] = set()
        self.waiting = 0

    def submit(self, group: Group, read: ColdRead[T]) -> None:
        """Have a thread do a read when it is the group's turn."""
        self._lines.setdefault(group, deque()).append(read)
        self.waiting += 1
        self._start()

    def _start(self) -> None:
        while len(self._reading) < self._most:
            group = next((each for each in self._lines if each not in self._reading), None)
            if group is None:
                return
            read = self._take(group)
            if read.begin():
                self._reading.add(group)
                future = self._loop.run_in_executor(self._executor, read.run)
                future.add_done_callback(self._finisher(group, read))

    def _take(self, group: Group) -> ColdRead[T]:
        line = self._lines.pop(group)
        read = line.popleft()
        self.waiting -= 1
        if line:
            self._lines[group] = line
        return read

    def _finisher(self, group: Group, read: ColdRead[T]) -> Callable[["asyncio.Future[T]"], None]:
        def finish(future: "asyncio.Future[T]") -> None:
            self._reading.discard(group)
            if group in self._lines:
                self._lines[group] = self._lines.pop(group)  # it had its turn: behind all others
            try:
                read.finish(future.result())
            finally:
                self._start()

        return finish


class ColdPull:
    """Reads what a pull needs from the disk; a ``ColdRead``.

    Args:
        planner: Says what it needs, and reads it.
        waiting: The pull.
        is_wanted: Whether it still waits, when its turn has come.
        done: Told what was found, and whether that is still what the consumer should get.
    """

    def __init__(
        self,
        planner: PullPlanner,
        waiting: WaitingPull,
        is_wanted: Callable[[WaitingPull], bool],
        done: Callable[[WaitingPull, ColdFound, bool], None],
    ) -> None:
        self._planner = planner
        self._waiting = waiting
        self._is_wanted = is_wanted
        self._done = done
        self._basis: tuple[object, ...] = ()

    def begin(self) -> bool:
        """Look what the plan will be made from; nothing is done for a pull that is over."""
        self._basis = self._planner.basis(self._waiting)
        return self._is_wanted(self._waiting)

    def run(self) -> ColdFound:
        """Make a plan, and read all that belongs to it."""
        try:
            return self._planner.plan(self._waiting, may_block=True)
        except PulqueError as error:
            return error
        except OSError as error:
            return StorageError(f"the messages cannot be read: {error}")
        except RuntimeError:
            return None  # something changed under its eyes

    def finish(self, found: ColdFound) -> None:
        """Hand over what was read."""
        is_current = self._planner.basis(self._waiting) == self._basis
        self._done(self._waiting, found, is_current)

"""A pull whose messages have to be read from the disk."""

from collections.abc import Callable

from pulque.broker.pulling.pull_plan import PullPlan, PullPlanner
from pulque.broker.pulling.waiting_pulls import WaitingPull
from pulque.errors import PulqueError, StorageError

__all__ = ["ColdFound", "ColdPull"]

ColdFound = PullPlan | PulqueError | None
"""A plan with all that was read for it, or what went wrong, or that it was disturbed."""


class ColdPull:
    """Reads what a pull needs.

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

"""Messages that brokers refuse for good: put aside, shown, and tried again after a while.

They stay in their tick, which stays on disk as long as any of them is there. So they can be
listed, cancelled and moved like all that wait, and after a restart they are tried at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pulque.clock import Clock
from pulque.delay.tick_index import Rows, RowState, TickIndex
from pulque.errors import PulqueError
from pulque.model.names import PartitionName

__all__ = ["Stuck"]

_AGAIN_MS = 600_000
_MOST_SHOWN = 100


@dataclass(slots=True)
class _Aside:
    """Messages of one tick and one partition that were refused for one reason."""

    index: TickIndex
    partition: PartitionName
    reason: str
    rows: Rows
    since_ms: int
    again_ms: int
    """When they are tried again, on the steady clock."""

    @property
    def left(self) -> Rows:
        """The rows that nobody took back meanwhile."""
        is_stuck: Rows = self.index.states[self.rows] == RowState.STUCK
        return self.rows[is_stuck]


class Stuck:
    """Keeps what brokers refused."""

    def __init__(self, clock: Clock, warn: Callable[..., None]) -> None:
        self._clock = clock
        self._warn = warn
        self._aside: dict[tuple[int, PartitionName, str], _Aside] = {}

    def put(
        self, index: TickIndex, rows: Rows, partition: PartitionName, problem: PulqueError
    ) -> None:
        """Put messages aside."""
        index.mark(rows, RowState.STUCK)
        reason = str(problem)
        self._warn("dispatch_refused", partition=partition, messages=len(rows), reason=reason)
        again_ms = self._clock.monotonic_ms() + _AGAIN_MS
        key = (index.tick, partition, reason)
        found = self._aside.get(key)
        if found is None:
            now_ms = self._clock.now_ms()
            self._aside[key] = _Aside(index, partition, reason, rows, now_ms, again_ms)
        else:
            found.rows = np.concatenate([found.left, rows])
            found.again_ms = again_ms

    def give_back(self, steady_ms: int) -> None:
        """Let messages that were refused long ago be taken again."""
        for key, found in list(self._aside.items()):
            if found.again_ms <= steady_ms:
                del self._aside[key]
                found.index.give_back(found.left)

    def report(self) -> dict[str, Any]:
        """Return how many there are, and why."""
        found = [(each, len(each.left)) for each in self._aside.values()]
        shown = [
            {
                "partition": each.partition,
                "messages": messages,
                "reason": each.reason,
                "since_ms": each.since_ms,
            }
            for each, messages in found[:_MOST_SHOWN]
            if messages
        ]
        return {"messages": sum(messages for _, messages in found), "refusals": shown}

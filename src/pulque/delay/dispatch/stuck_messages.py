"""Messages that brokers refuse for good: set aside, listed, and retried after a while.

They stay in their tick, which stays on disk as long as it has any. So they can be
listed, cancelled and rescheduled like all waiting messages; after a restart they are retried at
once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from pulque.clock import Clock
from pulque.delay.schedule.tick_index import Rows, RowState, TickIndex
from pulque.errors import InvalidRequestError, PulqueError
from pulque.model.names import PartitionName, parse_subject, subject_of
from pulque.wire.delay import MAX_LISTED
from pulque.wire.stuck import StuckListed, StuckMessage, StuckMessages

__all__ = ["Stuck"]

_AGAIN_MS = 600_000
_MOST_SHOWN = 100
_LONGEST_REASON = 2000
_PLACE = Struct("<qqQ")
_Place = tuple[int, int, int]
"""Tick, due time and row of a message."""
_NOWHERE = (-1, 0, 0)


@dataclass(slots=True)
class _Aside:
    """Messages of one tick and one partition that were refused for one reason."""

    index: TickIndex
    partition: PartitionName
    reason: str
    rows: Rows
    since_ms: int
    again_ms: int
    """When they are retried, on the monotonic clock."""

    @property
    def left(self) -> Rows:
        """The rows that were not cancelled or rescheduled meanwhile."""
        is_stuck: Rows = self.index.states[self.rows] == RowState.STUCK
        return self.rows[is_stuck]


class Stuck:
    """Keeps refused messages."""

    def __init__(self, clock: Clock, warn: Callable[..., None]) -> None:
        self._clock = clock
        self._warn = warn
        self._aside: dict[tuple[int, PartitionName, str], _Aside] = {}

    def put(
        self, index: TickIndex, rows: Rows, partition: PartitionName, problem: PulqueError
    ) -> None:
        """Set messages aside."""
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
        """Release messages that were refused long ago for a retry."""
        for key, found in list(self._aside.items()):
            if found.again_ms <= steady_ms:
                del self._aside[key]
                found.index.give_back(found.left)

    def listed(self, request: StuckMessages) -> StuckListed:
        """Return the refused messages with the reasons.

        Raises:
            RejectedError: The request is invalid.
        """
        subject = parse_subject(request.subject) if request.subject else ""
        after = _place_after(request.after)
        most = min(max(request.max_rows, 1), MAX_LISTED)
        messages: list[StuckMessage] = []
        last = after
        for tick in sorted({tick for tick, *_ in self._aside if tick >= after[0]}):
            for place, aside in self._after(tick, subject, after, most + 1 - len(messages)):
                if len(messages) == most:
                    return StuckListed(tuple(messages), _PLACE.pack(*last))
                messages.append(_message(aside, place[2]))
                last = place
        return StuckListed(tuple(messages), b"")

    def _after(
        self, tick: int, subject: str, after: _Place, most: int
    ) -> Iterator[tuple[_Place, _Aside]]:
        """Yield the first messages of a tick that come after a place."""
        found: list[tuple[_Place, _Aside]] = []
        for each in self._aside.values():
            if each.index.tick != tick or subject not in ("", subject_of(each.partition)):
                continue
            rows = each.left
            dues = each.index.due_ms[rows]
            if tick == after[0]:
                is_after = (dues > after[1]) | ((dues == after[1]) & (rows > after[2]))
                rows, dues = rows[is_after], dues[is_after]
            first = np.lexsort((rows, dues))[:most]
            pairs = zip(dues[first].tolist(), rows[first].tolist(), strict=True)
            found += [((tick, due_ms, row), each) for due_ms, row in pairs]
        found.sort(key=lambda each: each[0])
        yield from found[:most]

    def report(self) -> dict[str, Any]:
        """Return their number by reason."""
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


def _message(aside: _Aside, row: int) -> StuckMessage:
    index = aside.index
    return StuckMessage(
        index.ids[row].tobytes(),
        int(index.due_ms[row]),
        aside.partition,
        int(index.lengths[row]),
        aside.since_ms,
        aside.reason[:_LONGEST_REASON],
    )


def _place_after(cursor: bytes) -> _Place:
    if not cursor:
        return _NOWHERE
    if len(cursor) != _PLACE.size:
        raise InvalidRequestError("the place to go on at is none that an answer gave")
    tick, due_ms, row = _PLACE.unpack(cursor)
    return tick, due_ms, row

"""What producers and consumers tried and saw, as lines of JSON that survive ``kill -9``.

One file per process, one line per event::

    {"t": 81236, "process": "p0", "type": "ok", "f": "send", "id": "p0-17", "partition": "orders",
     "sequence": 41}

``type`` is ``invoke`` before a call, then one of ``ok``, ``fail`` (it certainly did not happen)
and ``info`` (nobody knows). ``f`` is ``send``, ``pull`` (a delivery), ``handle`` (the work was
done), ``settle``, ``nack`` or ``read`` (seen in the log, without a group). An id is
``<process>-<counter>`` and is the message's body, so that nothing else has to be trusted.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Event", "HistoryWriter", "counter_of", "producer_of", "read_history"]

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history."""

    process: str
    type: str
    f: str
    id: str
    partition: str = ""
    sequence: int = NOWHERE
    group: str = ""
    attempt: int = 0
    key: str = ""
    """The order key."""
    token: int = 0
    """Of the lock under which a message of an ordered group was handed out."""
    detail: str = ""
    t: int = 0
    """Monotonic nanoseconds; the same clock for all processes of one machine."""


class HistoryWriter:
    """Appends events to a file. Each line is one write: a kill never leaves half of one."""

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, kind: str, f: str, id: str, **fields: Any) -> None:
        """Append one event of this process, now."""
        self.write_all([Event(self.process, kind, f, id, **fields)])

    def write_all(self, events: Iterable[Event]) -> None:
        """Append events in one write."""
        now = time.monotonic_ns()
        lines = [json.dumps({"t": now, **_told(event)}) + "\n" for event in events]
        if lines:
            os.write(self._descriptor, "".join(lines).encode())

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _told(event: Event) -> dict[str, Any]:
    """Leave out what says nothing: most lines are short."""
    told = {key: value for key, value in asdict(event).items() if value not in {"", 0, NOWHERE}}
    return told | ({"sequence": 0} if event.sequence == 0 else {})


def read_history(paths: Iterable[Path]) -> list[Event]:
    """Return the events of all files in order of time."""
    events = [event for path in sorted(paths) for event in _events_of(path)]
    events.sort(key=lambda event: event.t)
    return events


def _events_of(path: Path) -> Iterator[Event]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield Event(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not an event: {line[:200]!r}") from error


def producer_of(id: str) -> str:
    """Return the process that made an id."""
    return id.rpartition("-")[0]


def counter_of(id: str) -> int:
    """Return the ordinal of an id in its process."""
    return int(id.rpartition("-")[2])

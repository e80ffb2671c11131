"""Judges: each takes a history and returns what is wrong with it, in words.

They share nothing with the broker and its client: ids, numbers and nothing else. A problem is
one line of text; an empty list is a pass. ``test_checkers.py`` plants every violation once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.robustness.history import Event, counter_of, producer_of

__all__ = [
    "TotalQueue",
    "check_ack_safety",
    "check_all",
    "check_drained",
    "check_gaps",
    "check_log_agreement",
    "check_order",
    "total_queue",
]

_SHOWN = 5


@dataclass(slots=True)
class TotalQueue:
    """What became of everything that was sent (after Jepsen's checker of that name)."""

    attempted: set[str] = field(default_factory=set)
    confirmed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Certainly not stored, as the sender was told."""
    unknown: set[str] = field(default_factory=set)
    stored: Counter[str] = field(default_factory=Counter)
    """How often each id is in the log."""
    handled: Counter[str] = field(default_factory=Counter)
    """How often each id was handled, per group and id."""
    lost: set[str] = field(default_factory=set)
    lost_where: dict[str, int] = field(default_factory=dict)
    """How many of a producer's lost ones lie before, between and after those that are there."""
    unexpected: set[str] = field(default_factory=set)
    """Stored, but never sent."""
    duplicated: set[str] = field(default_factory=set)
    """Stored more than once."""
    resurrected: set[str] = field(default_factory=set)
    """Stored, although the sender was told that they are not."""
    recovered: set[str] = field(default_factory=set)
    """Of unknown outcome, and there."""

    def problems(self) -> list[str]:
        """Say what must not be."""
        found = []
        if self.lost:
            where = ", ".join(f"{n} {name}" for name, n in self.lost_where.items() if n)
            found.append(f"{len(self.lost)} confirmed are lost ({where}): {_some(self.lost)}")
        for name in ("unexpected", "duplicated", "resurrected"):
            ids: set[str] = getattr(self, name)
            if ids:
                found.append(f"{len(ids)} {name}: {_some(ids)}")
        return found

    def summary(self) -> str:
        """Say how much there was."""
        return (
            f"attempted {len(self.attempted)}, confirmed {len(self.confirmed)}, "
            f"refused {len(self.refused)}, unknown {len(self.unknown)} "
            f"(of which {len(self.recovered)} are there), stored {sum(self.stored.values())}, "
            f"lost {len(self.lost)}, handled twice or more "
            f"{sum(1 for n in self.handled.values() if n > 1)}"
        )


def total_queue(events: Sequence[Event]) -> TotalQueue:
    """Compare what was sent with what the log holds in the end."""
    found = TotalQueue()
    outcome = {"ok": found.confirmed, "fail": found.refused, "info": found.unknown}
    places: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for event in events:
        match event.f, event.type:
            case "send", "invoke":
                found.attempted.add(event.id)
            case "send", _:
                outcome[event.type].add(event.id)
            case "read", "ok":
                places[event.id].add((event.partition, event.sequence))
            case "handle", "ok":
                found.handled[f"{event.group}/{event.id}"] += 1
            case _:
                pass
    found.stored = Counter({id: len(where) for id, where in places.items()})
    # One that has no outcome at all: its producer was killed.
    silent = found.attempted - found.confirmed - found.refused - found.unknown
    found.unknown |= silent
    there = set(found.stored)
    found.lost = found.confirmed - there
    found.lost_where = _split(found.lost, there)
    found.unexpected = there - found.attempted
    found.duplicated = {id for id, count in found.stored.items() if count > 1}
    found.resurrected = found.refused & there
    found.recovered = found.unknown & there
    return found


def _split(lost: set[str], there: set[str]) -> dict[str, int]:
    """Say where in its producer's order each lost one lies: that tells what went wrong."""
    present: defaultdict[str, list[int]] = defaultdict(list)
    for id in there:
        present[producer_of(id)].append(counter_of(id))
    split = {"prefix": 0, "middle": 0, "postfix": 0}
    for id in lost:
        counters = present[producer_of(id)]
        if not counters or counter_of(id) > max(counters):
            split["postfix"] += 1
        elif counter_of(id) < min(counters):
            split["prefix"] += 1
        else:
            split["middle"] += 1
    return split


def check_log_agreement(events: Iterable[Event]) -> list[str]:
    """One id per (partition, sequence): for senders, consumers and readers, at all times."""
    ids: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for event in events:
        if event.type == "ok" and event.f in {"send", "pull", "read"} and event.sequence >= 0:
            ids[event.partition, event.sequence].add(event.id)
    return [
        f"{partition}/{sequence} is {' and '.join(sorted(found))}"
        for (partition, sequence), found in sorted(ids.items())
        if len(found) > 1
    ]


def check_ack_safety(events: Iterable[Event], settled: Iterable[tuple[str, str]]) -> list[str]:
    """What counts as consumed was handled by somebody.

    Args:
        events: The history.
        settled: Group and id of all that the broker will not hand out any more.
    """
    handled = {(e.group, e.id) for e in events if (e.f, e.type) == ("handle", "ok")}
    missing = sorted(set(settled) - handled)
    return [f"settled for {group}, but nobody handled it: {id}" for group, id in missing]


def check_gaps(events: Iterable[Event], starts: dict[str, int] | None = None) -> list[str]:
    """The sequences of a partition, as read in the end, follow each other from its start."""
    seen: defaultdict[str, set[int]] = defaultdict(set)
    for event in events:
        if (event.f, event.type) == ("read", "ok"):
            seen[event.partition].add(event.sequence)
    problems = []
    for partition, sequences in sorted(seen.items()):
        start = (starts or {}).get(partition, 0)
        missing = sorted(set(range(start, max(sequences) + 1)) - sequences)
        if missing:
            problems.append(f"{partition} has gaps: {_some(map(str, missing))}")
        if before := sorted(s for s in sequences if s < start):
            problems.append(f"{partition} has sequences before {start}: {before[:_SHOWN]}")
    return problems


def check_order(events: Iterable[Event], key: Callable[[str], str] = producer_of) -> list[str]:
    """What one producer sent to a partition lies there in the order in which it was sent."""
    lines: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if (event.f, event.type) == ("read", "ok") and not event.partition.startswith("%"):
            place = (event.sequence, counter_of(event.id), event.id)
            lines[event.partition, key(event.id)].append(place)
    problems = []
    for (partition, _), line in sorted(lines.items()):
        line.sort()
        for (_, before, first), (_, after, second) in pairwise(line):
            if after < before:
                problems.append(f"{partition}: {second} lies behind {first}")
    return problems


def check_drained(status: dict[str, Any]) -> list[str]:
    """Nothing waits, is held or is on its way: what a broker reports after a drain.

    Only what is left in all is of one instant. The rows, which say where it is, are not: a
    message that is nacked while they are listed can be missing in each.
    """
    problems = []
    if status["messages_left"]:
        problems.append(f"{status['messages_left']} messages are left to do")
    problems += [
        f"group {row['group']} lags by {row['lag']} in {row['partition']}"
        for row in status["groups"]
        if row["lag"]
    ]
    problems += [
        f"group {row['group']} has {row['redeliveries_pending']} redeliveries to come"
        for row in status["groups"]
        if row["redeliveries_pending"]
    ]
    if status["messages_waiting"]:
        problems.append(f"{status['messages_waiting']} messages wait for another attempt")
    problems += [
        f"{row['consumer']} holds {row['next_pull'] - row['settled']} of {row['partition']}"
        for row in status["subscriptions"]
        if row["settled"] != row["next_pull"]
    ]
    return problems


def check_all(
    events: Sequence[Event], status: dict[str, Any], *, groups: Sequence[str]
) -> list[str]:
    """Apply every judge to a run that was drained and read back to the end.

    After a drain all that is stored is settled, for each of the groups.
    """
    stored = {e.id for e in events if (e.f, e.type) == ("read", "ok")}
    settled = [(group, id) for group in groups for id in stored]
    return [
        *total_queue(events).problems(),
        *check_log_agreement(events),
        *check_ack_safety(events, settled),
        *check_gaps(events),
        *check_order(events),
        *check_drained(status),
    ]


def _some(ids: Iterable[str]) -> str:
    listed = sorted(ids)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more

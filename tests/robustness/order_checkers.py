"""Judges of order: each takes a history and returns what is wrong with it, in words.

A key's messages are sent by one process, one after the other, so that the counter in an id says
the order in which they were sent. A partition is ``broker group/partition name``. Like the other
judges they know ids and numbers and nothing else; ``test_order_checkers.py`` plants violations.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tests.robustness.history import Event, counter_of

__all__ = [
    "check_acks",
    "check_complete",
    "check_first_deliveries",
    "check_one_at_a_time",
    "check_order_of_keys",
    "check_owners",
    "check_stored_order",
]

_RETRY = "/%"


def check_order_of_keys(
    events: Sequence[Event], *, is_strict: bool, must_be_complete: bool = True
) -> list[str]:
    """Apply every judge to the history of one ordered group.

    Args:
        events: In order of time.
        is_strict: Whether the subject's order is.
        must_be_complete: Whether it was drained in the end.
    """
    problems = [
        *check_first_deliveries(events, is_strict=is_strict),
        *check_owners(events),
        *check_acks(events),
        # Retries of a best-effort group go beside their key's line.
        *check_one_at_a_time(
            (e for e in events if is_strict or _RETRY not in e.partition), is_strict=is_strict
        ),
    ]
    if is_strict:
        problems += check_stored_order(events)
    if must_be_complete:
        problems += check_complete(events)
    return problems


def check_first_deliveries(events: Iterable[Event], *, is_strict: bool) -> list[str]:
    """Per key, messages are delivered for the first time in store order.

    Under the strict order that is the order of sending, over all partitions that the key was in;
    else it is the order within each partition, and retries do not count.
    """
    seen: set[tuple[str, str]] = set()
    last: dict[tuple[str, str], tuple[int, str]] = {}
    problems = []
    for event in _deliveries(events):
        if (event.key, event.id) in seen or (not is_strict and _RETRY in event.partition):
            continue
        seen.add((event.key, event.id))
        line = (event.key, "" if is_strict else event.partition)
        place = counter_of(event.id) if is_strict else event.sequence
        before = last.get(line)
        if before is not None and place < before[0]:
            problems.append(f"{event.key}: {event.id} came first after {before[1]}")
        last[line] = place, event.id
    return problems


def check_stored_order(events: Iterable[Event]) -> list[str]:
    """Within each partition a key's confirmed messages lie in the order of sending."""
    lines: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if (event.f, event.type) == ("send", "ok"):
            place = (event.sequence, counter_of(event.id), event.id)
            lines[event.partition, event.key].append(place)
    problems = []
    for (partition, key), line in sorted(lines.items()):
        for (_, before, first), (_, after, second) in pairwise(sorted(line)):
            if after < before:
                problems.append(f"{partition}, {key}: {second} is stored behind {first}")
    return problems


def check_owners(events: Iterable[Event]) -> list[str]:
    """A partition has one owner at a time: tokens never go back, and each is one process's."""
    newest: dict[str, Event] = {}
    owner: dict[tuple[str, int], str] = {}
    problems = []
    for event in _deliveries(events):
        if not event.token:
            continue
        before = newest.get(event.partition)
        if before is not None and event.token < before.token:
            problems.append(
                f"{event.partition}: {event.process} was handed {event.id} under token "
                f"{event.token} after {before.process} was under {before.token}"
            )
        else:
            newest[event.partition] = event
        first = owner.setdefault((event.partition, event.token), event.process)
        if first != event.process:
            problems.append(
                f"{event.partition}: token {event.token} is both {first}'s and {event.process}'s"
            )
    return problems


def check_acks(events: Iterable[Event]) -> list[str]:
    """An ack that was accepted carries the newest token of its partition."""
    newest: dict[str, int] = {}
    begun: dict[tuple[str, str], int] = {}
    problems = []
    for event in events:
        if (event.f, event.type) == ("pull", "ok"):
            newest[event.partition] = max(newest.get(event.partition, 0), event.token)
        elif event.f == "settle" and event.type == "invoke":
            begun[event.process, event.id] = newest.get(event.partition, 0)
        elif event.f == "settle" and event.type == "ok" and event.token:
            known = begun.get((event.process, event.id), 0)
            if event.token < known:
                problems.append(
                    f"{event.partition}: an ack of {event.id} under token {event.token} was "
                    f"accepted when {known} was granted"
                )
    return problems


def check_one_at_a_time(events: Iterable[Event], *, is_strict: bool = True) -> list[str]:
    """One process has at most one message of a key in hand.

    Under best effort that holds within a partition: while a broker is away, a key's messages go to
    another one, and may be in the same hands.
    """
    in_hand: dict[tuple[str, str, str], str] = {}
    problems = []
    for event in events:
        line = (event.process, event.key, "" if is_strict else event.partition)
        if (event.f, event.type) == ("pull", "ok") and event.key:
            if line in in_hand:
                problems.append(f"{event.process} has {in_hand[line]} and {event.id} in hand")
            in_hand[line] = event.id
        elif event.f in {"handle", "nack"} and in_hand.get(line) == event.id:
            del in_hand[line]
        elif event.f == "start":
            # Another process under that name: what the one before had in hand is gone.
            in_hand = {key: id for key, id in in_hand.items() if key[0] != event.process}
    return problems


def check_complete(events: Iterable[Event]) -> list[str]:
    """Whatever was confirmed was handled."""
    confirmed, handled = set(), set()
    for event in events:
        if (event.f, event.type) == ("send", "ok"):
            confirmed.add(event.id)
        elif (event.f, event.type) == ("handle", "ok"):
            handled.add(event.id)
    missing = sorted(confirmed - handled)
    return [f"never handled: {', '.join(missing[:5])} ({len(missing)} in all)"] if missing else []


def _deliveries(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if (event.f, event.type) == ("pull", "ok"))

"""Every judge lets a good history pass, and catches each violation planted in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.checkers import (
    check_ack_safety,
    check_all,
    check_drained,
    check_gaps,
    check_log_agreement,
    check_order,
    total_queue,
)
from tests.robustness.history import Event, HistoryWriter, read_history

DRAINED: dict[str, Any] = {
    "groups": [
        {"group": "g", "partition": "s", "lag": 0, "redeliveries_pending": 0},
    ],
    "subscriptions": [
        {"consumer": "c0", "partition": "s", "settled": 3, "next_pull": 3},
    ],
    "messages_waiting": 0,
    "messages_left": 0,
}


def send(id: str, outcome: str = "ok", sequence: int = -1) -> list[Event]:
    return [
        Event("p0", "invoke", "send", id),
        Event("p0", outcome, "send", id, partition="s", sequence=sequence),
    ]


def pull(id: str, sequence: int) -> Event:
    return Event("c0", "ok", "pull", id, partition="s", sequence=sequence, group="g")


def handle(id: str) -> Event:
    return Event("c0", "ok", "handle", id, group="g")


def read(id: str, sequence: int) -> Event:
    return Event("reader", "ok", "read", id, partition="s", sequence=sequence)


def good() -> list[Event]:
    """Two confirmed, one unknown that was stored, one refused, one unknown that was not."""
    return [
        *send("p0-0", sequence=0),
        *send("p0-1", sequence=1),
        *send("p0-2", "info"),
        *send("p0-3", "fail"),
        *send("p0-4", "info"),
        *(pull(f"p0-{i}", i) for i in range(3)),
        *(handle(f"p0-{i}") for i in range(3)),
        *(read(f"p0-{i}", i) for i in range(3)),
    ]


def without(events: list[Event], f: str, id: str) -> list[Event]:
    return [event for event in events if (event.f, event.id) != (f, id)]


def test_a_good_history_passes_every_judge() -> None:
    assert check_all(good(), DRAINED, groups=["g"]) == []


def test_total_queue_counts_what_became_of_each() -> None:
    found = total_queue(good())

    assert (len(found.attempted), len(found.confirmed), len(found.refused)) == (5, 2, 1)
    assert found.unknown == {"p0-2", "p0-4"}
    assert found.recovered == {"p0-2"}
    assert "confirmed 2" in found.summary()


def test_a_send_without_any_outcome_counts_as_unknown() -> None:
    assert total_queue([Event("p0", "invoke", "send", "p0-9")]).unknown == {"p0-9"}


@pytest.mark.parametrize(
    ("lost", "where"),
    [("p0-0", "prefix"), ("p0-1", "middle"), ("p0-2", "postfix")],
)
def test_a_confirmed_message_that_is_lost_is_caught_and_located(lost: str, where: str) -> None:
    events = [event for i in range(3) for event in send(f"p0-{i}", sequence=i)]
    events += [read(f"p0-{i}", i) for i in range(3)]
    events = without(events, "read", lost)

    assert total_queue(events).lost == {lost}
    assert f"1 {where}" in total_queue(events).problems()[0]


VIOLATIONS: dict[str, tuple[Callable[[list[Event]], list[Event]], str]] = {
    "lost": (lambda h: without(h, "read", "p0-1"), "1 confirmed are lost"),
    "never sent": (lambda h: [*h, read("p9-0", 3), handle("p9-0")], "1 unexpected: p9-0"),
    "stored twice": (lambda h: [*h, read("p0-1", 3)], "1 duplicated: p0-1"),
    "refused and stored": (
        lambda h: [*h, read("p0-3", 3), handle("p0-3")],
        "1 resurrected: p0-3",
    ),
    "two ids in one place": (lambda h: [*h, pull("p0-4", 1)], "s/1 is p0-1 and p0-4"),
    "a receipt for another place": (
        lambda h: [*h, *send("p0-5", sequence=2)],
        "s/2 is p0-2 and p0-5",
    ),
    "settled and not handled": (
        lambda h: without(h, "handle", "p0-2"),
        "settled for g, but nobody handled it: p0-2",
    ),
    "a gap": (lambda h: without(h, "read", "p0-0"), "s has gaps: 0"),
    "out of order": (
        lambda h: [
            *without(without(h, "read", "p0-0"), "read", "p0-1"),
            read("p0-1", 0),
            read("p0-0", 1),
        ],
        "s: p0-0 lies behind p0-1",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_caught(name: str) -> None:
    plant, expected = VIOLATIONS[name]

    problems = check_all(plant(good()), DRAINED, groups=["g"])

    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"groups": [DRAINED["groups"][0] | {"lag": 7}]}, "lags by 7"),
        ({"groups": [DRAINED["groups"][0] | {"redeliveries_pending": 2}]}, "has 2 redeliveries"),
        ({"messages_waiting": 3}, "3 messages wait"),
        ({"messages_left": 1}, "1 messages are left to do"),
        ({"subscriptions": [DRAINED["subscriptions"][0] | {"next_pull": 5}]}, "c0 holds 2 of s"),
    ],
)
def test_what_is_not_drained_is_caught(change: dict[str, Any], expected: str) -> None:
    assert expected in check_drained(DRAINED | change)[0]


def test_the_same_place_told_twice_alike_is_no_problem() -> None:
    assert check_log_agreement([*send("p0-0", sequence=0), pull("p0-0", 0), read("p0-0", 0)]) == []


def test_what_another_group_handled_does_not_count() -> None:
    events = [Event("c1", "ok", "handle", "p0-0", group="other")]

    assert check_ack_safety(events, [("g", "p0-0")])


def test_numbers_before_the_start_are_caught() -> None:
    assert check_gaps([read("p0-0", 2), read("p0-1", 4)], {"s": 3}) == [
        "s has gaps: 3",
        "s has sequences before 3: [2]",
    ]


def test_order_is_judged_per_producer_and_leaves_retries_alone() -> None:
    events = [read("p0-5", 0), read("p1-0", 1), read("p0-6", 2)]
    events.append(Event("r", "ok", "read", "p0-1", partition="%retry%s%g", sequence=0))

    assert check_order(events) == []


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "p0.jsonl", "p0") as writer:
        writer.write("invoke", "send", "p0-0")
        writer.write("ok", "send", "p0-0", partition="s", sequence=0)

    events = read_history([tmp_path / "p0.jsonl"])

    assert [(e.type, e.f, e.id, e.partition, e.sequence) for e in events] == [
        ("invoke", "send", "p0-0", "", -1),
        ("ok", "send", "p0-0", "s", 0),
    ]


def test_a_line_that_is_no_event_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p0.jsonl").write_text('{"t": 1, "process"')

    with pytest.raises(ValueError, match="not an event"):
        read_history([tmp_path / "p0.jsonl"])

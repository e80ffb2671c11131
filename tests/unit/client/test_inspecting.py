"""What commands and the administration API derive from the same answers, derived once."""

from datetime import UTC, datetime

import pytest

from pulque.client.inspecting.dead_letters import death_of
from pulque.client.inspecting.delayed_messages import DueCount as Count
from pulque.client.inspecting.delayed_messages import Fate, added_up, outcome_of
from pulque.client.inspecting.groups import (
    ConsumerState,
    GroupState,
    GroupTotals,
    totals_of,
)
from pulque.client.inspecting.stored_messages import damaged_of, text_or_base64
from pulque.model.names import ConsumerId, Group, PartitionName, Subject
from pulque.model.positions import ConsumeSequence
from tests.unit.cli.fakes import AT_MS, stored

NOON = datetime(2027, 1, 31, 12, tzinfo=UTC)
ONE = datetime(2027, 1, 31, 13, tzinfo=UTC)


def state(group: str, lag: int, held: int, *consumers: tuple[str, float | None]) -> GroupState:
    return GroupState(
        PartitionName("orders"),
        Group(group),
        "once",
        ConsumeSequence(0),
        ConsumeSequence(9),
        lag,
        held,
        tuple(ConsumerState(ConsumerId(name), 1, silent) for name, silent in consumers),
    )


def test_the_partitions_of_a_group_are_added_up() -> None:
    states = [
        state("b", 1, 2, ("x", 0.5), ("gone", None)),
        state("a", 0, 0),
        state("b", 10, 20, ("x", 0.0), ("y", 1.0)),
    ]

    assert totals_of(states) == [
        GroupTotals(Group("a"), "once", 1, 0, 0, 0),
        GroupTotals(Group("b"), "once", 2, 11, 22, 2),
    ]
    assert totals_of([]) == []


def test_why_a_message_is_dead_stands_in_its_headers() -> None:
    (dead,) = stored(b"x", headers={"pulque.dead": "attempts", "pulque.reason": "no stock"})
    (plain,) = stored(b"x")

    assert death_of(dead) == (AT_MS, 1, "attempts", "no stock")
    assert death_of(plain) == (AT_MS, 1, "", "")


def test_what_cannot_be_read_stands_in_the_status() -> None:
    rows = [{"partition": "orders", "first_sequence": 3, "end": 5, "more": "later"}]

    assert damaged_of({"damaged": rows}) == [("orders", 3, 5)]
    assert damaged_of({}) == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"", ("", None)),
        ("é".encode(), ("é", None)),
        (b"\xff", (None, "/w==")),
    ],
)
def test_a_body_is_text_or_base64(body: bytes, shown: tuple[str | None, str | None]) -> None:
    assert text_or_base64(body) == shown


def test_the_counts_of_several_delay_servers_are_added_up() -> None:
    a, b = Subject("a"), Subject("b")

    assert added_up(
        [Count(ONE, a, 1), Count(NOON, b, 2), Count(ONE, a, 3), Count(NOON, a, 4)]
    ) == [
        Count(NOON, a, 4),
        Count(NOON, b, 2),
        Count(ONE, a, 4),
    ]


def test_every_fate_has_a_name() -> None:
    assert [outcome_of(each) for each in Fate] == [each.name.lower() for each in Fate]
    assert {outcome_of(each) for each in Fate} == {
        *("cancelled", "already_cancelled", "too_late", "unknown", "moved")
    }

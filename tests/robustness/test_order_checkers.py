"""The judges of order find every violation that is planted, and none where there is none."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.robustness.history import Event
from tests.robustness.order_checkers import check_order_of_keys

PLACE = "g1/orders"


def history() -> list[Event]:
    """Return a clean one: two keys, a hand-over, a redelivery."""
    events = []
    for number in range(6):
        key = f"p0.{number % 2}"
        sent = Event("p0", "ok", "send", f"p0-{number}", PLACE, number, key=key)
        events.append(sent)
    for number, (process, token) in enumerate([("c0", 1)] * 3 + [("c1", 2)] * 3):
        events += delivery(process, number, token)
    events[-6:-6] = delivery("c1", 2, 2)  # once more, by the new owner
    return [replace(event, t=at + 1) for at, event in enumerate(events)]


def delivery(process: str, number: int, token: int) -> list[Event]:
    pulled = Event(
        process, "ok", "pull", f"p0-{number}", PLACE, number, key=f"p0.{number % 2}", token=token
    )
    return [
        pulled,
        replace(pulled, f="handle"),
        replace(pulled, f="settle", type="invoke"),
        replace(pulled, f="settle"),
    ]


def swap(first: int, second: int) -> Callable[[list[Event]], list[Event]]:
    """Have two messages delivered in each other's place."""

    def change(events: list[Event]) -> list[Event]:
        names = {f"p0-{first}": f"p0-{second}", f"p0-{second}": f"p0-{first}"}
        return [
            event if event.f == "send" else replace(event, id=names.get(event.id, event.id))
            for event in events
        ]

    return change


def store_backwards(events: list[Event]) -> list[Event]:
    return [replace(e, sequence=10 - e.sequence) if e.f == "send" else e for e in events]


def let_the_old_owner_go_on(events: list[Event]) -> list[Event]:
    return [*events, *delivery("c0", 4, 1)]


def share_a_token(events: list[Event]) -> list[Event]:
    return [replace(e, token=1) if e.token else e for e in events]


def ack_late(events: list[Event]) -> list[Event]:
    return [*events, *delivery("c0", 0, 1)[2:]]


def take_two(events: list[Event]) -> list[Event]:
    first = next(at for at, event in enumerate(events) if event.f == "handle")
    return [event for at, event in enumerate(events) if at != first]


def lose_one(events: list[Event]) -> list[Event]:
    return [event for event in events if event.id != "p0-5" or event.f == "send"]


def test_a_clean_history_passes() -> None:
    assert check_order_of_keys(history(), is_strict=True) == []
    assert check_order_of_keys(history(), is_strict=False) == []


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (swap(1, 3), "came first after"),
        (store_backwards, "stored behind"),
        (let_the_old_owner_go_on, "under token 1 after"),
        (share_a_token, "both c0's and c1's"),
        (ack_late, "when 2 was granted"),
        (take_two, "in hand"),
        (lose_one, "never handled: p0-5"),
    ],
)
def test_what_is_planted_is_found(
    plant: Callable[[list[Event]], Sequence[Event]], words: str
) -> None:
    problems = check_order_of_keys(list(plant(history())), is_strict=True)
    assert any(words in problem for problem in problems), problems

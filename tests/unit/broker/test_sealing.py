"""A new segment of facts begins with the subscriptions of the instant at which it begins."""

from pulque.broker.housekeeping import opened_in_steps
from pulque.model.actions import Action, SubscriptionId, SubscriptionOpened
from pulque.model.names import ConsumerId, Group
from pulque.model.positions import PartitionId
from pulque.rules.consumption import Consumption
from pulque.storage.logs.fact_codec import decode_action

MANY = 300


def opened(number: int, incarnation: int = 1) -> Action:
    consumer = ConsumerId(f"c{number}")
    return SubscriptionOpened(
        SubscriptionId(number), PartitionId(1), Group("g"), consumer, incarnation
    )


def test_what_changes_between_two_steps_is_in_what_a_segment_begins_with() -> None:
    consumption = Consumption()
    for number in range(MANY):
        consumption.handle(opened(number))
    steps = opened_in_steps(consumption)
    changes = [opened(0, incarnation=2), opened(MANY), opened(MANY - 1, incarnation=2)]
    count = 0
    found: list[bytes] = []
    while not found:
        try:
            next(steps)
        except StopIteration as done:
            found = done.value
        else:
            count += 1
            consumption.handle(changes.pop(0))

    assert count == 3
    assert [decode_action(each) for each in found] == list(consumption.open_facts())
    assert len(found) == MANY + 1

"""New segments of the action log: each begins with all subscriptions that are open.

There may be hundreds of thousands of them. They are made into bytes a few at a time, between the
requests of others; only where each stands in the file is found out at the instant of the change.
"""

from pulque.net.steps import Steps, in_slices
from pulque.rules.consumption import Consumption
from pulque.storage.logs.fact_codec import encode_action

__all__ = ["opened_in_steps"]


def opened_in_steps(consumption: Consumption) -> Steps[list[bytes]]:
    """Return what a segment that is started before the next step has to begin with, encoded."""
    made: dict[int, tuple[int, bytes]] = {}
    for some in in_slices(list(consumption.subscriptions.values())):
        for each in some:
            made[each.id] = (each.incarnation, encode_action(consumption.open_fact(each)))
        yield
    found = []
    for each in consumption.subscriptions.values():
        incarnation, fact = made.get(each.id, (-1, b""))
        # Meanwhile some came, and some are another run of their consumer.
        if incarnation != each.incarnation:
            fact = encode_action(consumption.open_fact(each))
        found.append(fact)
    return found

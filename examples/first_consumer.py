"""Receive the messages that first_producer.py sends.

    python examples/first_consumer.py

Start it several times at once: the messages are shared among all consumers of the group.
"""

from itertools import islice

import pulque

with (
    pulque.connect() as client,
    client.consumer("tea.ordered", group="kitchen") as consumer,
):
    # Without islice this goes on for ever, as a consumer does.
    for message in islice(consumer, 1000):
        print(message.key or "-", message.body.decode())
        message.ack()  # done with it; without this it will come again

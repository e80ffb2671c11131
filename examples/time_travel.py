"""Read again what was handled already: set a group back to an instant.

python examples/time_travel.py
"""

import time
from datetime import UTC, datetime, timedelta

import pulque

with pulque.connect() as client:
    client.send("page.viewed", b"home")
    time.sleep(0.01)
    deployed = client.send("page.viewed", b"prices")
    client.send("page.viewed", b"order")

    with client.consumer("page.viewed", group="counters") as consumer:
        messages = [message for _ in range(3) for message in consumer.pull(1, timeout=10)]
        consumer.ack_all(messages)
        consumer.settle()
        print("handled", [message.body.decode() for message in messages])

        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=deployed.stored_at_ms)
        (would,) = client.reset("page.viewed", "counters", instant, dry_run=True)
        print(f"a reset would read {would.reread} messages again")
        client.reset("page.viewed", "counters", instant)

        again = [message for _ in range(2) for message in consumer.pull(1, timeout=10)]
        consumer.ack_all(again)
        print("again", [message.body.decode() for message in again])

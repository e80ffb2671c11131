"""Urgent messages first: ten levels of priority, whoever was first.

python examples/priorities.py
"""

import pulque

with pulque.connect() as client:
    client.send("parcel.sent", b"a postcard", priority=0)
    client.send("parcel.sent", b"a parcel")
    client.send("parcel.sent", b"a kidney", priority=9)

    with client.consumer("parcel.sent", group="couriers") as consumer:
        messages = consumer.pull(3, timeout=10)
        for message in messages:
            print(f"priority {message.priority}: {message.body.decode()}")
        consumer.ack_all(messages)

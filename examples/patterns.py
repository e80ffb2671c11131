"""One subscription for many subjects, those that come later included.

python examples/patterns.py
"""

import pulque

with pulque.connect() as client:
    client.send("sensor.kitchen", b"21.5")

    with client.consumer("sensor.*", group="thermostat") as consumer:
        for count, message in enumerate(consumer, start=1):
            print(message.subject, message.body.decode())
            message.ack()
            if count == 1:
                client.send("sensor.cellar", b"9.0")  # nobody has heard of it before
            if count == 2:
                break

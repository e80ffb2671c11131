"""Messages for later: one comes when it is due, one is cancelled before that.

python examples/delayed.py      (with `pulque up`, which has a delay server)
"""

import time
from datetime import timedelta

import pulque

with pulque.connect() as client:
    wanted = client.send("reminders", b"water the plants", delay=timedelta(seconds=2))
    unwanted = client.send("reminders", b"buy milk", delay=timedelta(seconds=2))
    fate = client.cancel(unwanted)
    print(f"a reminder is due in 2 s; another one was cancelled: {fate.name}")

    waiting = [client.delayed().show(each.id) for each in client.delayed("reminders").next()]
    print(f"waiting now: {[each.message.body.decode() for each in waiting if each]}")

    with client.consumer("reminders", group="me") as consumer:
        for message in consumer:
            is_early = time.time() * 1000 < wanted.due_at_ms
            print(f"{'EARLY' if is_early else 'not early'}: {message.body.decode()}")
            message.ack()
            break

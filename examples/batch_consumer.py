"""Handle many messages at once, say to write them into a database in one transaction.

python examples/batch_consumer.py
"""

import pulque

COUNT = 1000

with pulque.connect() as client:
    client.send_many("cups.washed", [f"cup {n}".encode() for n in range(COUNT)])

    total = 0
    with client.consumer("cups.washed", group="cupboard") as consumer:
        while total < COUNT:
            # Returns as soon as there are some, with none after a second.
            messages = consumer.pull(max_messages=250, timeout=1.0)
            rows = [(message.id, message.body) for message in messages]
            # … write the rows here; if that fails, ack nothing and all will come again …
            for message in messages:
                message.ack()
            total += len(rows)
            print(f"stored {len(rows)}, {total} in all")

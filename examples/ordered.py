"""What happens to one order is handled in its order; other orders do not wait for it.

python examples/ordered.py
"""

import pulque

with pulque.connect() as client:
    with client.producer() as producer:
        for event in ("created", "paid", "shipped"):
            for order in ("order-17", "order-18"):
                producer.send("order.book", event.encode(), order_key=order)

    with client.consumer("order.book", group="shipping", ordered=True) as consumer:
        first = consumer.pull(timeout=10)  # one message of each key at a time
        print("at once:", sorted(f"{each.order_key} {each.body.decode()}" for each in first))
        consumer.ack_all(first)

        rest = []
        while len(rest) < 4:
            for message in consumer.pull(timeout=10):
                rest.append(message)
                message.ack()
        told = [each.body.decode() for each in rest if each.order_key == "order-17"]
        print("order-17 then was", ", ".join(told))

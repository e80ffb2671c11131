"""A group that wants only some messages, one that wants each only once, and two that get all.

python examples/filters.py
"""

import pulque

with pulque.connect() as client:
    for body, tags in [(b"tea", ["hot"]), (b"ice", ["cold"]), (b"soup", ["hot", "large"])]:
        client.send("meal.ordered", body, tags=tags)

    with client.consumer("meal.ordered", group="stove", tags=["hot"]) as stove:
        for message in stove.pull(timeout=5):
            print(f"stove: {message.body.decode()}")
            message.ack()

    with client.consumer(
        "meal.ordered", group="bell", mode="once", all_tags=["hot", "large"]
    ) as bell:
        for message in bell.pull(timeout=5):
            print(f"bell, once: {message.body.decode()}")

    for name in ("screen-1", "screen-2"):
        with client.consumer("meal.ordered", broadcast=True, consumer_id=name) as screen:
            messages = screen.pull(timeout=5)
            print(f"{name}: {', '.join(message.body.decode() for message in messages)}")
            screen.ack_all(messages)

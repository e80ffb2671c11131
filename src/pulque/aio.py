"""The client for asyncio: the names of ``pulque``, to be awaited.

::

    from pulque import aio

    async with aio.connect() as client:
        await client.send("orders", b"two teas")
        async with client.consumer("orders", group="kitchen") as consumer:
            async for message in consumer:
                print(message.body)
                message.ack()

``ack`` and ``nack`` are not awaited: they only leave word, and the consumer tells the broker.
"""

from pulque.client.aio.client import Client, connect
from pulque.client.aio.consumer import Consumer
from pulque.client.aio.dead_letters import DeadLetters
from pulque.client.aio.delayed_messages import DelayedMessages
from pulque.client.aio.messages import Messages
from pulque.client.aio.pending_sends import PendingSend, PendingSends
from pulque.client.aio.producer import Producer

__all__ = [
    "Client",
    "Consumer",
    "DeadLetters",
    "DelayedMessages",
    "Messages",
    "PendingSend",
    "PendingSends",
    "Producer",
    "connect",
]

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

from pulque.client.aio_client import Client, connect
from pulque.client.aio_consumer import Consumer
from pulque.client.aio_dead import DeadLetters
from pulque.client.aio_delaying import DelayedMessages
from pulque.client.aio_messages import Messages
from pulque.client.aio_producer import PendingSend, PendingSends, Producer

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

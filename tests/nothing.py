"""Nothing comes: the broker has looked and holds the pull. A clock alone would not tell that."""

import asyncio
import threading
import time

import pulque
from pulque import aio

__all__ = ["check_nothing_comes", "check_nothing_comes_async", "what_comes"]

_LIMIT = 30.0
_PULL = 0.2
"""How long one pull waits: the check lasts about as long, on a busy machine longer."""


def check_nothing_comes(
    client: pulque.Client, consumer: pulque.Consumer, *, waiting: int = 1
) -> None:
    """Check that a broker has nothing for a consumer; see ``what_comes``."""
    assert what_comes(client, consumer, waiting=waiting) == []


def what_comes(
    client: pulque.Client, consumer: pulque.Consumer, *, waiting: int = 1
) -> list[bytes]:
    """Pull until something comes, or the broker holds the pull; return the bodies.

    Args:
        client: A client of the consumer's broker.
        consumer: Who pulls.
        waiting: How many pulls the broker holds then, those of other consumers included.
    """
    found: list[bytes] = []
    is_held = threading.Event()

    def pull() -> None:
        while True:
            found.extend(message.body for message in consumer.pull(timeout=_PULL))
            if found or is_held.is_set():
                return

    puller = threading.Thread(target=pull)
    puller.start()
    deadline = time.monotonic() + _LIMIT
    try:
        while not found and client.status()["pulls_waiting"] < waiting:
            assert time.monotonic() < deadline, "the broker never held the pull"
    finally:
        is_held.set()
        puller.join()
    return found


async def check_nothing_comes_async(client: aio.Client, consumer: aio.Consumer) -> None:
    """Do the same with an asyncio client, whose consumer is the only one that pulls."""
    found: list[bytes] = []
    is_held = asyncio.Event()

    async def pull() -> None:
        while True:
            found.extend(message.body for message in await consumer.pull(timeout=_PULL))
            if found or is_held.is_set():
                return

    pulling = asyncio.create_task(pull())
    try:
        async with asyncio.timeout(_LIMIT):
            while not found and not (await client.status())["pulls_waiting"]:
                pass
    finally:
        is_held.set()
        await pulling
    assert found == []

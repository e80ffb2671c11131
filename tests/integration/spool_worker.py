"""A process that sends numbered messages through a spool, and says so before and after each.

``python -m tests.integration.spool_worker URL SPOOL SUBJECT FIRST COUNT blocking|aio``. It writes
``-N`` before it hands in message N, ``+N`` when that has returned, and ``end`` when all have a
receipt. Whoever kills it knows from that which messages were taken in, but for one at most.
"""

import asyncio
import os
import sys

import pulque
from pulque import aio

KEYS = 7


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def send_blocking(url: str, spool: str, subject: str, first: int, count: int) -> None:
    with (
        pulque.connect(url, timeout=60) as client,
        client.producer(spool=spool, spool_sync=False, linger=0.001, max_batch=20) as producer,
    ):
        for number in range(first, first + count):
            say(f"-{number}")
            producer.send(subject, str(number).encode(), order_key=f"key {number % KEYS}")
            say(f"+{number}")
        producer.flush(60)
    say("end")


async def send_aio(url: str, spool: str, subject: str, first: int, count: int) -> None:
    async with (
        aio.connect(url, timeout=60) as client,
        client.producer(spool=spool, spool_sync=False, linger=0.001, max_batch=20) as producer,
    ):
        for number in range(first, first + count):
            say(f"-{number}")
            _ = await producer.send(
                subject, str(number).encode(), order_key=f"key {number % KEYS}"
            )
            say(f"+{number}")
            if not number % 10:
                await asyncio.sleep(0)
        await producer.flush(60)
    say("end")


if __name__ == "__main__":
    url, spool, subject, first, count, kind = sys.argv[1:]
    if kind == "aio":
        asyncio.run(send_aio(url, spool, subject, int(first), int(count)))
    else:
        send_blocking(url, spool, subject, int(first), int(count))

"""The same with asyncio: all names are as in the blocking client.

python examples/async_twin.py
"""

import asyncio

import pulque.aio

COUNT = 100


async def produce(client: pulque.aio.Client) -> None:
    for number in range(COUNT):
        await client.send("coffee.ordered", f"coffee {number}".encode())


async def consume(client: pulque.aio.Client) -> None:
    received = 0
    async with client.consumer("coffee.ordered", group="bar") as consumer:
        async for message in consumer:
            message.ack()
            received += 1
            if received == COUNT:
                break
    print(f"received {received}, the last one was {message.body.decode()}")


async def main() -> None:
    async with await pulque.aio.connect() as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(client))
        tasks.create_task(consume(client))


asyncio.run(main())

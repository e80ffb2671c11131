"""Requests that are answered by a task are answered or refused, whatever happens."""

import asyncio

from pulque.errors import LocalProtocolError, PulqueError
from pulque.serving.request_tasks import RequestTasks


async def found() -> int:
    return 7


async def test_an_answer_that_cannot_be_encoded_is_refused() -> None:
    refused: asyncio.Queue[PulqueError] = asyncio.Queue()
    problem = LocalProtocolError("7 does not fit")

    def answer(_: int) -> None:
        raise problem

    tasks = RequestTasks("broker")
    tasks.begin(found(), answer, refused.put_nowait)

    async with asyncio.timeout(20):
        assert await refused.get() is problem
    await tasks.close()

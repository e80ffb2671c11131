"""Dead letters of which some cannot be read: the others are shown all the same."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

import pulque
from pulque import aio
from pulque.model.names import Group, Subject, dead_partition
from pulque.model.positions import ConsumeSequence
from pulque.wire.dead import Dead, DeadListed
from pulque.wire.requests import Read, Request
from pulque.wire.responses import ReadBack, Response
from tests.malformed import torn
from tests.unit.client.fake_broker import FakeBroker

LETTERS = dead_partition(Subject("orders"), Group("kitchen"))


class BrokerWithLetters(FakeBroker):
    """Has dead letters, and answers a read with one message at a time."""

    def _handle(self, request: Request, peer: object) -> Response:
        if isinstance(request, Dead):
            end = self.partition(LETTERS).end
            first, count = request.first, min(request.last + 1, end) - request.first
            letters = ((ConsumeSequence(first), count),)
            return DeadListed(ConsumeSequence(0), ConsumeSequence(end), count, letters)
        return super()._handle(request, peer)  # type: ignore[arg-type]  # as it came

    def _read(self, read: Read) -> ReadBack:
        return super()._read(replace(read, max_messages=1))


@pytest.fixture(params=["torn", "damaged"])
def broker(request: pytest.FixtureRequest) -> Iterator[FakeBroker]:
    """A broker whose first letters cannot be read, and whose last one can."""
    with BrokerWithLetters() as broker:
        if request.param == "torn":
            broker.store(LETTERS, torn(LETTERS))
        else:
            broker.partition(LETTERS).end += 3
        broker.partition(LETTERS).stored.clear()  # the next batch has the same number
        broker.store_bodies(LETTERS, [b"cold soup"])
        yield broker


def test_letters_beside_those_that_cannot_be_read_are_shown(client: pulque.Client) -> None:
    letters = client.dead("orders", "kitchen")

    assert [each.body for each in letters.list()] == [b"cold soup"]
    assert letters.show(0) is None


async def test_letters_beside_those_that_cannot_be_read_are_shown_with_asyncio(
    broker: FakeBroker,
) -> None:
    async with aio.connect(broker.url) as client:
        letters = client.dead("orders", "kitchen")

        assert [each.body for each in await letters.list()] == [b"cold soup"]
        assert await letters.show(0) is None

"""A broker that says that it does not lead: its connection is as good as lost."""

import asyncio

import pytest

from pulque.client.aio.connection import AsyncConnection
from pulque.client.blocking.connection import Connection
from pulque.client.connection.url import Address
from pulque.errors import DisconnectedError, NotLeaderError, PulqueError
from pulque.wire import requests
from pulque.wire.responses import Response
from tests.unit.client.fake_broker import FakeBroker, Silence


def refuse(request: requests.Request) -> None:
    if isinstance(request, requests.Pull):
        raise Silence
    if isinstance(request, requests.Read | requests.Send):
        raise NotLeaderError("broker-b leads")


READ = requests.Read("orders", 0, 1, 1000, 0)
PULL = requests.Pull("kitchen", "me", 1, 1, 1000, 0, 0, (), (), 0)


@pytest.mark.parametrize("way", ["any request", "the short way"])
def test_a_blocking_connection_is_lost(broker: FakeBroker, way: str) -> None:
    broker.fault = refuse
    told: list[str] = []
    connection = Connection.open(Address("127.0.0.1", broker.port), client="test", timeout=5)
    connection.on_deposed = lambda: told.append("deposed")

    def ask() -> object:
        if way == "any request":
            return connection.request(READ, 5, lambda answer: answer)
        return connection.send_single("orders", b"", acks=0, timeout=5)

    with pytest.raises(DisconnectedError, match="broker-b leads"):
        ask()
    assert not connection.is_open
    assert told == ["deposed"]
    connection.close()


def test_a_connection_for_asyncio_is_lost_with_all_that_was_asked(broker: FakeBroker) -> None:
    broker.fault = refuse
    told: list[object] = []

    def take_in(answer: Response | PulqueError) -> None:
        told.append(type(answer))

    async def ask() -> None:
        address = Address("127.0.0.1", broker.port)
        connection = await AsyncConnection.open(address, client="test", timeout=5)
        connection.on_deposed = lambda: told.append("deposed")
        connection.on_lost = lambda error: told.append("lost")
        connection.post(PULL, take_in)
        with pytest.raises(DisconnectedError, match="broker-b leads"):
            await connection.request(READ, 5, lambda answer: answer)
        assert not connection.is_open
        await connection.close()

    asyncio.run(ask())
    assert told == ["deposed", DisconnectedError, "lost"]

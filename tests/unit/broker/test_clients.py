"""Who is connected, since when, from where, and what its consumers hold."""

import pytest

from pulque.errors import InvalidRequestError
from pulque.model.groups import EVERYTHING, Mode, RetrySettings, Start, StartKind
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection
from pulque.wire.clients import ConnectedConsumer
from pulque.wire.requests import Clients, Subscribe
from pulque.wire.responses import ClientsListed, Subscribed
from tests.unit.broker.running import Running, eventually, numbered
from tests.unit.broker.running import Start as StartBroker


def subscribe(subject: str, group: str = "g", consumer: str = "c") -> Subscribe:
    start = Start(StartKind.EARLIEST, 0)
    return Subscribe(
        group, consumer, 1, subject, Mode.SHARED, EVERYTHING, start, RetrySettings((), 255, 0)
    )


def row(subject: str, held: int, group: str = "g", consumer: str = "c") -> ConnectedConsumer:
    return ConnectedConsumer(ConsumerId(consumer), Group(group), Pattern(subject), held)


@pytest.mark.accepts("004-78")
async def test_clients_are_listed_with_what_they_pull_and_hold(start: StartBroker) -> None:
    clock = ManualClock()
    began_ms = clock.now_ms()
    running = await start(clock=clock)
    producer = await running.connect()
    for subject, count in (("orders", 3), ("audit.a", 2), ("audit.b", 1)):
        await producer.send(subject, numbered(count))
    clock.advance(1000)
    consumer = await running.connect()
    for subject in ("orders", "audit.*"):
        await consumer.ask(subscribe(subject), Subscribed)
    await consumer.pull("orders", "audit.a", "audit.b", covers=("orders", "audit.*"))
    clock.advance(500)

    listed = await producer.ask(Clients(), ClientsListed)

    first, second = listed.clients
    assert (listed.total, listed.has_more) == (2, False)
    assert (first.number, first.client, first.consumers) == (1, "raw", ())
    assert first.address.startswith("127.0.0.1:")
    assert (first.connected_at_ms, second.connected_at_ms) == (began_ms, began_ms + 1000)
    assert (first.silent_ms, second.silent_ms) == (0, 500)
    assert second.consumers == (row("orders", 3), row("audit.*", 3))


async def test_one_that_only_pulls_is_listed_too(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], last=0)

    (client,) = (await raw.ask(Clients(), ClientsListed)).clients

    assert client.consumers == (row("orders", 1),)


async def test_who_leaves_or_hangs_up_is_listed_no_more(running: Running) -> None:
    raw, other = await running.connect(), await running.connect()
    await raw.ask(subscribe("orders"), Subscribed)
    await raw.heartbeat(is_leaving=True)
    other.close()

    async def is_alone() -> bool:
        return (await raw.ask(Clients(), ClientsListed)).total == 1

    await eventually(is_alone)
    assert (await raw.ask(Clients(), ClientsListed)).clients[0].consumers == ()


async def test_pages_follow_each_other(running: Running) -> None:
    raws = [await running.connect() for _ in range(7)]
    numbers: list[int] = []
    after, has_more = 0, True
    while has_more:
        page = await raws[0].ask(Clients(after, 3), ClientsListed)
        numbers += [each.number for each in page.clients]
        after, has_more = numbers[-1], page.has_more
        assert page.total == 7

    assert numbers == list(range(1, 8))
    assert (await raws[0].ask(Clients(7, 3), ClientsListed)).clients == ()


async def test_a_page_has_its_limits(raw: RawConnection) -> None:
    for count in (0, 1001):
        with pytest.raises(InvalidRequestError, match="1 to 1000 are allowed"):
            await raw.ask(Clients(0, count), ClientsListed)


async def test_of_a_client_with_very_many_subjects_the_first_are_listed(
    raw: RawConnection,
) -> None:
    names = tuple(f"s{number}" for number in range(1500))
    await raw.pull(*names[:1500])

    (client,) = (await raw.ask(Clients(), ClientsListed)).clients

    assert len(client.consumers) == 1000

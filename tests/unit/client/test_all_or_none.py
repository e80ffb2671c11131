"""What concerns several brokers is done by all that know it, or, if one is away, by none."""

import socket
from collections.abc import Iterator

import pytest

import pulque
from pulque import aio
from pulque.errors import UnavailableError, UnknownGroupError
from pulque.model.groups import BROKERS_CHOICE, EVERYTHING, Mode
from pulque.model.positions import ConsumeSequence
from pulque.wire.dead import Dead, DeadListed
from pulque.wire.requests import ChangeGroup, Request
from pulque.wire.responses import GroupChanged, Response
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_cluster import FakeCluster


class Changes:
    """What a broker was asked to look at (False) and to change (True)."""

    def __init__(self, broker: FakeBroker, *, knows: bool = True) -> None:
        self.said: list[bool] = []
        self.knows = knows
        self._usual = broker._handle  # noqa: SLF001
        broker._handle = self._handle  # type: ignore[method-assign]  # noqa: SLF001

    def _handle(self, request: Request, peer: socket.socket) -> Response:
        match request:
            case ChangeGroup():
                self.said.append(request.has_mode or request.has_filter)
            case Dead():
                self.said.append(request.is_purge)
            case _:
                return self._usual(request, peer)
        if not self.knows:
            raise UnknownGroupError("never heard of it")
        if isinstance(request, Dead):
            return DeadListed(ConsumeSequence(0), ConsumeSequence(3), 3, ())
        return GroupChanged(Mode.SHARED, EVERYTHING, BROKERS_CHOICE)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(3) as found:
        yield found


async def change(cluster: FakeCluster, kind: str) -> None:
    if kind == "asyncio":
        async with await aio.connect(cluster.url, timeout=2.0) as client:
            await client.change_group("orders", "g", tags=["a"])
        return
    with pulque.connect(cluster.url, timeout=2.0) as blocking:
        blocking.change_group("orders", "g", tags=["a"])


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_those_that_know_the_group_are_asked_first(cluster: FakeCluster, kind: str) -> None:
    first, other, last = map(Changes, cluster.brokers)
    other.knows = False

    await change(cluster, kind)

    assert (first.said, other.said, last.said) == ([False, True], [False], [False, True])


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_nothing_is_changed_if_a_broker_is_away(cluster: FakeCluster, kind: str) -> None:
    first, _, last = map(Changes, cluster.brokers)
    cluster.kill(1)

    with pytest.raises(UnavailableError):
        await change(cluster, kind)

    assert True not in first.said + last.said


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_a_group_that_no_broker_knows_is_said_to_be_unknown(
    cluster: FakeCluster, kind: str
) -> None:
    changes = [Changes(broker, knows=False) for broker in cluster.brokers]

    with pytest.raises(UnknownGroupError):
        await change(cluster, kind)

    assert [each.said for each in changes] == [[False]] * 3


async def purge(cluster: FakeCluster, kind: str) -> int:
    if kind == "asyncio":
        async with await aio.connect(cluster.url, timeout=2.0) as client:
            return await client.dead("orders", "g").purge()
    with pulque.connect(cluster.url, timeout=2.0) as blocking:
        return blocking.dead("orders", "g").purge()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_dead_letters_are_purged_by_all(cluster: FakeCluster, kind: str) -> None:
    first, other, last = map(Changes, cluster.brokers)

    assert await purge(cluster, kind) == 9

    assert first.said == other.said == last.said == [False, True]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_no_dead_letter_is_purged_if_a_broker_is_away(
    cluster: FakeCluster, kind: str
) -> None:
    first, _, last = map(Changes, cluster.brokers)
    cluster.kill(1)

    with pytest.raises(UnavailableError):
        await purge(cluster, kind)

    assert True not in first.said + last.said

"""A watch at a lone broker is answered when there are partitions that the client does not know."""

import pytest

from pulque.errors import InvalidNameError
from pulque.model.routes import RouteKind
from pulque.testing.raw import RawConnection, expect
from pulque.wire.requests import Route, Watch
from pulque.wire.responses import Routed, Watched
from pulque.wire.routes import KnownRoute
from tests.unit.broker.running import Running, numbered

LONG_MS = 30_000
"""Longer than any test waits: whatever is answered was not answered by its time-out."""


def watch_of(
    subject: str, version: int, *, group: str = "g", wait_ms: int = LONG_MS, kind: int = 0
) -> Watch:
    known = KnownRoute(RouteKind(kind), subject, group, version)
    return Watch("client", "app", (known,), wait_ms)


async def version_of(raw: RawConnection, subject: str, group: str = "g") -> int:
    return (await raw.ask(Route(subject, group), Routed)).route.version


async def answer(raw: RawConnection, request_id: int) -> Watched:
    return expect(await raw.answer_to(request_id), Watched)


async def test_nothing_is_told_when_the_time_is_up(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    version = await version_of(raw, "orders")

    assert await raw.ask(watch_of("orders", version, wait_ms=1), Watched) == Watched(())


async def test_an_old_version_is_answered_at_once(raw: RawConnection) -> None:
    before = await version_of(raw, "orders.*")
    await raw.send("orders.eu", numbered(1))

    watched = await raw.ask(watch_of("orders.*", before), Watched)

    (changed,) = watched.changed
    assert (changed.kind, changed.group) == (RouteKind.REALTIME, "g")
    assert changed.route == (await raw.ask(Route("orders.*", "g"), Routed)).route


@pytest.mark.parametrize(
    ("subject", "appears"),
    [("orders", "orders#p9"), ("orders.*", "orders.eu"), ("orders", "orders"), ("*", "refunds")],
)
async def test_a_new_partition_ends_the_wait(
    running: Running, raw: RawConnection, subject: str, appears: str
) -> None:
    version = await version_of(raw, subject)
    request_id = await raw.put(watch_of(subject, version))
    # It stands in line once a later request of its connection is answered.
    await raw.status()
    other = await running.connect()

    await other.send(appears, numbered(1))

    (changed,) = (await answer(raw, request_id)).changed
    assert appears in [each.partition for each in changed.route.partitions]


async def test_partitions_of_others_do_not_end_the_wait(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(1))
    request_id = await raw.put(watch_of("orders", await version_of(raw, "orders")))
    await raw.status()
    other = await running.connect()

    await other.send("refunds", numbered(1))
    await other.send("orders#p9", numbered(1))

    (changed,) = (await answer(raw, request_id)).changed
    assert [each.partition for each in changed.route.partitions] == ["orders", "orders#p9"]


async def test_a_version_of_another_table_is_answered(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))

    watched = await raw.ask(watch_of("orders", 2**64 - 1), Watched)

    assert len(watched.changed) == 1


async def test_a_client_that_is_gone_is_not_waited_for(
    running: Running, raw: RawConnection
) -> None:
    other = await running.connect()
    await other.put(watch_of("orders", await version_of(raw, "orders")))
    await other.status()
    other.close()

    await raw.send("orders", numbered(1))

    assert await raw.status()


async def test_a_watch_of_what_is_no_subject_is_refused(raw: RawConnection) -> None:
    with pytest.raises(InvalidNameError):
        await raw.ask(watch_of("%retry%a%b", 0), Watched)


async def test_delay_servers_never_appear_at_a_lone_broker(raw: RawConnection) -> None:
    watch = watch_of("orders", 0, wait_ms=1, kind=RouteKind.DELAYED)

    assert await raw.ask(watch, Watched) == Watched(())

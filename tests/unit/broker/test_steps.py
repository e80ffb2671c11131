"""Requests with as much as they may have are handled in short steps, and with more not at all.

Others have their turn between two steps. That there are many of them does not depend on the
machine; that none is long is measured in processor time, several times what it takes.
"""

from collections.abc import Callable

import pytest

from pulque.broker.pulling.puller import PART
from pulque.errors import InvalidRequestError
from pulque.model.groups import Mode, StartKind
from pulque.model.groups import Start as StartAt
from pulque.model.ordered import OrderStrategy
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.model.routes import RouteKind
from pulque.testing.raw import RawConnection, pack_batch
from pulque.wire.groups import Subscribe, Subscribed
from pulque.wire.ordered import Lock, Locked, Ordered, OrderedReport
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Groups,
    Nacked,
    Pull,
    Request,
    Resend,
    Reset,
    Route,
    Seal,
    Send,
    Settle,
    Status,
    Wanted,
    Watch,
)
from pulque.wire.responses import Pulled, Sent
from pulque.wire.routes import KnownRoute
from tests.robustness.steps import LONGEST_STEP_MS, counted

SUBJECTS = 20_000
MOST = 10_000
TOO_MANY = 65_535
AT_ONCE = 1000
WIDE = 500
NAMES = [f"crowd.{number:05d}" for number in range(SUBJECTS)]

pytestmark = pytest.mark.slow


async def fill(raw: RawConnection) -> None:
    """Have a group at each of very many subjects."""
    for at in range(0, SUBJECTS, AT_ONCE):
        names = NAMES[at : at + AT_ONCE]
        batches = tuple((name, pack_batch(name, [b"x"])) for name in names)
        await raw.ask(Send(Acks.MEMORY, 60_000, batches), Sent)
    for at in range(0, SUBJECTS, PART):
        wanted = tuple(Wanted(name, FROM_SETTLED) for name in NAMES[at : at + PART])
        await raw.ask(a_pull(wanted), Pulled)


def a_pull(wanted: tuple[Wanted, ...]) -> Pull:
    return Pull("g", "c", 1, AT_ONCE, 2**20, 0, EARLIEST, wanted)


def a_pull_of(count: int) -> Pull:
    return a_pull(tuple(Wanted(NAMES[i % SUBJECTS], FROM_SETTLED) for i in range(count)))


def a_watch(count: int) -> Watch:
    names = (NAMES[i % SUBJECTS] for i in range(count))
    return Watch("w", "a", tuple(KnownRoute(RouteKind.REALTIME, n, "g", 0) for n in names), 1000)


def a_settle(count: int) -> Settle:
    nacked = tuple(Nacked(number, 0, "") for number in range(count))
    return Settle(NAMES[0], "g", "c", 1, Tenure(Epoch(0), StartCount(1)), 0, count - 1, nacked)


def a_send(prefix: str) -> Send:
    names = [f"{prefix}.{number}" for number in range(1024)]
    return Send(Acks.MEMORY, 0, tuple((name, pack_batch(name, [b"x"])) for name in names))


def a_reset(group: str, kind: StartKind, *, is_dry_run: bool = False) -> Reset:
    return Reset(group, "crowd.*", "", StartAt(kind, 0), is_dry_run)


REQUESTS: dict[str, tuple[Callable[[], Request], int]] = {
    "status": (Status, 20),
    "groups": (Groups, 75),
    "groups of a pattern": (lambda: Groups("crowd.*", "g"), 75),
    "groups of another": (lambda: Groups("other.*", "g"), 150),
    "a reset of an unknown group": (lambda: a_reset("nobody", StartKind.EARLIEST), 150),
    "a dry reset": (lambda: a_reset("g", StartKind.EARLIEST, is_dry_run=True), 300),
    "a reset": (lambda: a_reset("g", StartKind.LATEST), 600),
    "a seal": (Seal, SUBJECTS // 128),
    "a pull": (lambda: a_pull_of(MOST), 78),
    "a watch": (lambda: a_watch(MOST), 150),
    "a settle": (lambda: a_settle(MOST), 1),
    "a send": (lambda: a_send("crowd.new"), 16),
    "a route": (lambda: Route("crowd.*", "g", RouteKind.LOCAL), 1),
    "a pull of too many": (lambda: a_pull_of(TOO_MANY), 1),
    "a watch of too many": (lambda: a_watch(TOO_MANY), 1),
    "a settle of too many": (lambda: a_settle(TOO_MANY), 1),
    "a send of too many": (lambda: Send(Acks.MEMORY, 0, ((NAMES[0], b""),) * TOO_MANY), 1),
    "a resend of too many": (lambda: Resend(NAMES[0], "g", tuple(range(TOO_MANY))), 1),
}
"""Each with how many steps it takes at least."""


async def test_no_request_keeps_the_event_loop_for_long(
    raw: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.patience_s = 60.0
    await fill(raw)
    short: dict[str, int] = {}
    long: dict[str, float] = {}
    with counted(monkeypatch) as steps:
        for name, (make, least) in REQUESTS.items():
            answer, count, longest_ms = await steps.of(raw, make())
            print(f"{name}: {count} steps, the longest {longest_ms:.1f} ms")
            assert isinstance(answer, InvalidRequestError) == ("too many" in name)
            if count < least:
                short[name] = count
            if longest_ms > LONGEST_STEP_MS:
                long[name] = longest_ms

    assert not short
    assert not long


async def test_ordered_groups_of_many_partitions_are_reported_in_short_steps(
    raw: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = ["wide", *(f"wide#{number}" for number in range(1, WIDE))]
    batches = tuple((name, pack_batch(name, [b"x"])) for name in partitions)
    await raw.ask(Send(Acks.MEMORY, 60_000, batches), Sent)
    for group in ("g1", "g2", "g3", "g4"):
        await raw.ask(Subscribe(group, "c", 1, "wide", Mode.ORDERED), Subscribed)
        for name in partitions:
            await raw.ask(Lock(name, group, "c", 1, OrderStrategy.BEST_EFFORT), Locked)

    with counted(monkeypatch) as steps:
        report, count, longest_ms = await steps.of(raw, Ordered("wide", ""))

    assert isinstance(report, OrderedReport)
    assert [(row.partition, row.group) for row in report.rows] == [
        (name, group) for name in partitions for group in ("g1", "g2", "g3", "g4")
    ]
    assert count >= WIDE * 4 // 128
    assert longest_ms <= LONGEST_STEP_MS

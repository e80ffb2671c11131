"""Watches of very many routes are handled a few routes at a time.

That there are many steps does not depend on the machine; that none is long is measured in
processor time, several times what it takes.
"""

from collections.abc import Callable

import pytest

from pulque.errors import InvalidRequestError
from pulque.model.routes import RouteKind
from pulque.testing.raw import RawConnection
from pulque.wire.requests import Request, Status, Watch
from pulque.wire.responses import Watched
from pulque.wire.routes import KnownRoute
from tests.robustness.steps import LONGEST_STEP_MS, counted
from tests.unit.meta.running import register

MOST = 10_000
TOO_MANY = 65_535
STEPS = 2 * MOST // 128
LONG_MS = 30_000
"""Longer than any test waits."""


def a_watch(
    count: int,
    version: int,
    kind: RouteKind = RouteKind.REALTIME,
    ending: str = "",
    wait_ms: int = 0,
) -> Watch:
    names = (f"s{number}{ending}" for number in range(count))
    return Watch("w", "a", tuple(KnownRoute(kind, name, "g", version) for name in names), wait_ms)


REQUESTS: dict[str, tuple[Callable[[], Request], int]] = {
    "a watch of what differs": (lambda: a_watch(MOST, 5), STEPS),
    "a watch of what does not": (lambda: a_watch(MOST, 0), STEPS),
    "a watch of delayed sends": (lambda: a_watch(MOST, 5, RouteKind.DELAYED), STEPS),
    "a watch of patterns": (lambda: a_watch(MOST, 5, ending=".*"), STEPS),
    "a watch of followers": (lambda: a_watch(MOST, 5, RouteKind.FOLLOWERS), STEPS),
    "a watch of too many": (lambda: a_watch(TOO_MANY, 5), 1),
    "a status": (Status, 1),
}
"""Each with how many steps it takes at least."""


async def test_no_request_keeps_the_event_loop_for_long(
    raw: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.patience_s = 60.0
    await register(raw, "group-a")
    short: dict[str, int] = {}
    long: dict[str, float] = {}
    with counted(monkeypatch) as steps:
        for name, (make, least) in REQUESTS.items():
            answer, count, longest_ms = await steps.of(raw, make())
            print(f"{name}: {count} steps, the longest {longest_ms:.1f} ms")
            if "too many" in name:
                assert isinstance(answer, InvalidRequestError)
            if count < least:
                short[name] = count
            if longest_ms > LONGEST_STEP_MS:
                long[name] = longest_ms

    assert not short
    assert not long


async def test_a_watch_of_very_many_routes_hears_of_all_over_several_answers(
    raw: RawConnection,
) -> None:
    await register(raw, "group-a")
    known = {f"s{number}.*": 0 for number in range(3000)}
    answers = 0
    while 0 in known.values():
        routes = tuple(KnownRoute(RouteKind.REALTIME, *each) for each in _asked(known))
        watched = await raw.ask(Watch("w", "a", routes, LONG_MS), Watched)
        assert watched.changed
        known.update((each.route.subject, each.route.version) for each in watched.changed)
        answers += 1

    assert answers > 1


def _asked(known: dict[str, int]) -> list[tuple[str, str, int]]:
    return [(name, "g", version) for name, version in known.items()]

"""One client that asks for much does not stop the others: a probe beside each attacker.

The aim is 50 ms for 99 of 100 answers to a second client. A machine that runs other tests at the
same time is too slow to hold a test to that, so the bound here is ``SLOWEST_S``: a broker that
handles frames by their number instead of by time exceeds it many times over (19 to 30 s for
``Status``). The ``test_steps.py`` of broker, meta and delay server hold each step of a request to
less.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pulque.broker.pulling.puller import PART
from pulque.errors import InvalidRequestError
from pulque.model.groups import Start, StartKind
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.model.routes import RouteKind
from pulque.testing.process import BrokerProcess
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
    Send,
    Settle,
    Status,
    Wanted,
    Watch,
)
from pulque.wire.responses import (
    GroupsReport,
    Pulled,
    ResetDone,
    Sent,
    Watched,
)
from pulque.wire.routes import KnownRoute
from tests.robustness.brokers import starter
from tests.robustness.raw import RawClient, make_batch

SUBJECTS = 20_000
SLOWEST_S = 1.0
ATTACK_S = 2.0
_FRAMES = 256
_MANY = 65_535
_AT_ONCE = 1000
_LARGEST_ATTACK = 16 * 1024 * 1024
NAMES = [f"crowd.{number:05d}" for number in range(SUBJECTS)]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with very many subjects, and a group that is at each of them."""
    folder: Path = tmp_path_factory.mktemp("crowded")
    brokers = starter(folder)
    broker = next(brokers)()
    with RawClient(broker.url, timeout=60) as client:
        for at in range(0, SUBJECTS, _AT_ONCE):
            some = NAMES[at : at + _AT_ONCE]
            batches = tuple((name, make_batch(name, [b"x"])) for name in some)
            sent = client.expect(Sent, Send(Acks.MEMORY, 60_000, batches))
            assert not any(outcome.code for outcome in sent.outcomes)
        for at in range(0, SUBJECTS, PART):  # larger pulls are answered in parts
            wanted = tuple(Wanted(name, FROM_SETTLED) for name in NAMES[at : at + PART])
            client.expect(Pulled, Pull("g", "c", 1, _AT_ONCE, 2**20, 0, EARLIEST, wanted))
    yield broker
    next(brokers, None)


def a_reset(group: str, *, is_dry_run: bool) -> Reset:
    return Reset(group, "crowd.*", "", Start(StartKind.EARLIEST, 0), is_dry_run)


def a_pull() -> Pull:
    wanted = tuple(Wanted(NAMES[number % SUBJECTS], -1) for number in range(_MANY))
    return Pull("g", "c", 1, 1, 1, 0, EARLIEST, wanted)


def a_watch(count: int) -> Watch:
    known = [
        KnownRoute(RouteKind.REALTIME, NAMES[number % SUBJECTS], "g", 0) for number in range(count)
    ]
    return Watch("w", "attacker", tuple(known), 1000)


def a_settle() -> Settle:
    nacked = tuple(Nacked(number, 0, "") for number in range(_MANY))
    return Settle(NAMES[0], "g", "c", 1, Tenure(Epoch(0), StartCount(1)), 0, _MANY, nacked)


ATTACKS: dict[str, Callable[[], Request]] = {
    "status": Status,
    "groups": Groups,
    "groups of a pattern": lambda: Groups("crowd.*", "g"),
    "a reset of an unknown group": lambda: a_reset("nobody", is_dry_run=False),
    "a reset of very many partitions": lambda: a_reset("g", is_dry_run=True),
    "a pull from too many partitions": a_pull,
    "a watch of too many routes": lambda: a_watch(_MANY),
    "a watch of many routes": lambda: a_watch(2000),
    "a settle with too many nacks": a_settle,
    "a send of too many batches": lambda: Send(Acks.MEMORY, 0, ((NAMES[0], b""),) * _MANY),
    "a resend of too many": lambda: Resend(NAMES[0], "g", tuple(range(_MANY))),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_second_client_is_answered_in_time(crowded: BrokerProcess, attack: str) -> None:
    with RawClient(crowded.url) as attacker, RawClient(crowded.url, timeout=60) as probe:
        frame = attacker.frame(ATTACKS[attack]())
        frames = frame * max(1, min(_FRAMES, _LARGEST_ATTACK // len(frame)))
        threading.Thread(target=_send_all, args=(attacker, frames), daemon=True).start()
        threading.Thread(target=_read_all, args=(attacker,), daemon=True).start()
        waits = []
        until = time.monotonic() + ATTACK_S
        while time.monotonic() < until:
            began = time.monotonic()
            probe.send("probe", [b"x"], acks=Acks.MEMORY)
            waits.append(time.monotonic() - began)
            time.sleep(0.002)

    waits.sort()
    slow = waits[len(waits) * 99 // 100]
    print(f"{attack}: {len(waits)} answers, p99 {slow * 1000:.1f} ms, {waits[-1] * 1000:.1f} ms")
    assert slow < SLOWEST_S


def _send_all(client: RawClient, data: bytes) -> None:
    try:
        client.socket.sendall(data)
    except OSError:
        return  # the test is over


def _read_all(client: RawClient) -> None:
    try:
        while client.socket.recv(2**20):
            pass
    except OSError:
        return  # the test is over


@pytest.mark.parametrize("attack", [name for name in ATTACKS if "too many" in name])
def test_a_list_that_is_too_long_is_refused_and_the_connection_goes_on(
    crowded: BrokerProcess, attack: str
) -> None:
    with RawClient(crowded.url) as client:
        refused = client.ask(ATTACKS[attack]())

        assert isinstance(refused, InvalidRequestError)
        assert "65535" in str(refused)
        assert client.status()["partition_count"] >= SUBJECTS


def test_answers_over_many_turns_are_whole(crowded: BrokerProcess) -> None:
    with RawClient(crowded.url, timeout=60) as client:
        status = client.status()
        groups = client.expect(GroupsReport, Groups("", "g"))
        few = client.expect(GroupsReport, Groups("crowd.00000", ""))
        done = client.expect(ResetDone, a_reset("g", is_dry_run=False))

    assert status["messages_left"] >= SUBJECTS
    assert len(status["partitions"]) == len(status["groups"]) == _AT_ONCE
    assert len(groups.positions) == 10_000
    assert groups.is_cut
    assert [(each.partition, each.group) for each in few.positions] == [("crowd.00000", "g")]
    assert [row.partition for row in done.rows] == NAMES
    assert {row.target for row in done.rows} == {0}


def test_a_watch_hears_of_all_routes_that_differ_over_several_answers(
    crowded: BrokerProcess,
) -> None:
    known = dict.fromkeys(NAMES[:5000], 0)
    with RawClient(crowded.url, timeout=60) as client:
        answers = 0
        while any(version == 0 for version in known.values()):
            answers += 1
            routes = tuple(KnownRoute(RouteKind.REALTIME, *each) for each in _asked(known))
            watched = client.expect(Watched, Watch("w", "a", routes, 10_000))
            assert watched.changed
            known.update((each.route.subject, each.route.version) for each in watched.changed)

    assert answers > 1


def _asked(known: dict[str, int]) -> list[tuple[str, str, int]]:
    return [(name, "g", version) for name, version in known.items()]

"""Consumers keep connections and heartbeats to followers, and to nobody's trouble."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.client.receiving.heartbeat_schedule import Beats
from pulque.client.receiving.pull_options import PullOptions
from pulque.errors import RemoteProtocolError
from pulque.model.groups import BROKERS_CHOICE, EVERYTHING, FROM_EARLIEST, Mode
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.wire import requests
from pulque.wire.responses import Beaten, Unlocked
from tests.unit.client.fake_broker import LIMIT, FakeBroker
from tests.unit.client.fake_group import FakeGroup

OFTEN = 200
"""A lease in milliseconds: there is a heartbeat three times as often."""
KINDS = pytest.mark.parametrize("wishes", [{}, {"ordered": True}], ids=["shared", "ordered"])
HOW = pytest.mark.parametrize("how", ["blocking", "asyncio"])


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with FakeGroup(3, lease_ms=OFTEN) as group:
        yield group


def beats_at(broker: FakeBroker) -> list[requests.Heartbeat]:
    return [each for each in list(broker.requests) if isinstance(each, requests.Heartbeat)]


def wait_for_beats(broker: FakeBroker, more: int = 2) -> None:
    """Wait until some more heartbeats have come than there are now."""
    before = len(beats_at(broker))
    broker.wait_until(lambda: len(beats_at(broker)) >= before + more)


def wait_until_left(broker: FakeBroker) -> None:
    broker.wait_until(lambda: broker.connections == 0)


def while_consuming(
    how: str, group: FakeGroup, folder: Path, wishes: dict[str, Any], check: Callable[[], None]
) -> None:
    """Check something while a consumer runs."""
    if how == "blocking":
        with (
            pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client,
            client.consumer("orders", "kitchen", consumer_id="me", **wishes) as consumer,
        ):
            assert consumer.pull(timeout=0.1) == []
            check()
        return

    async def consume() -> None:
        async with aio.connect(group.url, name="test", timeout=LIMIT, state_dir=folder) as client:
            async with client.consumer(
                "orders", "kitchen", consumer_id="me", **wishes
            ) as consumer:
                assert await consumer.pull(timeout=0.1) == []
                await asyncio.to_thread(check)
            for member in group.members[1:]:
                await asyncio.to_thread(wait_until_left, member)

    asyncio.run(consume())


@pytest.mark.accepts("004-31")
@HOW
@KINDS
def test_heartbeats_reach_leaders_and_followers(
    group: FakeGroup, tmp_path: Path, how: str, wishes: dict[str, Any]
) -> None:
    def check() -> None:
        for member in group.members:
            wait_for_beats(member, 3)
            assert member.connections >= 1

    while_consuming(how, group, tmp_path, wishes, check)
    for member in group.members[1:]:
        hellos = [each for each in member.requests if isinstance(each, requests.Hello)]
        assert len(hellos) == 1, "the connection is kept"
        assert {(each.group, each.consumer) for each in beats_at(member)} == {("kitchen", "me")}
        assert not [each for each in member.requests if isinstance(each, requests.Pull)]
        wait_until_left(member)
    assert not [each for each in threading.enumerate() if each.name == "pulque-beats"]


@HOW
def test_a_follower_that_is_dead_is_tried_again_quietly(
    group: FakeGroup, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pulque.client")
    group.kill(1)

    def check() -> None:
        wait_for_beats(group.members[2], 5)
        assert not beats_at(group.members[1])
        group.members[1].listen_again()
        wait_for_beats(group.members[1])
        group.members[1].drop_all()
        wait_for_beats(group.members[1])

    while_consuming(how, group, tmp_path, {}, check)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(group.members[1].port) not in caplog.text


@HOW
def test_followers_come_and_go_with_the_route(group: FakeGroup, tmp_path: Path, how: str) -> None:
    group.following = set()
    group.tell()

    def check() -> None:
        wait_for_beats(group.members[0])
        group.following = {1}
        group.tell()
        wait_for_beats(group.members[1])
        assert not beats_at(group.members[2])
        group.following = {2}
        group.tell()
        wait_for_beats(group.members[2])
        wait_until_left(group.members[1])

    while_consuming(how, group, tmp_path, {}, check)


@HOW
def test_servers_that_know_of_no_followers_are_left_in_peace(
    group: FakeGroup, tmp_path: Path, how: str
) -> None:
    group.meta.follower_routes = None

    def check() -> None:
        wait_for_beats(group.members[0], 3)

    while_consuming(how, group, tmp_path, {}, check)
    asked = [each for each in group.meta.requests if isinstance(each, requests.Route)]
    assert [each.kind.name for each in asked].count("FOLLOWERS") == 1
    watched = [each for each in group.meta.requests if isinstance(each, requests.Watch)]
    assert {known.kind.name for each in watched for known in each.known} == {"REALTIME"}


# ── when whom ──────────────────────────────────────────────────────────────────────────────


def make_beats() -> Beats:
    options = PullOptions(
        Pattern("orders"),
        Group("kitchen"),
        ConsumerId("me"),
        7,
        10,
        1000,
        40,
        Mode.SHARED,
        EVERYTHING,
        FROM_EARLIEST,
        BROKERS_CHOICE,
    )
    return Beats(options, lambda: 1.0)


def test_followers_are_told_three_times_in_a_lease() -> None:
    beats = make_beats()
    assert beats.next_due() is None
    assert beats.follow(["a", "b"], 10.0) == []
    assert sorted(beats.due(10.0)) == ["a", "b"]
    beats.beaten("a", Beaten(30_000), 10.0)
    beats.beaten("b", Beaten(60_000), 10.0)
    assert beats.next_due() == 20.0
    assert beats.due(19.9) == []
    assert beats.due(20.0) == ["a"]
    assert beats.follow(["b", "c"], 20.0) == ["a"]
    assert beats.due(20.0) == ["c"]


def test_a_follower_that_fails_is_tried_less_and_less_often() -> None:
    beats = make_beats()
    beats.follow(["a"], 0.0)
    now, waits = 0.0, []
    for _ in range(8):
        beats.failed("a", now)
        due = beats.next_due()
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    beats.beaten("a", Beaten(3_000), now)
    beats.failed("a", now)
    assert beats.next_due() == pytest.approx(now + 0.2)


def test_what_comes_of_one_that_is_none_any_more_is_forgotten() -> None:
    beats = make_beats()
    beats.follow(["a"], 0.0)
    beats.follow([], 0.0)
    beats.failed("a", 0.0)
    beats.beaten("a", Beaten(1), 0.0)
    assert beats.next_due() is None


def test_another_answer_than_to_a_heartbeat_is_none() -> None:
    with pytest.raises(RemoteProtocolError):
        make_beats().beaten("a", Unlocked(True), 0.0)

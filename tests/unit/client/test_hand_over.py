"""A partition is another's once what runs here has ended, and its broker knows that."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.model.ordered import OrderStrategy
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT
from tests.unit.client.fake_group import FakeGroup

LOCK_MS = 600
"""A lock is renewed after a third of its time: that shows who still counts on it."""


@pytest.fixture(params=[OrderStrategy.STRICT, OrderStrategy.BEST_EFFORT])
def group(request: pytest.FixtureRequest) -> Iterator[FakeGroup]:
    """A group that keeps order; in best-effort order it has a pull client for retries, too."""
    with FakeGroup(1) as group:
        group.meta.order = request.param
        group.leader.lock_ms = LOCK_MS
        yield group


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def count(group: FakeGroup, kind: type[requests.Request]) -> int:
    return sum(isinstance(each, kind) for each in list(group.leader.requests))


def take_back(group: FakeGroup) -> None:
    """Give the partition to nobody; return when the consumer knows, and keeps its lock."""
    group.take_back()
    version = group.meta.version
    wait_until(
        lambda: any(
            isinstance(each, requests.Attend) and each.version == version
            for each in list(group.meta.requests)
        )
    )
    renewed = count(group, requests.Lock) + 2
    wait_until(lambda: count(group, requests.Lock) >= renewed)
    assert not count(group, requests.Unlock)


def check_settled_before(group: FakeGroup) -> None:
    """Check that the broker heard of the end of all that ran before the lock was released."""
    wait_until(lambda: count(group, requests.Unlock))
    asked = list(group.leader.requests)
    kinds = [type(each) for each in asked]
    before = asked[: kinds.index(requests.Unlock)]
    assert requests.Settle in kinds[: len(before)]
    # Whoever takes leave gives up all locks at the broker.
    assert not any(isinstance(each, requests.Heartbeat) and each.is_leaving for each in before)
    assert group.leader.acked == [("orders", 0)]


@pytest.mark.accepts("002-57")
def test_a_partition_is_kept_while_a_handler_works_on_a_message_of_it(
    group: FakeGroup, tmp_path: Path
) -> None:
    with pulque.connect(group.url, name="test", timeout=LIMIT, state_dir=tmp_path) as client:
        client.send("orders", b"0")
        with client.consumer("orders", "kitchen", ordered=True) as consumer:
            (running,) = consumer.pull(timeout=LIMIT)
            take_back(group)
            assert not running.is_abandoned
            running.ack()
            check_settled_before(group)


@pytest.mark.accepts("002-57")
async def test_the_async_twin_keeps_it_too(group: FakeGroup, tmp_path: Path) -> None:
    async with aio.connect(group.url, name="test", timeout=LIMIT, state_dir=tmp_path) as client:
        await client.send("orders", b"0")
        async with client.consumer("orders", "kitchen", ordered=True) as consumer:
            (running,) = await consumer.pull(timeout=LIMIT)
            await asyncio.to_thread(take_back, group)
            assert not running.is_abandoned
            running.ack()
            await asyncio.to_thread(check_settled_before, group)

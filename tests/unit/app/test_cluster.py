"""An application of a cluster: it pulls from all brokers, and defers to delay servers."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pulque
from tests.unit.client.fake_broker import LIMIT
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import FakeDelay, delayed_routes


async def test_an_application_handles_what_all_brokers_have(tmp_path: Path) -> None:
    with FakeCluster(2) as cluster:
        # Its consumers are made before anybody is connected to.
        app = pulque.App(cluster.url, name="app", state_dir=tmp_path)
        handled: list[bytes] = []

        @app.subscribe("orders", group="kitchen")
        async def handle(message: pulque.ReceivedMessage) -> None:
            handled.append(message.body)

        async with app:
            for n in range(6):
                await app.send("orders", f"{n}")
            deadline = time.monotonic() + LIMIT
            while len(handled) < 6:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        assert [cluster.bodies(number) for number in range(2)] == [3, 3]
        assert sorted(handled) == [b"%d" % n for n in range(6)]


async def test_retry_at_takes_a_message_to_a_delay_server(tmp_path: Path) -> None:
    when = datetime.now(UTC) + timedelta(days=3)
    with FakeCluster(1) as cluster, FakeDelay("d") as delay:
        cluster.meta.delayed_routes = delayed_routes([delay])
        app = pulque.App(cluster.url, name="app", state_dir=tmp_path)

        @app.subscribe("orders", group="kitchen")
        def handle(message: pulque.ReceivedMessage) -> None:
            raise pulque.RetryAt(when)

        @app.subscribe_batch("many", group="kitchen", max_messages=3, max_wait=0.1)
        def handle_all(messages: list[pulque.ReceivedMessage]) -> None:
            raise pulque.BatchFailed({messages[0]: pulque.RetryAt(when, "not yet")})

        async with app:
            await app.send("orders", "tea", delay=0)
            for _ in range(3):
                await app.send("many", "tea")
            deadline = time.monotonic() + LIMIT
            while len(cluster.brokers[0].acked) < 4:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        kept = {message.subject: due_ms for due_ms, message in delay.scheduled.values()}
        assert set(kept) == {"orders", "many"}
        assert all(abs(due_ms - when.timestamp() * 1000) <= 1 for due_ms in kept.values())
        assert cluster.brokers[0].nacked == []

"""The API in front of two brokers in memory, asked without a socket."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import pulque
from pulque.admin.app import create_app
from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.context import Context
from pulque.admin.server import AdminServer
from pulque.clock import SystemClock
from pulque.testing.broker import InProcessBroker
from tests.unit.admin.fakes import FakeCluster, server

NAMES = ("b1", "b2")


@dataclass
class Api:
    """What a test has of the API."""

    http: httpx.AsyncClient
    cluster: FakeCluster
    brokers: dict[str, InProcessBroker]

    async def get(self, path: str, status: int = 200, **query: Any) -> Any:
        answer = await self.http.get(f"/api/v1{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def ask(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        answer = await self.http.request(method, f"/api/v1{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    async def all_pages(self, path: str, **query: Any) -> list[list[Any]]:
        pages = []
        cursor: dict[str, Any] = {}
        while True:
            found = await self.get(path, **query, **cursor)
            pages.append(found["items"])
            if found["next"] is None:
                return pages
            cursor = {"cursor": found["next"]}
            assert len(pages) < 100

    def client(self, broker: str) -> pulque.Client:
        return pulque.connect(self.brokers[broker].url)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, InProcessBroker]]:
    """Two brokers; tests use subjects of their own."""
    with InProcessBroker() as first, InProcessBroker() as second:
        yield dict(zip(NAMES, (first, second), strict=True))


@pytest.fixture
async def api(running: dict[str, InProcessBroker]) -> AsyncIterator[Api]:
    cluster = FakeCluster({name: server(name, each.url) for name, each in running.items()})
    brokers = BrokerRequests(timeout=5.0)
    app = create_app(Context(cluster, brokers, SystemClock()))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7480") as http:
        yield Api(http, cluster, running)
    await brokers.close()


@contextlib.contextmanager
def serving(cluster: FakeCluster) -> Iterator[str]:
    """Serve the API on a socket, in a thread of its own; give its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    admin = AdminServer(cluster, SystemClock(), port=0)
    try:
        yield asyncio.run_coroutine_threadsafe(admin.start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(admin.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()

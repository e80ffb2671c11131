"""The pytest plugin: fixtures for programs that use Pulque, and for Pulque itself.

Installed with the package; ``-p no:pulque.testing.plugin`` leaves it out. It imports the broker
(``pip install pulque[server]``) only when a fixture is used.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import pulque
import pulque.aio

if TYPE_CHECKING:
    from pulque.testing.broker import InProcessBroker

__all__ = ["pulque_aio_client", "pulque_broker", "pulque_client", "pulque_url"]


def _async_fixture(function: Callable[..., AsyncIterator[Any]]) -> Any:
    """Make a fixture of an asynchronous function, by whichever plugin runs such tests."""
    try:
        import pytest_asyncio
    except ImportError:
        return pytest.fixture(function)  # that of anyio takes it as it is
    return pytest_asyncio.fixture(function)


@pytest.fixture
def pulque_broker(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[InProcessBroker]":
    """A broker in this process, with its files in memory and a clock that the test turns.

    ``PULQUE_URL`` and ``PULQUE_STATE_DIR`` are set while it lives, so that the program under
    test finds it with a plain ``pulque.connect()``.
    """
    try:
        from pulque.testing.broker import InProcessBroker
    except ModuleNotFoundError as error:
        pytest.fail(f"a broker needs pulque[server]: {error}", pytrace=False)
    broker = InProcessBroker()
    broker.start()
    monkeypatch.setenv("PULQUE_URL", broker.url)
    monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path_factory.mktemp("pulque-state")))
    try:
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def pulque_url(pulque_broker: "InProcessBroker") -> str:
    """Where ``pulque_broker`` listens."""
    return pulque_broker.url


@pytest.fixture
def pulque_client(pulque_url: str) -> Iterator[pulque.Client]:
    """A client of ``pulque_broker``."""
    with pulque.connect(pulque_url) as client:
        yield client


@_async_fixture
async def pulque_aio_client(pulque_url: str) -> AsyncIterator[pulque.aio.Client]:
    """A client of ``pulque_broker`` for asyncio; needs pytest-asyncio or anyio."""
    async with pulque.aio.connect(pulque_url) as client:
        yield client

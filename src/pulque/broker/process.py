"""Runs a broker as a process, until a signal ends it."""

import asyncio
from collections.abc import Callable

from pulque.broker.config import BrokerSettings
from pulque.broker.replicated_server import ReplicatedBroker
from pulque.broker.server import Broker
from pulque.serving.process import run_process, serve

__all__ = ["run_broker"]


def run_broker(settings: BrokerSettings, *, on_ready: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM or SIGINT.

    Args:
        settings: The broker's.
        on_ready: Called with the broker's URL once it serves, or follows whoever does.

    Raises:
        PulqueError: It cannot start, or its disk failed.
    """
    settings.check_replication()
    run_process(settings.log, lambda: _serve(settings, on_ready))


async def _serve(settings: BrokerSettings, on_ready: Callable[[str], None]) -> None:
    broker = ReplicatedBroker(settings) if settings.replication.is_on else Broker(settings)
    asyncio.get_running_loop().set_exception_handler(broker.callback_failed)
    await serve(broker, on_ready)

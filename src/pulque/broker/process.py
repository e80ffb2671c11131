"""Runs a broker as a process, until a signal ends it."""

import asyncio
from collections.abc import Callable

from pulque.broker.config import BrokerSettings
from pulque.broker.replicated_server import ReplicatedBroker
from pulque.broker.server import Broker
from pulque.net.garbage import ShortCollections
from pulque.net.process import allow_descriptors, loop_factory, stop_on_signals
from pulque.settings.logs import configure_logging

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
    configure_logging(settings.log)
    allow_descriptors()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(settings, on_ready))


async def _serve(settings: BrokerSettings, on_ready: Callable[[str], None]) -> None:
    broker = ReplicatedBroker(settings) if settings.replication.is_on else Broker(settings)
    loop = asyncio.get_running_loop()
    stop_on_signals(broker.stop)
    loop.set_exception_handler(broker.callback_failed)
    await broker.start()
    try:
        ShortCollections().begin()
        on_ready(broker.url)
        await broker.stopped()
    finally:
        await broker.close()

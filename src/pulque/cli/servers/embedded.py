"""A meta server, a broker and a delay server in one process: what ``pulque up`` runs."""

import asyncio
import os
from collections.abc import Callable

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.cli.servers.ports import port_above, port_below
from pulque.delay.config import DelaySettings
from pulque.delay.server import DelayServer
from pulque.meta.config import MetaSettings
from pulque.meta.server import MetaServer
from pulque.net.garbage import ShortCollections
from pulque.net.process import stop_on_signals
from pulque.serving.process import run_process
from pulque.settings.sources import load_settings
from pulque.storage.directory.identity import DirectoryIdentity
from pulque.storage.files import open_directory

__all__ = ["run_embedded"]

_META_DIRECTORY = "meta"
"""Where the meta server's files are, inside the broker's data directory."""
_DELAY_DIRECTORY = "delay"
"""Likewise the delay server's."""


def run_embedded(settings: BrokerSettings, *, on_ready: Callable[[str], None]) -> None:
    """Run all of them until SIGTERM or SIGINT.

    Args:
        settings: The broker's. Those of the others come from the environment.
        on_ready: Called with the broker's URL once it serves; it is the home of clients.

    Raises:
        PulqueError: They cannot start, or a disk failed.
    """
    settings.check_replication()
    run_process(settings.log, lambda: _serve(settings, on_ready))


async def _serve(settings: BrokerSettings, on_ready: Callable[[str], None]) -> None:
    _check_directory(settings)
    meta = MetaServer(_meta_settings(settings))
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    url = await meta.start()
    try:
        if stop.is_set():
            return
        address = url.removeprefix("pulque://")
        cluster = settings.cluster.model_copy(update={"meta": (address,)})
        settings = settings.model_copy(update={"cluster": cluster})
        await _serve_broker(settings, address, on_ready)
    finally:
        await meta.close()


async def _serve_broker(
    settings: BrokerSettings, meta: str, on_ready: Callable[[str], None]
) -> None:
    broker = Broker(settings)
    stop_on_signals(broker.stop)
    asyncio.get_running_loop().set_exception_handler(broker.callback_failed)
    await broker.start()
    try:
        await _serve_delay(settings, meta, broker, on_ready)
    finally:
        await broker.close()


async def _serve_delay(
    settings: BrokerSettings, meta: str, broker: Broker, on_ready: Callable[[str], None]
) -> None:
    """Run a delay server beside a broker until one of them stops."""
    delay = DelayServer(_delay_settings(settings, meta))
    await delay.start()
    tasks = [asyncio.ensure_future(each.stopped()) for each in (broker, delay)]
    try:
        ShortCollections().begin()
        on_ready(broker.url)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await delay.close()


def _check_directory(settings: BrokerSettings) -> None:
    """See that the directory may be ours before the meta server puts anything into it.

    Raises:
        DataDirectoryError: It is in use, or somebody else's.
    """
    files = open_directory(settings.storage.directory)
    files.lock()
    try:
        DirectoryIdentity.open(files)
    finally:
        files.unlock()


def _meta_settings(settings: BrokerSettings) -> MetaSettings:
    """Return the settings of the meta server: a port near by, and room beside the messages."""
    fallbacks = {
        "storage.directory": str(settings.storage.directory / _META_DIRECTORY),
        "listen.host": settings.listen.host,
        "listen.port": port_below(settings.listen.host, settings.listen.port),
        # The file is on this disk and nobody else's: late is busy, not away.
        "database.timeout": "30s",
    }
    return load_settings(MetaSettings, environ=os.environ, flags={}, fallbacks=fallbacks).settings


def _delay_settings(settings: BrokerSettings, meta: str) -> DelaySettings:
    """Return the settings of the delay server: a port near by, and room beside the messages.

    It takes no message that the broker would refuse when it is due.
    """
    fallbacks = {
        "storage.directory": str(settings.storage.directory / _DELAY_DIRECTORY),
        "storage.reserve": str(int(settings.storage.reserve)),
        "listen.host": settings.listen.host,
        "listen.port": port_above(settings.listen.host, settings.listen.port),
        "cluster.meta": meta,
        "limits.max_message": str(int(settings.limits.max_message)),
        "limits.max_batch": str(int(settings.limits.max_batch)),
        "limits.open_records": str(settings.limits.open_records).lower(),
    }
    return load_settings(DelaySettings, environ=os.environ, flags={}, fallbacks=fallbacks).settings

"""Load the settings of a server from a file, the environment and flags."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pulque.cli.common.interrupts import importing
from pulque.errors import ConfigError

if TYPE_CHECKING:
    from pulque.broker.config import BrokerSettings
    from pulque.delay.config import DelaySettings
    from pulque.meta.config import MetaSettings
    from pulque.settings.sources import Given, LoadedSettings

__all__ = [
    "DEFAULT_DELAY_DIRECTORY",
    "DEFAULT_DIRECTORY",
    "DEFAULT_META_DIRECTORY",
    "flags_of",
    "load_delay",
    "load_for_command",
    "load_meta",
]

DEFAULT_DIRECTORY = "pulque-data"
"""Where ``pulque up`` keeps messages if it is told nothing."""
DEFAULT_META_DIRECTORY = "pulque-meta"
"""Where ``pulque meta`` keeps the cluster if it is told nothing."""
DEFAULT_DELAY_DIRECTORY = "pulque-delay"
"""Where ``pulque delay`` keeps messages if it is told nothing."""
_META_DATABASE = "PULQUE_META__DATABASE__URL"


def load_delay(config: Path | None, flags: dict[str, "Given"]) -> "LoadedSettings[DelaySettings]":
    """Load the settings of ``pulque delay``."""
    with importing():
        from pulque.delay.config import DelaySettings
        from pulque.settings.sources import load_settings

    fallbacks = {} if config else {"storage.directory": DEFAULT_DELAY_DIRECTORY}
    return load_settings(
        DelaySettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def load_meta(config: Path | None, flags: dict[str, "Given"]) -> "LoadedSettings[MetaSettings]":
    """Load the settings of ``pulque meta``."""
    with importing():
        from pulque.meta.config import MetaSettings
        from pulque.settings.sources import load_settings

    has_place = config or "database.url" in flags or _META_DATABASE in os.environ
    fallbacks = {} if has_place else {"storage.directory": DEFAULT_META_DIRECTORY}
    return load_settings(
        MetaSettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def load_for_command(
    config: Path | None, flags: dict[str, "Given"], *, needs_file: bool = False
) -> "LoadedSettings[BrokerSettings]":
    """Load the settings of ``pulque up``, or those of ``pulque broker`` if there is a file."""
    with importing():
        from pulque.broker.config import BrokerSettings
        from pulque.settings.sources import load_settings

    fallbacks = {} if config or needs_file else {"storage.directory": DEFAULT_DIRECTORY}
    return load_settings(
        BrokerSettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def flags_of(
    data: str | None, port: int | None, set_values: list[str] | None
) -> dict[str, "Given"]:
    """Return what the options say, by key.

    Raises:
        ConfigError: A ``--set`` is not KEY=VALUE.
    """
    from pulque.settings.sources import Given

    flags: dict[str, Given] = {}
    for text in set_values or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r}: it must look like storage.retention=7d")
        flags[key.strip()] = Given(value.strip(), "--set")
    if data is not None:
        flags["storage.directory"] = Given(data, "--data")
    if port is not None:
        flags["listen.port"] = Given(port, "--port")
    return flags

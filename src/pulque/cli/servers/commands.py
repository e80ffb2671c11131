"""``pulque up``, ``broker``, ``delay`` and ``meta``: the commands that run servers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.interrupts import importing
from pulque.cli.common.options import ConfigFile, DataDirectory, Port, SetOption
from pulque.cli.common.output import print_ready
from pulque.cli.servers.settings import flags_of, load_delay, load_for_command, load_meta
from pulque.errors import UsageError

if TYPE_CHECKING:
    from pulque.broker.config import BrokerSettings
    from pulque.settings.sources import LoadedSettings

__all__ = ["broker", "delay", "meta", "up"]

DelayDirectory = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Where delayed messages rest (storage.directory)."),
]
MetaServers = Annotated[
    str | None,
    typer.Option(
        "--meta", metavar="HOST:PORT,…", help="Where the meta servers listen (cluster.meta)."
    ),
]
MetaDirectory = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Where its files go (storage.directory)."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="postgresql://user@host:5432/name (database.url)."
    ),
]


def up(
    *,
    brokers: Annotated[
        int | None,
        typer.Option(
            "--brokers",
            min=1,
            max=16,
            metavar="N",
            help="Run a small cluster: a meta server, N brokers and a delay server, each in a "
            "process of its own.",
            show_default=False,
        ),
    ] = None,
    data: DataDirectory = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Start all that there is, in one process: a meta server, a broker and a delay server.

    Keeps everything in ./pulque-data unless told otherwise. Prints one line when it serves,
    "ready pulque://127.0.0.1:7450", and stops cleanly on ctrl-C or SIGTERM. With cluster.meta set,
    the broker joins that cluster instead of one of its own.
    """
    loaded = load_for_command(config, flags_of(data, port, set_values))
    if brokers is not None:
        _serve_cluster(loaded, brokers, config, set_values or [])
    elif loaded.settings.cluster.meta:
        _serve(loaded)
    else:
        _serve_embedded(loaded)


def broker(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    data: DataDirectory = None,
    port: Port = None,
    set_values: SetOption = None,
) -> None:
    """Run a broker, with the settings of a file or with those of flags.

    Without cluster.meta it stands alone, else it joins the cluster of those meta servers. Flags
    come before the environment (PULQUE_BROKER__STORAGE__RETENTION=7d), which comes before the
    file. Prints one line when it serves, and stops cleanly on ctrl-C or SIGTERM.
    """
    if context.invoked_subcommand is not None:
        return
    if config is None and data is None:
        raise UsageError(
            "--config FILE is missing, and so is --data DIR; to try things out, use: pulque up"
        )
    _serve(load_for_command(config, flags_of(data, port, set_values), needs_file=True))


def delay(
    context: typer.Context,
    *,
    data: DelayDirectory = None,
    meta: MetaServers = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Run a delay server: it holds messages until they are due, then sends them to a broker.

    It belongs to the cluster of its meta servers. Keeps everything in ./pulque-delay unless told
    otherwise. Prints one line when it serves, "ready pulque://127.0.0.1:7460", and stops cleanly
    on ctrl-C or SIGTERM.
    """
    if context.invoked_subcommand is not None:
        return
    with importing():
        from pulque.delay.server import run_delay
        from pulque.settings.preflight import check_world
        from pulque.settings.sources import Given

    flags = flags_of(data, port, set_values)
    if meta is not None:
        flags["cluster.meta"] = Given(meta, "--meta")
    loaded = load_delay(config, flags)
    if not loaded.settings.cluster.meta:
        raise UsageError(
            "--meta HOST:PORT is missing (cluster.meta): a delay server asks meta servers where "
            "messages go; `pulque up` has all of them"
        )
    check_world(loaded)
    run_delay(loaded.settings, on_ready=print_ready)


def meta(
    *,
    data: MetaDirectory = None,
    database: DatabaseUrl = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Run a meta server: brokers register there, and clients learn who serves what.

    Keeps what it knows in ./pulque-meta unless told otherwise; several share one PostgreSQL, and
    keep in --data what they knew last, to be started while it is away. The password comes from
    PULQUE_META__DATABASE__PASSWORD or database.password_file. Prints one line when it serves,
    "ready pulque://127.0.0.1:7440", and stops cleanly on ctrl-C or SIGTERM.
    """
    with importing():
        from pulque.meta.server import run_meta
        from pulque.settings.preflight import check_world
        from pulque.settings.sources import Given

    flags = flags_of(data, port, set_values)
    if database is not None:
        flags["database.url"] = Given(database, "--database")
    loaded = load_meta(config, flags)
    check_world(loaded)
    run_meta(loaded.settings, on_ready=print_ready)


def _serve(loaded: "LoadedSettings[BrokerSettings]") -> None:
    with importing():
        from pulque.broker.process import run_broker
        from pulque.settings.preflight import check_world

    check_world(loaded)
    run_broker(loaded.settings, on_ready=print_ready)


def _serve_embedded(loaded: "LoadedSettings[BrokerSettings]") -> None:
    with importing():
        from pulque.cli.servers.embedded import run_embedded
        from pulque.settings.preflight import check_world

    check_world(loaded)
    run_embedded(loaded.settings, on_ready=print_ready)


def _serve_cluster(
    loaded: "LoadedSettings[BrokerSettings]",
    brokers: int,
    config: Path | None,
    set_values: list[str],
) -> None:
    with importing():
        from pulque.cli.servers.local_cluster import run_local_cluster

    settings = loaded.settings
    arguments = [] if config is None else ["--config", str(config)]
    for each in set_values:
        arguments += ["--set", each]
    run_local_cluster(
        settings.storage.directory,
        brokers=brokers,
        port=settings.listen.port,
        arguments=arguments,
        on_ready=print_ready,
    )

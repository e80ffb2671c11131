"""``pulque up`` and ``pulque broker``: the commands that serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.interrupts import importing
from pulque.cli.common.options import (
    ConfigFile,
    DataDirectory,
    OutputOption,
    Port,
    SetOption,
    Timeout,
    Url,
    open_client,
)
from pulque.cli.common.output import Output, print_json, print_line, print_ready
from pulque.cli.config import flags_of, load_for_command
from pulque.errors import UsageError

if TYPE_CHECKING:
    from pulque.broker.config import BrokerSettings
    from pulque.settings.sources import LoadedSettings

__all__ = ["broker_app", "up"]

broker_app = typer.Typer(
    help="Run a broker as its settings say, or tell a running one.", rich_markup_mode=None
)


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


@broker_app.callback(invoke_without_command=True)
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


@broker_app.command()
def seal(
    context: typer.Context,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Close the open segment of each running broker's message log, so that it can be archived."""
    with open_client(context, url, timeout) as client:
        ends = client.seal()
    for broker, end in ends.items():
        if output is Output.JSON:
            print_json({"broker_group": broker, "end": end})
        else:
            whose = f" of {broker}" if broker else ""
            print_line(f"sealed; the next segment{whose} begins at offset {end}")


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

"""``pulque up`` and ``pulque broker``: the commands that serve."""

from typing import TYPE_CHECKING

import typer

from pulque.cli.options import (
    ConfigFile,
    DataDirectory,
    OutputOption,
    Port,
    SetOption,
    Timeout,
    Url,
    open_client,
)
from pulque.cli.output import Output, print_json, print_line, print_ready
from pulque.cli.settings import flags_of, load_for_command
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
    data: DataDirectory = None,
    port: Port = None,
    config: ConfigFile = None,
    set_values: SetOption = None,
) -> None:
    """Start all that exists so far, in one process.

    Keeps messages in ./pulque-data unless told otherwise. Prints one line when it serves,
    "ready pulque://127.0.0.1:7450", and stops cleanly on ctrl-C or SIGTERM.
    """
    _serve(load_for_command(config, flags_of(data, port, set_values)))


@broker_app.callback(invoke_without_command=True)
def broker(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    data: DataDirectory = None,
    port: Port = None,
    set_values: SetOption = None,
) -> None:
    """Run a broker with the settings of a file.

    Flags come before the environment (PULQUE_BROKER__STORAGE__RETENTION=7d), which comes before
    the file. Prints one line when it serves, and stops cleanly on ctrl-C or SIGTERM.
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise UsageError("--config FILE is missing; to try things out, use: pulque up")
    _serve(load_for_command(config, flags_of(data, port, set_values), needs_file=True))


@broker_app.command()
def seal(
    context: typer.Context,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Close the open segment of a running broker's message log, so that it can be archived."""
    with open_client(context, url, timeout) as client:
        end = int(client.seal())
    if output is Output.JSON:
        print_json({"end": end})
    else:
        print_line(f"sealed; the next segment begins at offset {end}")


def _serve(loaded: "LoadedSettings[BrokerSettings]") -> None:
    from pulque.broker.server import run_broker
    from pulque.settings.preflight import check_world

    check_world(loaded)
    run_broker(loaded.settings, on_ready=print_ready)
